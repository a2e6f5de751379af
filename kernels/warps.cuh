// What the lanes of a warp tell each other.

#pragma once

#include "hopper.cuh"

// Of all lanes: neighbours first, or those that are far apart.
template <bool far> __device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int i = 0; i < 5; ++i) x += shuffle_xor(x, far ? 16 >> i : 1 << i);
    return x;
}

// Of so many lanes that are next to each other, a power of two.
template <int lanes> __device__ __forceinline__ float largest_of(float x) {
#pragma unroll
    for (int apart = 1; apart < lanes; apart *= 2) x = fmaxf(x, shuffle_xor(x, apart));
    return x;
}

// How many the lanes before this one have.
__device__ __forceinline__ uint32_t of_lanes_before(uint32_t x, int lane) {
    uint32_t sum = x;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const uint32_t others = shuffle_up(sum, lanes);
        sum += lane >= lanes ? others : 0;
    }
    return sum - x;
}
