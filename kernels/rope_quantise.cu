// Both queries of a layer, for Hopper: index queries rotated by RoPE and Hadamard and quantised, their gates times scale, and the
// part of MLA's that is rotated. rope_quantise.py launches it.
//
// A head has 4 or 16 lanes of a warp, which have eight values in a row of every 32 or 128. So of the seven steps of a Hadamard
// rotation, which go from neighbours to halves, two or four alone are between lanes. Values are rounded where SGLang's own sequence
// of kernels rounds them, and every product that its compiled code fuses with a sum is written as fmaf.

#include "activations.cuh"

constexpr int GROUP = 128, ROPE = 64;
constexpr int EIGHTS = GROUP / 8 / LANES;                  // of eight values that a lane has of an index head
constexpr int MLA_LANES = LANES < ROPE / 8 ? LANES : ROPE / 8;  // of a head that has the values alone that are turned
constexpr int TURNED = ROPE / 8 / MLA_LANES;               // eights of a lane that RoPE turns
constexpr int TOGETHER = 32 / LANES, MLA_TOGETHER = 32 / MLA_LANES;  // heads of a warp
constexpr int INDEX_WARPS = INDEX_HEADS / TOGETHER;        // of a row
constexpr int WARPS = THREADS / 32;
static_assert(LANES == 4 || LANES == 16);
static_assert(INDEX_HEADS % TOGETHER == 0);
constexpr float LARGEST = 448;  // of e4m3
constexpr uint32_t SHARED_BYTES = 0;

struct Queries {
    const unsigned char* query;   // bfloat16 [rows, INDEX_HEADS, GROUP], `query_row` bytes apart, heads dense
    const unsigned char* gates;   // float32, or bfloat16 where FUSED, [rows, INDEX_HEADS], `gates_row` bytes apart
    const unsigned char* q_rope;  // bfloat16 [rows, heads, ROPE], `q_rope_row` and `q_rope_head` bytes apart
    const float* cos_sin;         // [positions, ROPE], cosines first: of MLA's query
    const float* index_cos_sin;   // the same of the indexer's
    const long long* positions;   // [rows]
    uint2* quantised;             // e4m3 [rows, INDEX_HEADS, GROUP], contiguous
    float* weights;               // [rows, INDEX_HEADS], contiguous
    uint4* q_rope_out;            // bfloat16 [rows, heads, ROPE], contiguous
    long long query_row, gates_row, q_rope_row, q_rope_head;
    int heads;
    float gate_scale, softmax_scale;
};

__device__ __forceinline__ void unpack(uint32_t pair, float& low, float& high) {
    const float2 both = unpack_bf16(pair);
    low = both.x, high = both.y;
}

template <int eights, int lanes> __device__ __forceinline__ void load(const unsigned char* head, int lane, float (&x)[eights * 8]) {
#pragma unroll
    for (int i = 0; i < eights; ++i) {
        const uint4 eight = reinterpret_cast<const uint4*>(head)[i * lanes + lane];
        unpack(eight.x, x[8 * i], x[8 * i + 1]);
        unpack(eight.y, x[8 * i + 2], x[8 * i + 3]);
        unpack(eight.z, x[8 * i + 4], x[8 * i + 5]);
        unpack(eight.w, x[8 * i + 6], x[8 * i + 7]);
    }
}

__device__ __forceinline__ void load_4(const float* from, float* to) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    to[0] = __uint_as_float(four.x), to[1] = __uint_as_float(four.y);
    to[2] = __uint_as_float(four.z), to[3] = __uint_as_float(four.w);
}

// RoPE of a lane's values, in halves or neighbours. With four lanes both of a pair are its own: of two eights, or in one. With more
// it has one eight, whose partners in halves another lane has.
template <bool halves> struct Angles {
    static constexpr bool APART = halves && TURNED == 1;
    static constexpr int OF_EIGHT = halves ? 8 : 4, NUMBER = halves ? 8 : 4 * TURNED;
    float cos[NUMBER], sin[NUMBER];

    __device__ __forceinline__ Angles(const float* cos_sin, long long position, int lane) {
        const float* const cosines = cos_sin + position * ROPE + OF_EIGHT * (APART ? lane % 4 : lane % MLA_LANES);
#pragma unroll
        for (int i = 0; i < NUMBER / 4; ++i) {
            const int further = halves ? 4 * i : i * OF_EIGHT * MLA_LANES;
            load_4(cosines + further, cos + 4 * i);
            load_4(cosines + further + ROPE / 2, sin + 4 * i);
        }
    }

    // Rounded, unless SGLang's kernel goes on with it.
    template <bool round, int values> __device__ __forceinline__ void turn(int lane, float (&x)[values]) const {
        if (APART) {
            float others[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) others[i] = shuffle_xor(x[i], 4);
            if (lane >= MLA_LANES) return;
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = fmaf(cos[i], x[i], (lane < 4 ? -sin[i] : sin[i]) * others[i]);
        } else {
            if (lane >= MLA_LANES) return;
#pragma unroll
            for (int i = 0; i < NUMBER; ++i) {
                float& low = x[halves ? i : 2 * i];
                float& high = x[halves ? 8 + i : 2 * i + 1];
                const float first = fmaf(cos[i], low, -sin[i] * high);
                high = round ? fmaf(cos[i], high, sin[i] * low) : fmaf(sin[i], low, cos[i] * high);
                low = first;
            }
        }
#pragma unroll
        for (int i = 0; i < 8 * TURNED; i += 2) {
            if (round) unpack(pack_bf16(x[i], x[i + 1]), x[i], x[i + 1]);
        }
    }
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

__device__ __forceinline__ float largest_of_head(float x) {
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) x = fmaxf(x, shuffle_xor(x, lanes));
    return fmaxf(x, 1e-4f);
}

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
    const long long place = static_cast<long long>(row) * INDEX_HEADS + head, position = of.positions[row];
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

__device__ __forceinline__ void mla_head(const Queries& of, int row, int head, int lane) {
    const long long position = of.positions[row];
    float x[TURNED * 8];
    load<TURNED, MLA_LANES>(of.q_rope + row * of.q_rope_row + head * of.q_rope_head, lane, x);
    const Angles<NEOX> angles(of.cos_sin, position, lane);
    angles.template turn<true>(lane, x);
    uint4* const out = of.q_rope_out + (static_cast<long long>(row) * of.heads + head) * (ROPE / 8);
#pragma unroll
    for (int i = 0; i < TURNED; ++i) {
        const float* const eight = x + 8 * i;
        out[i * MLA_LANES + lane] = {
            pack_bf16(eight[0], eight[1]), pack_bf16(eight[2], eight[3]), pack_bf16(eight[4], eight[5]), pack_bf16(eight[6], eight[7])
        };
    }
}

// Block (row, some heads).
extern "C" __global__ void __launch_bounds__(THREADS) rope_quantise(const __grid_constant__ Queries of) {
    const int warp = blockIdx.y * WARPS + threadIdx.x / 32, in_warp = threadIdx.x % 32, row = blockIdx.x;
    const int first = (warp - INDEX_WARPS) * MLA_TOGETHER;  // of MLA's heads
    wait_for_inputs();
    if (warp < INDEX_WARPS) {
        index_head(of, row, warp * TOGETHER + in_warp / LANES, in_warp % LANES);
    } else if (first < of.heads) {  // lanes that have none do the last one once more
        mla_head(of, row, min(first + in_warp / MLA_LANES, of.heads - 1), in_warp % MLA_LANES);
    }
}
