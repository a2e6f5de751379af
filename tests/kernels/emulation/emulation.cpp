// kernel.cu as a host library, which test_sparse_decode_cuda.py calls through ctypes.

#include "../../../benchmarks/sparse_decode_cuda/kernel.cu"

extern "C" void run_attend(const Attend* a, unsigned x, unsigned y, unsigned z, int seed) {
    emulation::run({x, y, z}, THREADS, CLUSTER, seed, [=] { attend(*a); });
}

extern "C" void run_join(const Join* j, int shared, unsigned x, unsigned y, unsigned z, int seed) {
    const auto join = shared == 1 ? join1 : shared == 4 ? join4 : join8;
    emulation::run({x, y, z}, shared == 8 ? 256 : 128, 1, seed, [=] { join(*j); });
}

extern "C" int shared_bytes() { return SHARED_BYTES; }
