// Index queries of prefills, for Hopper: rotated by RoPE and Hadamard, quantised, their gates times scale. index_rows.py launches it.
//
// A warp takes eight heads of a row, four lanes each, which have eight values in a row of every 32. So of the seven steps of a
// Hadamard rotation, which go from neighbours to halves, two alone are between lanes, and RoPE is none. Values are rounded where
// SGLang's own sequence of kernels rounds them, and every product that its compiled code fuses with a sum is written as fmaf.

#include "activations.cuh"

constexpr int GROUP = 128, ROPE = 64;
constexpr int LANES = 4, EIGHTS = GROUP / 8 / LANES;  // of a head, and of eight values that each has
constexpr int TOGETHER = 32 / LANES, WARPS = THREADS / 32;  // heads of a warp, warps of a block
constexpr int WARPS_OF_ROW = HEADS / TOGETHER;
static_assert(HEADS % TOGETHER == 0);
constexpr uint32_t SHARED_BYTES = 0;

struct Queries {
    const uint4* query;    // bfloat16 [rows, HEADS, GROUP], contiguous
    const float* gates;    // [rows, HEADS], `gates_stride` apart
    const float* cos_sin;  // [positions, ROPE], cosines first
    const long long* positions;  // [rows]
    uint2* quantised;      // e4m3 [rows, HEADS, GROUP], contiguous
    float* weights;        // [rows, HEADS], contiguous
    long long gates_stride;
    int rows;
    float gate_scale, softmax_scale;
};

__device__ __forceinline__ void unpack(uint32_t pair, float& low, float& high) {
    const float2 both = unpack_bf16(pair);
    low = both.x, high = both.y;
}

__device__ __forceinline__ void load_4(const float* from, float* to) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    to[0] = __uint_as_float(four.x), to[1] = __uint_as_float(four.y);
    to[2] = __uint_as_float(four.z), to[3] = __uint_as_float(four.w);
}

// A value and its partner, rotated.
__device__ __forceinline__ void rotate(float& x, float& other, float cos, float sin) {
    const float first = fmaf(cos, x, -sin * other);
    other = fmaf(cos, other, sin * x);
    x = first;
    unpack(pack_bf16(x, other), x, other);
}

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

extern "C" __global__ void __launch_bounds__(THREADS) index_queries(const __grid_constant__ Queries of) {
    wait_for_inputs();
    const int warp = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % LANES;
    const int row = warp / WARPS_OF_ROW;
    if (row >= of.rows) return;
    const int head = warp % WARPS_OF_ROW * TOGETHER + threadIdx.x % 32 / LANES;
    const long long place = static_cast<long long>(row) * HEADS + head;

    float x[EIGHTS * 8];
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        const uint4 eight = of.query[place * (GROUP / 8) + i * LANES + lane];
        unpack(eight.x, x[8 * i], x[8 * i + 1]);
        unpack(eight.y, x[8 * i + 2], x[8 * i + 3]);
        unpack(eight.z, x[8 * i + 4], x[8 * i + 5]);
        unpack(eight.w, x[8 * i + 6], x[8 * i + 7]);
    }

    // Of the angles that its values have: those of a lane's own eight dimensions, or of every other one of two eights.
    const float* cosines = of.cos_sin + of.positions[row] * ROPE + (NEOX ? 8 : 4) * lane;
    float cos[8], sin[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        load_4(cosines + i * (NEOX ? 4 : ROPE / 4), cos + 4 * i);
        load_4(cosines + i * (NEOX ? 4 : ROPE / 4) + ROPE / 2, sin + 4 * i);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (NEOX) {
            rotate(x[i], x[8 + i], cos[i], sin[i]);
        } else {
            rotate(x[2 * i], x[2 * i + 1], cos[i], sin[i]);
        }
    }

    sum_and_difference<1>(x);
    sum_and_difference<2>(x);
    sum_and_difference<4>(x);
    sum_and_difference_of_lanes<1>(x);
    sum_and_difference_of_lanes<2>(x);
    sum_and_difference<8>(x);
    sum_and_difference<16>(x);

    uint32_t pairs[EIGHTS * 4];
    float largest = 0;
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; ++i) {
        pairs[i] = pack_bf16(x[2 * i] * 0.08838834764831845f, x[2 * i + 1] * 0.08838834764831845f);
        float low, high;
        unpack(pairs[i], low, high);
        largest = fmaxf(largest, fmaxf(fabsf(low), fabsf(high)));
    }
    largest = fmaxf(largest, shuffle_xor(largest, 1));
    largest = fmaxf(fmaxf(largest, shuffle_xor(largest, 2)), 1e-4f);
    // The next power of two. SGLang rounds a logarithm up: no bfloat16 over 448 is so close above a power of two that its
    // logarithm would be less.
    const uint32_t exponent = exponent_above(exact_scale(largest).scale), inverse = (254 - exponent) << 7;  // as bfloat16
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        uint32_t fours[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float a, b, c, d;
            unpack(multiply_bf16(pairs[4 * i + 2 * j], inverse | inverse << 16), a, b);
            unpack(multiply_bf16(pairs[4 * i + 2 * j + 1], inverse | inverse << 16), c, d);
            fours[j] = pack_fp8(a, b) | pack_fp8(c, d) << 16;
        }
        of.quantised[place * (GROUP / 8) + i * LANES + lane] = {fours[0], fours[1]};
    }
    if (lane == 0) {
        const float gate = of.gates[row * of.gates_stride + head];
        of.weights[place] = gate * of.gate_scale * __uint_as_float(exponent << 23) * of.softmax_scale;
    }
}
