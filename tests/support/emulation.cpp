// A source of kernels/ for the host: the groups of a grid one after the other, the blocks of a group together, or a few at a time.
#include SOURCE

#ifndef BLOCKS_AT_ONCE
#define BLOCKS_AT_ONCE width
#endif
#ifndef CLUSTER
#define CLUSTER 2
#endif

extern "C" void run(const ARGUMENTS* arguments, unsigned width, unsigned height, unsigned seed) {
    emulation::chance.seed(seed);
    emulation::kernel = [=] { KERNEL(*arguments); };
    emulation::grid = {width, height, 1};
    emulation::threads = THREADS;
    emulation::cluster = CLUSTER;  // which emulators that a process has loaded before may have set
    for (unsigned y = 0; y < height; ++y) {
        for (unsigned begin = 0; begin < width; begin += BLOCKS_AT_ONCE) {
            std::vector<dim3> blocks;
            for (unsigned x = begin; x < std::min(width, begin + BLOCKS_AT_ONCE); ++x) blocks.push_back({x, y, 0});
            emulation::run_blocks(blocks);
        }
    }
}
extern "C" unsigned shared_bytes() { return SHARED_BYTES; }
