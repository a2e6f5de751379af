// kernels/sparse_verify.cu for the host: every block of a grid, one after the other.
#include SOURCE

extern "C" void run(const Attend* arguments, unsigned width, unsigned height, unsigned seed) {
    emulation::chance.seed(seed);
    emulation::kernel = [=] { attend(*arguments); };
    for (unsigned y = 0; y < height; ++y) {
        for (unsigned x = 0; x < width; ++x) {
            emulation::block = {x, y, 0};
            emulation::run_block(THREADS);
        }
    }
}
extern "C" unsigned shared_bytes() { return SHARED_BYTES; }
