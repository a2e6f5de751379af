// Both queries of a layer, for Hopper: index queries rotated by RoPE and Hadamard and quantised, their gates times scale, and the
// part of MLA's that is rotated. rope_quantise.py launches it.
//
// A head has 4 or 16 lanes of a warp, which have eight values in a row of every 32 or 128. So of the seven steps of a Hadamard
// rotation, which go from neighbours to halves, two or four alone are between lanes. Values are rounded where SGLang's own sequence
// of kernels rounds them, and every product that its compiled code fuses with a sum is written as fmaf.

#include "rope.cuh"
#include "warps.cuh"

constexpr int EIGHTS = GROUP / 8 / LANES;       // of eight values that a lane has of an index head
constexpr int TOGETHER = 32 / LANES;            // index heads of a warp
constexpr int INDEX_WARPS = INDEX_HEADS / TOGETHER;        // of a row
constexpr int WARPS = THREADS / 32;
static_assert(INDEX_HEADS % TOGETHER == 0);
constexpr float LARGEST = 448;  // of e4m3
constexpr uint32_t SHARED_BYTES = 0;

struct Queries {
    const unsigned char* query;   // bfloat16 [rows, INDEX_HEADS, GROUP], `query_row` bytes apart, heads dense
    const unsigned char* gates;   // float32, or bfloat16 where FUSED, [rows, INDEX_HEADS], `gates_row` bytes apart
    const float* index_cos_sin;   // [positions, ROPE], cosines first
    uint2* quantised;             // e4m3 [rows, INDEX_HEADS, GROUP], contiguous
    float* weights;               // [rows, INDEX_HEADS], contiguous
    long long query_row, gates_row;
    float gate_scale, softmax_scale;
    Turned mla;
};

// The sum and the difference of values `apart` from each other, in their places.
template <int apart> __device__ __forceinline__ void sum_and_difference(float (&x)[EIGHTS * 8]) {
#pragma unroll
    for (int i = 0; i < EIGHTS * 8; ++i) {
        if (i & apart) continue;
        const float low = x[i], high = x[i + apart];
        x[i] = low + high;
        x[i + apart] = low - high;
    }
}

// The same of values that another lane has.
template <int lanes> __device__ __forceinline__ void sum_and_difference_of_lanes(float (&x)[EIGHTS * 8]) {
    const float sign = threadIdx.x & lanes ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < EIGHTS * 8; ++i) x[i] = fmaf(sign, x[i], shuffle_xor(x[i], lanes));
}

__device__ __forceinline__ float largest_of_head(float x) { return fmaxf(largest_of<LANES>(x), 1e-4f); }

// The rotated values of an index head in e4m3, eight after eight as uint2; returns their scale.
#if FUSED
__device__ __forceinline__ float quantise(const float (&x)[EIGHTS * 8], uint2 (&out)[EIGHTS]) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < EIGHTS * 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
    const float scale = largest_of_head(largest) / LARGEST, inverse = 1 / scale;
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        const float* const eight = x + 8 * i;
        out[i].x = pack_fp8(eight[0] * inverse, eight[1] * inverse) | pack_fp8(eight[2] * inverse, eight[3] * inverse) << 16;
        out[i].y = pack_fp8(eight[4] * inverse, eight[5] * inverse) | pack_fp8(eight[6] * inverse, eight[7] * inverse) << 16;
    }
    return scale;
}
#else
__device__ __forceinline__ float quantise(float (&x)[EIGHTS * 8], uint2 (&out)[EIGHTS]) {
    sum_and_difference<1>(x);
    sum_and_difference<2>(x);
    sum_and_difference<4>(x);
    sum_and_difference_of_lanes<1>(x);
    sum_and_difference_of_lanes<2>(x);
#if LANES == 4
    sum_and_difference<8>(x);
    sum_and_difference<16>(x);
#else
    sum_and_difference_of_lanes<4>(x);
    sum_and_difference_of_lanes<8>(x);
#endif
    uint32_t pairs[EIGHTS * 4];
    float largest = 0;
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; ++i) {
        pairs[i] = pack_bf16(x[2 * i] * 0.08838834764831845f, x[2 * i + 1] * 0.08838834764831845f);
        float low, high;
        unpack(pairs[i], low, high);
        largest = fmaxf(largest, fmaxf(fabsf(low), fabsf(high)));
    }
    // The next power of two. SGLang rounds a logarithm up: no bfloat16 over 448 is so close above a power of two that its
    // logarithm would be less.
    const uint32_t exponent = exponent_above(largest_of_head(largest) * (1 / LARGEST));
    const uint32_t inverse = (254 - exponent) << 7, both = inverse | inverse << 16;  // as bfloat16
    const auto two = [&](int pair) {
        float low, high;
        unpack(multiply_bf16(pairs[pair], both), low, high);
        return pack_fp8(low, high);
    };
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        out[i] = {two(4 * i) | two(4 * i + 1) << 16, two(4 * i + 2) | two(4 * i + 3) << 16};
    }
    return __uint_as_float(exponent << 23);
}
#endif

__device__ __forceinline__ void index_head(const Queries& of, int row, int head, int lane) {
    const long long place = static_cast<long long>(row) * INDEX_HEADS + head, position = of.mla.positions[row];
    const unsigned char* const gates = of.gates + row * of.gates_row;
#if FUSED
    const float gate = __uint_as_float(static_cast<uint32_t>(reinterpret_cast<const unsigned short*>(gates)[head]) << 16);
#else
    const float gate = reinterpret_cast<const float*>(gates)[head];
#endif
    float x[EIGHTS * 8];
    load<EIGHTS, LANES>(of.query + row * of.query_row + head * (GROUP * 2), lane, x);
    const Angles<INDEX_NEOX> angles(of.index_cos_sin, position, lane);
    angles.template turn<!FUSED>(lane, x);
    uint2 eights[EIGHTS];
    const float scale = quantise(x, eights);
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) of.quantised[place * (GROUP / 8) + i * LANES + lane] = eights[i];
    // In FUSED `gate_scale` holds the other one too.
    if (lane == 0) of.weights[place] = FUSED ? gate * of.gate_scale * scale : gate * of.gate_scale * scale * of.softmax_scale;
}

// Block (row, some heads).
extern "C" __global__ void __launch_bounds__(THREADS) rope_quantise(const __grid_constant__ Queries of) {
    const int warp = blockIdx.y * WARPS + threadIdx.x / 32, in_warp = threadIdx.x % 32, row = blockIdx.x;
    const int first = (warp - INDEX_WARPS) * MLA_TOGETHER;  // of MLA's heads
    wait_for_inputs();
    if (warp < INDEX_WARPS) {
        index_head(of, row, warp * TOGETHER + in_warp / LANES, in_warp % LANES);
    } else if (first < of.mla.heads) {
        turn_heads(of.mla, row, first, in_warp);
    }
}
