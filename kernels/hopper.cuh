// What Hopper GPUs have in PTX alone, a function each. With EMULATE a host compiler takes emulation.h in its place.

#pragma once

#ifdef EMULATE
#include "emulation.h"
#else

#ifdef __CUDACC_RTC__
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#define SHARED_MEMORY(name) extern __shared__ unsigned char name[]

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The kernel behind this one may begin, as far as it waits for no inputs.
__device__ __forceinline__ void let_others_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Orders this thread's accesses to shared memory before those of tensor cores that come after the next barrier.
__device__ __forceinline__ void fence_before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Sixteen bytes, or zeros where they are not there.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Four bytes, likewise.
__device__ __forceinline__ void copy_4(uint32_t to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Waits for `threads` of the block; each of a few `number`s is for other ones.
template <int number, int threads> __device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(number), "n"(threads) : "memory");
}

__device__ __forceinline__ void start_barrier(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Once what this thread has copied until now has landed.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Until all have arrived for the `turn`th time.
__device__ __forceinline__ void wait_for_turn(uint32_t barrier, uint32_t turn) {
    asm volatile(
        "{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra wait;\n}" ::"r"(barrier),
        "r"(turn & 1)
        : "memory");
}

// Of blocks that run on neighbouring SMs and reach each other's shared memory.
#define CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)

__device__ __forceinline__ int cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

// All threads of the cluster meet, and see the barriers that any of them has started; in two, for what threads do between.
__device__ __forceinline__ void arrive_in_cluster() {
    asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ __forceinline__ void meet_cluster() {
    arrive_in_cluster();
    wait_for_cluster();
}

// At the barrier that lies there in that block of the cluster. What this thread wrote need not be seen there: that would take a
// fence of the whole GPU.
__device__ __forceinline__ void arrive_at(uint32_t barrier, int rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// What a block of the cluster has at that address.
__device__ __forceinline__ uint2 load_shared_2_of(uint32_t address, int rank) {
    uint2 x;
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %2, %3;\nld.shared::cluster.v2.u32 {%0, %1}, [there];\n}"
        : "=r"(x.x), "=r"(x.y)
        : "r"(address), "r"(rank)
        : "memory");
    return x;
}

// At that address of a block of the cluster, which is there.
__device__ __forceinline__ void store_shared_of(uint32_t address, uint32_t x, int rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %2;\nst.shared::cluster.u32 [there], %1;\n}" ::"r"(address),
        "r"(x), "r"(rank)
        : "memory");
}

// Shared memory of this block to where it says in that block of the cluster; the bytes come to the barrier that lies there.
__device__ __forceinline__ void copy_shared_to(int rank, uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "{\n.reg .b32 there, arrival;\nmapa.shared::cluster.u32 there, %0, %4;\nmapa.shared::cluster.u32 arrival, %3, %4;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %2, [arrival];\n}" ::"r"(to),
        "r"(from), "r"(bytes), "r"(barrier), "r"(rank)
        : "memory");
}

// The barrier's turn ends once so many bytes have come, too.
__device__ __forceinline__ void arrive_before_bytes(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// What the driver encodes of a tensor in boxes, as an argument of a kernel.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// A box of 128 bytes of each row, swizzled, whose first value is at (row, column); its bytes come to the barrier.
__device__ __forceinline__ void copy_tile(uint32_t to, const TensorMap& from, int column, int row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&from), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same, to both blocks of the cluster, where the tile and the barrier lie at the same places.
__device__ __forceinline__ void copy_tile_to_both(uint32_t to, const TensorMap& from, int column, int row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&from), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<unsigned short>(3))
        : "memory");
}

template <int registers> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers> __device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ float load_shared_float(uint32_t address) { return __uint_as_float(load_shared(address)); }

__device__ __forceinline__ uint2 load_shared_2(uint32_t address) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ uint4 load_shared_4(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared_2(uint32_t address, uint2 x) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ uint32_t load_shared_half(uint32_t address) {
    unsigned short x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void store_shared_half(uint32_t address, uint32_t x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<unsigned short>(x)) : "memory");
}

// Without a branch, which would take longer than the store.
__device__ __forceinline__ void store_shared_half_if(bool stored, uint32_t address, uint32_t x) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.shared.u16 [%0], %1;\n}" ::"r"(address),
                 "h"(static_cast<unsigned short>(x)), "r"(static_cast<int>(stored))
                 : "memory");
}

__device__ __forceinline__ void store_shared_byte_if(bool stored, uint32_t address, uint32_t x) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.shared.u8 [%0], %1;\n}" ::"r"(address), "r"(x),
                 "r"(static_cast<int>(stored))
                 : "memory");
}

// What was there, 16 bits; `x` is stored where that is `expected`.
__device__ __forceinline__ uint32_t swap_shared_half(uint32_t address, uint32_t expected, uint32_t x) {
    unsigned short old;
    asm volatile("atom.shared.cas.b16 %0, [%1], %2, %3;"
                 : "=h"(old)
                 : "r"(address), "h"(static_cast<unsigned short>(expected)), "h"(static_cast<unsigned short>(x))
                 : "memory");
    return old;
}

__device__ __forceinline__ void or_shared(uint32_t address, uint32_t bits) {
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}

// What this block wrote is there for whoever sees the counter.
__device__ __forceinline__ uint32_t add_to_counter(uint32_t* counter, uint32_t x) {
    uint32_t old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(x) : "memory");
    return old;
}

__device__ __forceinline__ uint32_t load_counter(const uint32_t* counter) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
    return x;
}

__device__ __forceinline__ uint32_t load_list(const uint32_t* from) {
    uint32_t x;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

// Sixteen bytes that nobody reads again, and that are asked for here: of others below the compiler may put the instruction behind a
// wait, and it does where that saves registers.
__device__ __forceinline__ uint4 load_early(const void* from) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

// Sixteen bytes that nobody reads again and nobody writes meanwhile.
__device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

// Sixteen bytes that other blocks of this launch have written.
__device__ __forceinline__ uint4 load_written(const void* from) {
    uint4 x;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
    return x;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Two values as e4m3, the largest where one is larger.
__device__ __forceinline__ uint32_t pack_fp8(float low, float high) {
    unsigned short packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Two products in bfloat16.
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
    uint32_t x;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}

// Two products in bfloat16, each added to and rounded once.
__device__ __forceinline__ uint32_t multiply_add_bf16(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t x;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
    return x;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float divide_fast(float a, float b) {
    float x;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}

// As Triton divides unless told otherwise.
__device__ __forceinline__ float divide_full(float a, float b) {
    float x;
    asm("div.full.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}

// Between -most and most, as Triton clamps to such bounds: what is no number becomes `most`, with its sign.
__device__ __forceinline__ float clamped(float x, float most) {
    float clamp;
    asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(clamp) : "f"(x), "f"(most));
    return clamp;
}

__device__ __forceinline__ float rsqrt_fast(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }

// Of the lane that is `lanes` before; of this one where there is none.
__device__ __forceinline__ uint32_t shuffle_up(uint32_t x, int lanes) { return __shfl_up_sync(0xffffffffu, x, lanes); }

__device__ __forceinline__ uint32_t shuffle_from(uint32_t x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ __forceinline__ uint32_t warp_ballot(bool x) { return __ballot_sync(0xffffffffu, x); }

__device__ __forceinline__ uint32_t warp_or(uint32_t x) {
    uint32_t all;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(all) : "r"(x));
    return all;
}

__device__ __forceinline__ uint32_t warp_least(uint32_t x) {
    uint32_t least;
    asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(least) : "r"(x));
    return least;
}

__device__ __forceinline__ uint32_t warp_most(uint32_t x) {
    uint32_t most;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(x));
    return most;
}

__device__ __forceinline__ void sync_warp() { __syncwarp(); }

// The same, but what is made from it is made where it is needed, rather than kept in registers.
__device__ __forceinline__ uint32_t made_again(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Four values in e4m3 as two pairs in float16, which has them all.
__device__ __forceinline__ uint2 unpack_fp8(uint32_t four) {
    uint2 pairs;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(pairs.x), "=r"(pairs.y)
        : "r"(four));
    return pairs;
}

// d += A [16, 16] . B [8, 16]^T in float16, by a warp. Of A a lane has two values of rows lane / 4 and 8 further, from
// 2 (lane % 4) on and 8 further; of B likewise of row lane / 4; of d, columns 2 (lane % 4) and the next one of A's rows.
__device__ __forceinline__ void multiply_few_half(
    float (&d)[4], uint32_t upper, uint32_t lower, uint32_t upper_far, uint32_t lower_far, uint32_t b, uint32_t b_far
) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(upper), "r"(lower), "r"(upper_far), "r"(lower_far), "r"(b), "r"(b_far));
}

// The same in bfloat16.
__device__ __forceinline__ void multiply_few_bf16(
    float (&d)[4], uint32_t upper, uint32_t lower, uint32_t upper_far, uint32_t lower_far, uint32_t b, uint32_t b_far
) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(upper), "r"(lower), "r"(upper_far), "r"(lower_far), "r"(b), "r"(b_far));
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `left` of those that were committed last are not there yet.
template <int left> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

#define OF_8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// d (+)= A [64, 16] . B [16, 16]^T, both K-major.
__device__ __forceinline__ void score(float (&d)[8], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0;\n}"
        : OF_8(d, 0)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d (+)= A [64, 16] . B [32, 16]^T, both K-major.
__device__ __forceinline__ void score(float (&d)[16], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d (+)= A [64, 16] . B [64, 16]^T, both K-major.
__device__ __forceinline__ void score(float (&d)[32], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;\n}"
        : OF_8(d, 0), OF_8(d, 8), OF_8(d, 16), OF_8(d, 24)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d (+)= A [64, 16] . B [128, 16]^T, both K-major.
__device__ __forceinline__ void score(float (&d)[64], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n}"
        : OF_8(d, 0), OF_8(d, 8), OF_8(d, 16), OF_8(d, 24), OF_8(d, 32), OF_8(d, 40), OF_8(d, 48), OF_8(d, 56)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d (+)= A [64, 32] . B [16, 32]^T, both K-major, in e4m3.
__device__ __forceinline__ void multiply_fp8(float (&d)[8], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1;\n}"
        : OF_8(d, 0)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d (+)= A [64, 32] . B [32, 32]^T, both K-major, in e4m3.
__device__ __forceinline__ void multiply_fp8(float (&d)[16], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1;\n}"
        : OF_8(d, 0), OF_8(d, 8)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d (+)= A [64, 32] . B [64, 32]^T, both K-major, in e4m3.
__device__ __forceinline__ void multiply_fp8(float (&d)[32], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1;\n}"
        : OF_8(d, 0), OF_8(d, 8), OF_8(d, 16), OF_8(d, 24)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d (+)= A [64, 32] . B [96, 32]^T, both K-major, in e4m3.
__device__ __forceinline__ void multiply_fp8(float (&d)[48], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, %48, %49, p, 1, 1;\n}"
        : OF_8(d, 0), OF_8(d, 8), OF_8(d, 16), OF_8(d, 24), OF_8(d, 32), OF_8(d, 40)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d (+)= A [64, 32] . B [128, 32]^T, both K-major, in e4m3.
__device__ __forceinline__ void multiply_fp8(float (&d)[64], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1;\n}"
        : OF_8(d, 0), OF_8(d, 8), OF_8(d, 16), OF_8(d, 24), OF_8(d, 32), OF_8(d, 40), OF_8(d, 48), OF_8(d, 56)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d += A [64, 16] . B [16, 256]: A is K-major, and B's columns lie next to each other.
__device__ __forceinline__ void weigh(float (&d)[128], uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, 1, 1, 1, 0, 1;"
        : OF_8(d, 0), OF_8(d, 8), OF_8(d, 16), OF_8(d, 24), OF_8(d, 32), OF_8(d, 40), OF_8(d, 48), OF_8(d, 56), OF_8(d, 64),
          OF_8(d, 72), OF_8(d, 80), OF_8(d, 88), OF_8(d, 96), OF_8(d, 104), OF_8(d, 112), OF_8(d, 120)
        : "l"(a), "l"(b));
}
#endif

#ifdef STAMPS
// Of each block, when its first thread came by each of its marks: cycles of its multiprocessor, and nanoseconds. What
// benchmarks/tuning/phases.py compiles has them, and no server does.
extern "C" __device__ uint64_t stamps[160][STAMPS][2];
#endif

template <int mark> __device__ __forceinline__ void stamp() {
#ifdef STAMPS
    if (threadIdx.x != 0) return;
    uint64_t* const to = stamps[blockIdx.y * gridDim.x + blockIdx.x][mark];
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(to[0])::"memory");
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(to[1])::"memory");
#endif
}
