// Behind a layer's first products, for Hopper: the query's latent normed and quantised, KV and index keys written to their caches.
// norm_rope_store.py launches it.
//
// A block is a warp, and takes one of three parts of a row. Values are rounded where SGLang's own sequence of kernels rounds them, sums go in its
// order (FlashInfer's norms for Hopper, 0.6.15 and 0.7.2: a lane takes its own values from left to right, then lanes meet), and
// every product that its compiled code fuses with a sum is written as fmaf.

#include "eights.cuh"

constexpr int ROPE = 64, PAGE = 64, INDEX_PAGE_BYTES = PAGE * (GROUP + 4);
constexpr int OF_WARP = 32 * EIGHTS;  // values that a warp takes of a row at once
constexpr float LARGEST = 448;  // of e4m3
static_assert(Q_RANK % OF_WARP == 0 && LATENT % OF_WARP == 0, "lanes have as many values each");
constexpr uint32_t SHARED_BYTES = 0;

struct Store {
    const unsigned char* qkv;   // bfloat16 [rows, Q_RANK + LATENT + ROPE], `qkv_row` bytes apart
    const unsigned char* key;   // bfloat16 [rows, GROUP], `key_row` bytes apart: index keys before their norm
    const uint4* q_norm;        // bfloat16 [Q_RANK]
    const uint4* latent_norm;   // bfloat16 [LATENT]
    const float* key_norm;      // [GROUP]
    const float* key_bias;      // [GROUP]
    const float* cos_sin;       // [positions, ROPE], cosines first
    const float* index_cos_sin; // [positions, ROPE]
    const long long* positions; // [rows]
    const long long* slots;     // [rows], `slots_stride` apart
    unsigned char* q;           // e4m3 where Q_FP8, or bfloat16 [rows, Q_RANK], contiguous
    float* q_scales;            // [rows, Q_RANK / GROUP], strides below; written where Q_FP8
    unsigned char* kv;          // [slots], `kv_slot` bytes apart: bfloat16 [LATENT + ROPE], or where KV_FP8 as SGLang packs them
    unsigned char* index;       // [pages, INDEX_PAGE_BYTES]: keys of a page in e4m3, then their scales
    long long qkv_row, key_row, slots_stride, q_scales_row, q_scales_group, kv_slot;
    float q_eps, latent_eps, key_eps;
    int first, before_ours;  // `first`: of the parts of a row that this launch has
};

// A row of `width` values, of which a lane has eight of every OF_WARP, and weights of as many.
template <int width> struct Row {
    static constexpr int TIMES = width / OF_WARP;
    uint4 values[TIMES];

    __device__ __forceinline__ Row(const void* from, int lane) {
#pragma unroll
        for (int i = 0; i < TIMES; ++i) values[i] = reinterpret_cast<const uint4*>(from)[i * 32 + lane];
    }

    // 1 over the root of the mean square.
    __device__ __forceinline__ float reciprocal_rms(float eps) const {
        float total = 0;
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
            const Eight eight(values[i]);
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j) total = fmaf(eight.x[j], eight.x[j], total);
        }
        return rsqrt_fast(sum_of_lanes<false>(total) / width + eps);
    }

    // Eight of its values normed and rounded, as pairs of bfloat16.
    __device__ __forceinline__ uint4 normed(const Row& weight, float rstd, int i) const {
        const Eight x(values[i]), w(weight.values[i]);
        const auto pair = [&](int j) { return pack_bf16(x.x[j] * rstd * (w.x[j] + 0.0f), x.x[j + 1] * rstd * (w.x[j + 1] + 0.0f)); };
        return {pair(0), pair(2), pair(4), pair(6)};
    }
};

__device__ __forceinline__ void norm_query(const Store& of, long long row, int lane, const Row<Q_RANK>& weight) {
    const Row<Q_RANK> raw(of.qkv + row * of.qkv_row, lane);
    const float rstd = raw.reciprocal_rms(of.q_eps);
#pragma unroll
    for (int i = 0; i < raw.TIMES; ++i) {
        const uint4 normed = raw.normed(weight, rstd, i);
#if Q_FP8
        Eight x(normed);
        const Scale scale = scale_of<Q_POWERS>(largest_of_group(x));
        x *= scale.inverse;
        reinterpret_cast<uint2*>(of.q + row * Q_RANK)[i * 32 + lane] = x.in_fp8();
        const int group = i * (OF_WARP / GROUP) + lane / LANES_OF_GROUP;
        if (lane % LANES_OF_GROUP == 0) of.q_scales[row * of.q_scales_row + group * of.q_scales_group] = scale.scale;
#else
        reinterpret_cast<uint4*>(of.q + row * (Q_RANK * 2))[i * 32 + lane] = normed;
#endif
    }
}

// RoPE of a lane's two neighbours of the ROPE values of a row, in halves or as neighbours, rounded.
struct Angles {
    float2 cos, sin;

    __device__ __forceinline__ Angles(const float* cos_sin, int lane) {
#if NEOX
        cos = reinterpret_cast<const float2*>(cos_sin)[lane % 16];
        sin = reinterpret_cast<const float2*>(cos_sin + ROPE / 2)[lane % 16];
#else
        cos.x = cos_sin[lane];
        sin.x = cos_sin[ROPE / 2 + lane];
#endif
    }

    __device__ __forceinline__ uint32_t turned(uint32_t pair, int lane) const {
        const float2 x = unpack_bf16(pair);
#if NEOX
        const float sign = lane < 16 ? -1.0f : 1.0f, other_low = shuffle_xor(x.x, 16), other_high = shuffle_xor(x.y, 16);
        return pack_bf16(fmaf(cos.x, x.x, sign * sin.x * other_low), fmaf(cos.y, x.y, sign * sin.y * other_high));
#else
        return pack_bf16(fmaf(cos.x, x.x, -sin.x * x.y), fmaf(cos.x, x.y, sin.x * x.x));
#endif
    }
};

__device__ __forceinline__ void write_kv(const Store& of, long long row, int lane, const Row<LATENT>& weight) {
    long long slot = of.slots[row * of.slots_stride];
    const long long position = of.positions[row];
    const unsigned char* const from = of.qkv + row * of.qkv_row + Q_RANK * 2;
    const Row<LATENT> raw(from, lane);
    const uint32_t pair = reinterpret_cast<const uint32_t*>(from + LATENT * 2)[lane];
    const Angles angles(of.cos_sin + position * ROPE, lane);
    const float rstd = raw.reciprocal_rms(of.latent_eps);
    // Slot 0 is padding's: SGLang's write of KV skips it, its write of index keys does not.
    const bool real = slot != 0 && slot % RANKS == RANK;
    slot /= RANKS;
    unsigned char* const kv = of.kv + slot * of.kv_slot;
#pragma unroll
    for (int i = 0; i < raw.TIMES; ++i) {
        const uint4 normed = raw.normed(weight, rstd, i);
#if KV_FP8
        Eight x(normed);
        const float scale = divide_full(largest_of_group(x), LARGEST), inverse = divide_full(1, scale);
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j) x.x[j] = clamped(x.x[j] * inverse, LARGEST);
        if (!real) continue;
        reinterpret_cast<uint2*>(kv)[i * 32 + lane] = x.in_fp8();
        const int group = i * (OF_WARP / GROUP) + lane / LANES_OF_GROUP;
        if (lane % LANES_OF_GROUP == 0) reinterpret_cast<float*>(kv + LATENT)[group] = scale;
#else
        if (real) reinterpret_cast<uint4*>(kv)[i * 32 + lane] = normed;
#endif
    }
    const uint32_t rotated = angles.turned(pair, lane);
    constexpr int ROPE_AT = KV_FP8 ? LATENT + LATENT / GROUP * 4 : LATENT * 2;
    if (real) reinterpret_cast<uint32_t*>(kv + ROPE_AT)[lane] = rotated;
}

// What a lane has of an index key: four values in a row.
struct Four {
    float x[4];
};

__device__ __forceinline__ Four load_4(const float* from, int lane) {
    const uint4 four = reinterpret_cast<const uint4*>(from)[lane];
    return {__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z), __uint_as_float(four.w)};
}

__device__ __forceinline__ float through_bf16(float x) { return rounded(x, 0).x; }

// RoPE of the first half of a key. Where INDEX_FUSED it goes on in float32, and the sine's product is the fused one of a second value.
struct KeyAngles {
    Four cos, sin;  // of neighbours two each

    __device__ __forceinline__ KeyAngles(const float* cos_sin, int lane) {
#if INDEX_NEOX
        cos = load_4(cos_sin, lane % 8);
        sin = load_4(cos_sin + ROPE / 2, lane % 8);
#else
        const float2 two = reinterpret_cast<const float2*>(cos_sin)[lane % 16];
        const float2 sines = reinterpret_cast<const float2*>(cos_sin + ROPE / 2)[lane % 16];
        cos.x[0] = two.x, cos.x[1] = two.y, sin.x[0] = sines.x, sin.x[1] = sines.y;
#endif
    }

    __device__ __forceinline__ void turn(int lane, Four& key) const {
#if INDEX_NEOX
        Four other;
#pragma unroll
        for (int i = 0; i < 4; ++i) other.x[i] = shuffle_xor(key.x[i], 8);
        if (lane >= 16) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) key.x[i] = fmaf(cos.x[i], key.x[i], (lane < 8 ? -sin.x[i] : sin.x[i]) * other.x[i]);
#else
        if (lane >= 16) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float low = key.x[2 * i], high = key.x[2 * i + 1];
            key.x[2 * i] = fmaf(cos.x[i], low, -sin.x[i] * high);
            key.x[2 * i + 1] = INDEX_FUSED ? fmaf(sin.x[i], low, cos.x[i] * high) : fmaf(cos.x[i], high, sin.x[i] * low);
        }
#endif
    }
};

__device__ __forceinline__ void sum_and_difference(float& low, float& high) {
    const float sum = low + high;
    high = low - high;
    low = sum;
}

__device__ __forceinline__ void hadamard(Four& key, int lane) {
    sum_and_difference(key.x[0], key.x[1]);
    sum_and_difference(key.x[2], key.x[3]);
    sum_and_difference(key.x[0], key.x[2]);
    sum_and_difference(key.x[1], key.x[3]);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const float sign = lane & lanes ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) key.x[i] = fmaf(sign, key.x[i], shuffle_xor(key.x[i], lanes));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) key.x[i] *= 0.08838834764831845f;
}

__device__ __forceinline__ void write_index_key(const Store& of, long long row, int lane, const Four& weight, const Four& bias) {
    const long long slot = of.slots[row * of.slots_stride], position = of.positions[row];
    const uint2 packed = reinterpret_cast<const uint2*>(of.key + row * of.key_row)[lane];
    const float2 first = unpack_bf16(packed.x), second = unpack_bf16(packed.y);
    const KeyAngles angles(of.index_cos_sin + position * ROPE, lane);
    Four key{first.x, first.y, second.x, second.y};
    const float mean = sum_of_lanes<INDEX_FUSED>(key.x[0] + key.x[1] + key.x[2] + key.x[3]) * (1.0f / GROUP);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        key.x[i] -= mean;
        squares = fmaf(key.x[i], key.x[i], squares);
    }
    const float rstd = rsqrt_fast(fmaf(sum_of_lanes<INDEX_FUSED>(squares), 1.0f / GROUP, of.key_eps));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        key.x[i] = fmaf(key.x[i] * rstd, weight.x[i], bias.x[i]);
        if (!INDEX_FUSED) key.x[i] = through_bf16(key.x[i]);
    }
    angles.turn(lane, key);
    if (!INDEX_FUSED) {
#pragma unroll
        for (int i = 0; i < 4; ++i) key.x[i] = through_bf16(key.x[i]);
        hadamard(key, lane);
    }
    float largest = 1e-4f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        key.x[i] = through_bf16(key.x[i]);
        largest = fmaxf(largest, fabsf(key.x[i]));
    }
    const float scale = largest_of<32>(largest) / LARGEST, inverse = 1 / scale;
    unsigned char* const page = of.index + slot / PAGE * INDEX_PAGE_BYTES;
    const int place = static_cast<int>(slot % PAGE);
    const auto pair = [&](int i) { return pack_fp8(clamped(key.x[i] * inverse, LARGEST), clamped(key.x[i + 1] * inverse, LARGEST)); };
    reinterpret_cast<uint32_t*>(page + place * GROUP)[lane] = pair(0) | pair(2) << 16;
    if (lane == 0) reinterpret_cast<float*>(page + PAGE * GROUP)[place] = scale;
}

// Block (row, part). Weights are nobody's to write, and are asked for before the kernel ahead has ended.
extern "C" __global__ void __launch_bounds__(32) norm_rope_store(const __grid_constant__ Store of) {
    if (of.before_ours) let_others_begin();
    const int lane = threadIdx.x, part = of.first + blockIdx.y;
    const long long row = blockIdx.x;
    if (part == 0) {
        const Row<Q_RANK> weight(of.q_norm, lane);
        wait_for_inputs();
        norm_query(of, row, lane, weight);
    } else if (part == 1) {
        const Row<LATENT> weight(of.latent_norm, lane);
        wait_for_inputs();
        write_kv(of, row, lane, weight);
    } else {
        const Four weight = load_4(of.key_norm, lane), bias = load_4(of.key_bias, lane);
        wait_for_inputs();
        write_index_key(of, row, lane, weight, bias);
    }
}
