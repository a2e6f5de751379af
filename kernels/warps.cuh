// What the lanes of a warp tell each other.

#pragma once

#include "hopper.cuh"

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
