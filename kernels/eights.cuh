// Rows of which a lane has eight values, sixteen bytes of bfloat16, and sixteen lanes a group that shares a scale.

#pragma once

#include "activations.cuh"
#include "warps.cuh"

constexpr int EIGHTS = 8;
constexpr int LANES_OF_GROUP = GROUP / EIGHTS;

struct Eight {
    float x[EIGHTS];

    __device__ __forceinline__ explicit Eight(uint4 packed) {
        const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 both = unpack_bf16(pairs[i]);
            x[2 * i] = both.x, x[2 * i + 1] = both.y;
        }
    }

    __device__ __forceinline__ uint4 packed() const {
        return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
    }

    __device__ __forceinline__ uint2 in_fp8() const {
        return {pack_fp8(x[0], x[1]) | pack_fp8(x[2], x[3]) << 16, pack_fp8(x[4], x[5]) | pack_fp8(x[6], x[7]) << 16};
    }

    __device__ __forceinline__ void operator*=(float factor) {
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) x[i] *= factor;
    }
};

__device__ __forceinline__ float largest_of_group(const Eight& eight) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) largest = fmaxf(largest, fabsf(eight.x[i]));
    return largest_of<LANES_OF_GROUP>(largest);
}

// Of a group whose largest value this is, as a product's input has it: exact, or the next power of two.
template <bool powers> __device__ __forceinline__ Scale scale_of(float largest) {
    const Scale exact = exact_scale(fmaxf(largest, 1e-10f));
    if (!powers) return exact;
    const uint32_t exponent = exponent_above(exact.scale);
    return {__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23)};
}
