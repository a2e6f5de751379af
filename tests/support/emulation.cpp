// kernels/sparse_verify.cu for the host: every cluster of a grid, one after the other.
#include SOURCE

extern "C" void run(const Attend* arguments, unsigned width, unsigned height, unsigned seed) {
    emulation::chance.seed(seed);
    emulation::kernel = [=] { attend(*arguments); };
    for (unsigned y = 0; y < height; ++y) emulation::run_cluster(width, y, THREADS);
}
extern "C" unsigned shared_bytes() { return SHARED_BYTES; }
