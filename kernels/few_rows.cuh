// How tensor cores multiply few rows: early_products.cu, early_experts.cu and router.cu.
//
// They have no FP8 for so few; products of FP8 values are exact in float16. Of 16 columns a warp has a chunk of each at a time.

#pragma once

#include "activations.cuh"

constexpr int CHUNK = 64;   // bytes of a row or a weight that four lanes have, 16 each
constexpr int OF_GROUP = GROUP / CHUNK;

// A lane has 16 bytes, its `piece`, of `row` and of 8 further in every chunk.
struct Place {
    int warp, lane, row, piece;

    __device__ __forceinline__ Place() : warp(warp_uniform(threadIdx.x / 32)), lane(threadIdx.x % 32), row(lane / 4), piece(lane % 4) {}
};

// Of four values of two columns, and of a row's in float16.
__device__ __forceinline__ void add_products(float (&sums)[4], uint32_t upper, uint32_t lower, uint2 row) {
    const uint2 u = unpack_fp8(upper), l = unpack_fp8(lower);
    multiply_few_half(sums, u.x, l.x, u.y, l.y, row.x, row.y);
}

// Of 16 values of two columns each, and of a row's in e4m3.
__device__ __forceinline__ void add_products(float (&sums)[4], const uint4& upper, const uint4& lower, const uint4& row) {
    add_products(sums, upper.x, lower.x, unpack_fp8(row.x));
    add_products(sums, upper.y, lower.y, unpack_fp8(row.y));
    add_products(sums, upper.z, lower.z, unpack_fp8(row.z));
    add_products(sums, upper.w, lower.w, unpack_fp8(row.w));
}
