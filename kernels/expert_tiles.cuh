// What sources share that multiply rows of experts in tiles: gate_up_rows.cu and down_blocks.cu.
//
// A tile has 128 rows of one expert, the choices of tokens that SGLang's order puts into a block. Two warpgroups multiply 64 rows
// each by 128 rows of weights, a third gathers what they multiply next. A block walks over tiles, so that the first steps of one are
// gathered while the one before is written. Sums of 128 products are scaled and added in float32.

#pragma once

#include "tiles.cuh"

constexpr int GROUP = 128;  // values that share a scale: 128 bytes
constexpr int ROWS = 128;
constexpr int MULTIPLYING = 256, GATHERING = 128, THREADS = MULTIPLYING + GATHERING;
constexpr int WARPS = MULTIPLYING / 32;
// Registers of each: all that the launch gives 384 threads of 168.
constexpr int MULTIPLYING_REGISTERS = 232, GATHERING_REGISTERS = 40;
// In shared memory: 128 rows of 128 bytes, whose 16-byte pieces are swizzled as tensor cores want them.
constexpr uint32_t PANEL = ROWS * 128;

// A block's tiles, one after the other: of every block of rows so many parts.
template <int parts> struct Tiles {
    int number, end;

    __device__ __forceinline__ explicit Tiles(const int* padded) : number(blockIdx.x), end(padded[0] / ROWS * parts) {}
    __device__ __forceinline__ bool is() const { return number < end; }
    __device__ __forceinline__ void next() { number += gridDim.x; }
    __device__ __forceinline__ int block() const { return number / parts; }
    __device__ __forceinline__ int part() const { return number % parts; }
};

// Steps that are there or on their way, `stages` at most, as two barriers of each tell, which lie at `at` in shared memory.
template <int stages> struct Steps {
    static constexpr uint32_t BYTES = 2 * stages * 8;
    uint32_t at;

    __device__ __forceinline__ void start() const {
#pragma unroll
        for (int step = 0; step < stages; ++step) {
            start_barrier(filled(step), GATHERING);
            start_barrier(emptied(step), WARPS);
        }
    }
    __device__ __forceinline__ static uint32_t stage(uint32_t step) { return step % stages; }
    __device__ __forceinline__ uint32_t filled(uint32_t step) const { return at + stage(step) * 8; }
    __device__ __forceinline__ uint32_t emptied(uint32_t step) const { return at + (stages + stage(step)) * 8; }
    __device__ __forceinline__ void wait_for(uint32_t step) const { wait_for_turn(filled(step), step / stages); }
    // Until what lay in its stage is multiplied.
    __device__ __forceinline__ void wait_for_room(uint32_t step) const {
        if (step >= stages) wait_for_turn(emptied(step), step / stages - 1);
    }
};

// Of a thread that gathers: one 16-byte piece of a row of a panel, and of the rows 16 further, and so on.
constexpr int OF_PASS = GATHERING / 8, PASSES = ROWS / OF_PASS;

struct Piece {
    int row, piece;

    __device__ __forceinline__ Piece() : row((threadIdx.x - MULTIPLYING) / 8), piece(threadIdx.x % 8) {}
    __device__ __forceinline__ uint32_t place() const { return row * 128 + ((piece ^ (row & 7)) << 4); }
};

// Of a thread that multiplies: what it has of a tile's products are lines `upper` and 8 further, columns 8 i + `column` and the
// next one.
struct Lines {
    int warp, lane, first, upper, column;

    __device__ __forceinline__ Lines()
        : warp(warp_uniform(threadIdx.x / 32)), lane(threadIdx.x % 32), first(warp / 4 * 64), upper(first + warp % 4 * 16 + lane / 4),
          column(lane % 4 * 2) {}
};

// Asks for the products of 64 rows and 128 rows of weights, 128 bytes each.
__device__ __forceinline__ void ask_products(float (&found)[64], uint64_t rows, uint64_t weights) {
    products_begin();
#pragma unroll
    for (int i = 0; i < GROUP / 32; ++i) multiply_fp8(found, rows + 2 * i, weights + 2 * i, i > 0);
    products_commit();
}

// Adds them, scaled by line.
__device__ __forceinline__ void add_scaled(float (&sums)[64], const float (&found)[64], float upper, float lower) {
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
        sums[i] += found[i] * upper;
        sums[i + 1] += found[i + 1] * upper;
        sums[i + 2] += found[i + 2] * lower;
        sums[i + 3] += found[i + 3] * lower;
    }
}

// What a block's threads do once barriers are started.
template <class Gather, class Multiply> __device__ __forceinline__ void divide_work(Gather gather, Multiply multiply) {
    meet<1, THREADS>();
    if (threadIdx.x >= MULTIPLYING) {
        leave_registers<GATHERING_REGISTERS>();
        gather();
    } else {
        take_registers<MULTIPLYING_REGISTERS>();
        multiply();
    }
}
