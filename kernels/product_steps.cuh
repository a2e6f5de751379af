// What sources share that multiply rows by weights which come before the rows do: tile_products.cu and row_products.cu.

#pragma once

#include "activations.cuh"
#include "tiles.cuh"
#include "turns.cuh"

struct Weight {
    const float* scales;  // [columns / GROUP, values of a row / GROUP]; of the third product null
    void* out;            // bfloat16 [rows, columns]; of the third product float32, or bfloat16 where GATES_BF16
    int columns, blocks;
};

// Two products are of block-FP8 weights. A third is of bfloat16 weights and of rows before they were quantised.
struct Products {
    TensorMap first, second;  // e4m3 [columns, values of a row] in boxes of a block's columns
    TensorMap gates;          // bfloat16, likewise
    TensorMap x;              // e4m3 [rows, values of a row] in boxes of a block's rows
    TensorMap hidden;         // bfloat16, likewise
    Weight of_first, of_second, of_gates;
    const float* x_scales;  // [rows, values of a row / GROUP], strides below
    long long row_stride, group_stride;
    int rows;
    int before_ours;  // whether the next kernel waits for this one
    int unused[6];
};

// Of a block: `count` steps of 128 bytes of the inner dimension, which lie one behind the other from `begin` on in a row's bytes; it
// begins with `first`, as blocks that want the same rows at the same time would get less of L2. A step has `columns` of weights, then
// `rows`, in one of `stages` places of `stage` bytes, whose barriers lie at `barriers`.
template <int count, int columns, int rows, int stages, uint32_t stage, uint32_t barriers> struct ProductSteps {
    uint32_t shared;
    int begin, first;

    __device__ __forceinline__ Turns<stages> turns() const { return {shared + barriers}; }
    // Which step of the part is the `step`th.
    __device__ __forceinline__ int number(uint32_t step) const {
        const int number = first + static_cast<int>(step);
        return number < count ? number : number - count;
    }
    // Where its weights are, as tensor cores are told, from `column` on; and its rows.
    __device__ __forceinline__ uint64_t weights(uint32_t step, int column) const { return tile_at(at(step) + column * 128, 16); }
    __device__ __forceinline__ uint64_t inputs(uint32_t step, int row) const { return tile_at(at(step) + (columns + row) * 128, 16); }

    // Products of the `step`th of two tiles, 32 bytes at a time.
    template <class Multiply> __device__ __forceinline__ void multiply(uint32_t step, uint64_t a, uint64_t b, Multiply product) const {
        turns().wait_for(step);
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i) product(a + 2 * i, b + 2 * i, i);
        products_commit();
        products_wait<0>();
        if (threadIdx.x % 32 == 0) arrive(turns().emptied(step));
    }

    // What one thread does: as many weights as there is room for, from `column` on,
    __device__ __forceinline__ void bring_weights(const TensorMap& map, int column) const {
        for (uint32_t step = 0; step < EARLY; ++step) bring_weights(step, map, column);
    }
    // then rows, from `row` on, and all that is missing.
    __device__ __forceinline__ void bring_inputs(const TensorMap& map, int column, const TensorMap& of_rows, int row) const {
        wait_for_inputs();
        for (uint32_t step = 0; step < EARLY; ++step) bring_inputs(step, of_rows, row);
#pragma unroll  // 32 rows behind their quantisation took 9.9 us instead of 9.4 without
        for (uint32_t step = EARLY; step < count; ++step) {
            turns().wait_for_room(step);
            bring_weights(step, map, column);
            bring_inputs(step, of_rows, row);
        }
    }

private:
    static constexpr uint32_t EARLY = count < stages ? count : stages;

    __device__ __forceinline__ uint32_t at(uint32_t step) const { return shared + turns().place(step) * stage; }
    __device__ __forceinline__ void bring_weights(uint32_t step, const TensorMap& map, int column) const {
        arrive_before_bytes(turns().filled(step), (columns + rows) * 128);
        copy_tile(at(step), map, begin + number(step) * 128, column, turns().filled(step));
    }
    __device__ __forceinline__ void bring_inputs(uint32_t step, const TensorMap& map, int row) const {
        copy_tile(at(step) + columns * 128, map, begin + number(step) * 128, row, turns().filled(step));
    }
};
