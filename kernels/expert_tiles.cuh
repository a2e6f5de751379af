// What sources share that multiply rows of experts in tiles: gate_up_rows.cu and down_blocks.cu.
//
// A tile has 128 rows of one expert, the choices of tokens that SGLang's order puts into a block, and a half of what the expert's
// weights have of columns. Two warpgroups multiply 64 rows each, a third brings what they multiply next. A block walks over tiles, so
// that the first steps of one come while the one before is written. Sums of 128 products are scaled and added in float32.
//
// L2 can give less than tensor cores could take. So two blocks, a cluster, go together: of two blocks of rows of one expert each
// brings half of the weights to both. What has no neighbour has one half of the columns in either.

#pragma once

#include "activations.cuh"
#include "tiles.cuh"
#include "turns.cuh"

constexpr int ROWS = 128;
constexpr int WIDTH = 2 * GROUP;  // of an expert
constexpr int MULTIPLYING = 256, BRINGING = 128, THREADS = MULTIPLYING + BRINGING;
constexpr int WARPS = MULTIPLYING / 32;
// Registers of each: all that the launch gives 384 threads of 168.
constexpr int MULTIPLYING_REGISTERS = 232, BRINGING_REGISTERS = 40;
// In shared memory: 128 rows of 128 bytes, whose 16-byte pieces are swizzled as tensor cores want them.
constexpr uint32_t PANEL = ROWS * 128;
constexpr int BOX = 64;  // rows of weights that come at once

// A block's tiles, one after the other. Clusters have as many turns as there are blocks of rows.
// Those of another GPU's experts are left out.
struct Tiles {
    const int* experts;
    int lane, rank, number, end;
    int expert, block, part;
    bool both;  // whether the other block of the cluster multiplies by the same weights

    __device__ __forceinline__ Tiles(const int* experts, const int* padded)
        : experts(experts), lane(threadIdx.x % 32), rank(cluster_rank()), number(blockIdx.x / 2), end(padded[0] / ROWS) {}

    // Asked by whole warps.
    __device__ __forceinline__ bool is() {
        for (; number < end; number += gridDim.x / 2) {
            expert = experts[number];
            if (expert < 0) continue;
            uint32_t begun = 0;  // a bit of every block before it that is not this expert's
            for (int other = number - 1 - lane; !begun; other -= 32) begun = warp_ballot(other < 0 || experts[other] != expert);
            const int second = (__ffs(begun) - 1) & 1;
            both = second || (number + 1 < end && experts[number + 1] == expert);
            block = both ? number - second + rank : number;
            part = both ? second : rank;
            return true;
        }
        return false;
    }
    __device__ __forceinline__ void next() { number += gridDim.x / 2; }
};

// Steps that are there or on their way, `stages` at most; both blocks of a cluster empty their places.
template <int stages, int filling> struct Steps : Turns<stages> {
    __device__ __forceinline__ void start() const { Turns<stages>::start(filling, 2 * WARPS); }
};

// Of a thread that multiplies: what it has of a tile's products are lines `upper` and 8 further, columns 8 i + `column` and the
// next one.
struct Lines {
    int warp, lane, first, upper, column;

    __device__ __forceinline__ Lines()
        : warp(warp_uniform(threadIdx.x / 32)), lane(threadIdx.x % 32), first(warp / 4 * 64), upper(first + warp % 4 * 16 + lane / 4),
          column(lane % 4 * 2) {}
};

// Brings 128 rows of weights, from `row` on, 128 bytes of each; where blocks multiply by the same, either brings half to both.
__device__ __forceinline__ void bring_weights(uint32_t to, const TensorMap& weights, int column, int row, uint32_t filled, const Tiles& tile) {
    if (tile.both) {
        const int half = tile.rank * BOX;
        copy_tile_to_both(to + half * 128, weights, column, row + half, filled);
    } else {
        copy_tile(to, weights, column, row, filled);
        copy_tile(to + BOX * 128, weights, column, row + BOX, filled);
    }
}

// Asks for the products of 64 rows and 128 rows of weights, 128 bytes each.
__device__ __forceinline__ void ask_products(float (&found)[64], uint64_t rows, uint64_t weights) {
    products_begin();
#pragma unroll
    for (int i = 0; i < GROUP / 32; ++i) multiply_fp8(found, rows + 2 * i, weights + 2 * i, i > 0);
    products_commit();
}

// What a block's threads do: bring(shared memory), or multiply(it). Barriers of its steps lie at `steps_at` there.
template <class OfSteps, class Bring, class Multiply>
__device__ __forceinline__ void divide_work(uint32_t steps_at, Bring bring, Multiply multiply) {
    SHARED_MEMORY(memory);
    wait_for_inputs();
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
    if (threadIdx.x == 0) OfSteps{{shared + steps_at}}.start();
    meet_cluster();
    if (threadIdx.x >= MULTIPLYING) {
        leave_registers<BRINGING_REGISTERS>();
        bring(shared);
    } else {
        take_registers<MULTIPLYING_REGISTERS>();
        multiply(shared);
    }
    meet_cluster();  // until then the other block may write to this one
}
