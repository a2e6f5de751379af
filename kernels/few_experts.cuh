// Experts of few tokens: early_experts.cu and experts_once.cu. Both have these arguments and quantise alike.

#pragma once

#include "activations.cuh"
#include "few_rows.cuh"

constexpr int GROUPS = HIDDEN / GROUP, GROUPS_OF_WIDTH = WIDTH / GROUP;
constexpr int EACH = CHOSEN + WITH_SHARED;  // rows of a token, the shared expert last

struct Weights {
    const unsigned char* first;   // e4m3 [experts, 2 * WIDTH, HIDDEN], gate above up
    const float* first_scales;    // [experts, 2 * WIDTH / GROUP, HIDDEN / GROUP]
    const unsigned char* second;  // e4m3 [experts, HIDDEN, WIDTH]
    const float* second_scales;   // [experts, HIDDEN / GROUP, WIDTH / GROUP]
};

struct Experts {
    Weights chosen_ones, shared_one;
    const unsigned short* x;  // bfloat16 [tokens, HIDDEN]
    const int* chosen;        // [tokens, CHOSEN], -1 where there is none
    const float* shares;      // [tokens, CHOSEN]
    unsigned short* inner;    // bfloat16 [tokens, EACH, WIDTH]: silu(gate) * up; nothing where there is none
    unsigned short* out;      // bfloat16 [tokens, HIDDEN]
    float factor;             // of the sum without the shared expert
    int tokens;
};

__device__ __forceinline__ uint2 load_2(const unsigned short* from) { return *reinterpret_cast<const uint2*>(from); }

// Four values of a group in e4m3, those of this lane, and the group's scale.
struct Quantised {
    uint32_t values;
    float scale;
};

__device__ __forceinline__ Quantised quantised_group(uint2 values, bool powers) {
    const float2 near = unpack_bf16(values.x), far = unpack_bf16(values.y);
    float largest = fmaxf(fmaxf(fmaxf(fmaxf(1e-10f, fabsf(near.x)), fabsf(near.y)), fabsf(far.x)), fabsf(far.y));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, shuffle_xor(largest, lanes));
    Scale scale = exact_scale(largest);
    if (powers) {
        const uint32_t exponent = exponent_above(scale.scale);
        scale = {__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23)};
    }
    const uint32_t low = pack_fp8(near.x * scale.inverse, near.y * scale.inverse);
    return {low | pack_fp8(far.x * scale.inverse, far.y * scale.inverse) << 16, scale.scale};
}
