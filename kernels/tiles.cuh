// How tensor cores are told of tiles in shared memory.

#pragma once

#include "hopper.cuh"

// Of 128-byte rows, swizzled: `leading` is from 64 values of 16 bits to the next 64 where a row is not along K.
__device__ __forceinline__ uint64_t tile_at(uint32_t address, uint32_t leading) {
    const uint64_t begin = (address & 0x3ffff) >> 4;
    return begin | (static_cast<uint64_t>(leading >> 4) << 16) | (static_cast<uint64_t>(1024 >> 4) << 32) | (1ull << 62);
}

__device__ __forceinline__ float higher(float a, float b) { return a > b ? a : b; }

// Of what the four threads have that share a line of a tile.
__device__ __forceinline__ float highest_of_line(float x) {
    x = higher(x, shuffle_xor(x, 1));
    return higher(x, shuffle_xor(x, 2));
}
