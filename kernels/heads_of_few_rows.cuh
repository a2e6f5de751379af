// Products of few rows of every head with a weight of the head's own, in bfloat16: head_values.cu and head_queries.cu. A warp has 16
// columns and a part of the inner dimension, all of which its registers hold before the rows are there.

#pragma once

#include "few_rows.cuh"

constexpr int ROWS = ROW_TILES * 8;

// Of the warp's columns, `bytes` of each.
template <int bytes> struct HeadWeight {
    static constexpr int CHUNKS = bytes / CHUNK;
    static_assert(bytes % CHUNK == 0);
    uint4 upper[CHUNKS], lower[CHUNKS];

    __device__ __forceinline__ HeadWeight(const unsigned char* from, long long column_bytes, const Place& of) {
        from += of.row * column_bytes + of.piece * 16;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            upper[chunk] = load_early(from + chunk * CHUNK);
            lower[chunk] = load_early(from + 8 * column_bytes + chunk * CHUNK);
        }
    }

    // Of a tile of eight rows, sums of columns `row` and 8 further, of rows 2 * `piece` and the next one.
    __device__ __forceinline__ void multiply(const uint4 (&x)[CHUNKS], float (&sums)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = 0;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            multiply_few_bf16(sums, upper[chunk].x, lower[chunk].x, upper[chunk].y, lower[chunk].y, x[chunk].x, x[chunk].y);
            multiply_few_bf16(sums, upper[chunk].z, lower[chunk].z, upper[chunk].w, lower[chunk].w, x[chunk].z, x[chunk].w);
        }
    }
};

// A lane's row of every tile, `bytes` of each: all are asked for before any is used.
template <int bytes> struct HeadRows {
    uint4 of_tile[ROW_TILES][bytes / CHUNK];

    __device__ __forceinline__ HeadRows(const unsigned char* from, long long row_bytes, int rows, const Place& of) {
        from += of.row * row_bytes + of.piece * 16;
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
            for (int chunk = 0; chunk < bytes / CHUNK; ++chunk) {
                of_tile[tile][chunk] = {0, 0, 0, 0};
                if (tile * 8 + of.row < rows) {
                    of_tile[tile][chunk] = *reinterpret_cast<const uint4*>(from + tile * 8 * row_bytes + chunk * CHUNK);
                }
            }
        }
    }
};
