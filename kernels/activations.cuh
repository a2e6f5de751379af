// How activations are rounded, opened and quantised, as SGLang's kernels hand them over to one another.

#pragma once

#include "hopper.cuh"

constexpr int GROUP = 128;  // values that share a scale

__device__ __forceinline__ float2 unpack_bf16(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}

// Through bfloat16 and back.
__device__ __forceinline__ float2 rounded(float a, float b) { return unpack_bf16(pack_bf16(a, b)); }

// Over 1 + exp(-gate).
__device__ __forceinline__ float opened(float of, float gate) {
    return divide_fast(of, 1 + exp2_fast(gate * __uint_as_float(0xbfb8aa3b)));  // times -log2(e)
}

__device__ __forceinline__ float opened(float gate) { return opened(gate, gate); }

// Of values in e4m3, and what they are multiplied by.
struct Scale {
    float scale, inverse;
};

__device__ __forceinline__ Scale exact_scale(float largest) { return {largest * (1 / 448.0f), divide_fast(448, largest)}; }

// Of the next power of two, with its bias of 127; `scale` itself may be one.
__device__ __forceinline__ uint32_t exponent_above(float scale) {
    const uint32_t bits = __float_as_uint(scale);
    return (bits >> 23) + ((bits & 0x7fffff) != 0);
}
