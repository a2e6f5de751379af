// The second product of experts of many tokens, times each choice's share, for Hopper: block FP8 in, bfloat16 out.
// down_blocks.py compiles it at run time.
//
// Rows of a tile are what gate_up_rows.cu writes, all of which shared memory keeps while weights of 128 columns after the other
// come: half of the columns. What is written goes through shared memory, so that 128 columns of a row leave in one piece.

#include "expert_tiles.cuh"

constexpr int STEPS = HIDDEN / GROUP / 2;  // of a tile: 128 columns each
static_assert(STEPS <= 32, "a lane has a step's scales");
static_assert(STEPS >= 2, "rows of a tile would come where those of the second one before it are multiplied");

// Shared memory.
constexpr int STAGES = 3;  // steps whose weights are there or on their way
constexpr uint32_t PANELS = 2 * PANEL;
constexpr uint32_t ROWS_AT = STAGES * PANELS;          // of two tiles
constexpr uint32_t WRITTEN_AT = ROWS_AT + 2 * PANELS;  // two times 128 columns of every row, in bfloat16
constexpr uint32_t STEPS_AT = WRITTEN_AT + 2 * ROWS * 256;
using OfSteps = Steps<STAGES, 1>;
constexpr uint32_t SHARED_BYTES = STEPS_AT + OfSteps::BYTES + 1024;

struct Multiply {
    TensorMap values;            // FP8 [rows, WIDTH] in boxes of 64 rows and a GROUP
    TensorMap second;            // FP8 [experts * HIDDEN, WIDTH], likewise
    const float* scales;         // [rows, 2]
    const float* second_scales;  // [experts, HIDDEN / GROUP, 2]
    const float* shares;         // [choices]
    const int* sorted;           // [rows], choices, or their number and more where a row is padding, behind its block's others
    const int* experts;          // [blocks], of an expert one behind the other; -1 where it is another GPU's
    const int* padded;           // [1], rows of all blocks
    unsigned char* out;          // bfloat16 [choices, HIDDEN]
    int choices;
};

// What one thread does, whose warp looks for tiles with it.
__device__ __forceinline__ void bring(const Multiply& a, uint32_t shared) {
    if (threadIdx.x >= MULTIPLYING + 32) return;
    const OfSteps steps{{shared + STEPS_AT}};
    uint32_t step = 0, tiles = 0;
    for (Tiles tile(a.experts, a.padded); tile.is(); tile.next(), ++tiles) {
        if (threadIdx.x != MULTIPLYING) continue;
        const uint32_t rows_to = shared + ROWS_AT + tiles % 2 * PANELS;
        const int column = tile.expert * HIDDEN + tile.part * STEPS * GROUP;
        for (int k = 0; k < STEPS; ++k, ++step) {
            steps.wait_for_room(step);
            const uint32_t to = shared + steps.place(step) * PANELS, filled = steps.filled(step);
            arrive_before_bytes(filled, k ? PANELS : 2 * PANELS);
#pragma unroll
            for (int g = 0; g < 2; ++g) {
                if (k == 0) {
#pragma unroll
                    for (int row = 0; row < ROWS; row += BOX) {
                        copy_tile(rows_to + g * PANEL + row * 128, a.values, g * GROUP, tile.block * ROWS + row, filled);
                    }
                }
                bring_weights(to + g * PANEL, a.second, g * GROUP, column + k * GROUP, filled, tile);
            }
        }
    }
}

// Where a thread writes rows of its warpgroup: a 16-byte piece of 128 columns, of every eighth row.
constexpr int WRITTEN = 8;

struct Written {
    int row, piece;
    unsigned char* to[WRITTEN];  // null where a row is padding

    __device__ __forceinline__ Written(const Multiply& a, const int* sorted, int column) : row(threadIdx.x % 128 / 16), piece(threadIdx.x % 16) {
#pragma unroll
        for (int j = 0; j < WRITTEN; ++j) {
            const int choice = sorted[row + 8 * j];
            to[j] = choice < a.choices ? a.out + (choice * static_cast<long long>(HIDDEN) + column) * 2 + 16 * piece : nullptr;
        }
    }
    template <class Values> __device__ __forceinline__ void write(int step, Values values) const {
#pragma unroll
        for (int j = 0; j < WRITTEN; ++j) {
            const uint4 found = values(row + 8 * j);
            if (to[j]) *reinterpret_cast<uint4*>(to[j] + step * GROUP * 2) = found;
        }
    }
};

// Choices of another GPU's experts are zeros.
__device__ __forceinline__ void write_zeros(const Multiply& a, int first) {
    const int end = a.padded[0] / ROWS;
    for (int block = blockIdx.x; block < end; block += gridDim.x) {
        if (a.experts[block] >= 0) continue;
        const Written out(a, a.sorted + block * ROWS + first, 0);
        for (int k = 0; k < 2 * STEPS; ++k) out.write(k, [](int) { return uint4{0, 0, 0, 0}; });
    }
}

__device__ __forceinline__ void multiply_tiles(const Multiply& a, uint32_t shared) {
    const Lines of;
    const OfSteps steps{{shared + STEPS_AT}};
    uint32_t step = 0, tiles = 0, written = 0;
    write_zeros(a, of.first);
    for (Tiles tile(a.experts, a.padded); tile.is(); tile.next(), ++tiles) {
        const int first = tile.block * ROWS + of.first, line = of.upper - of.first;
        const int* sorted = a.sorted + first;
        const Written out(a, sorted, tile.part * STEPS * GROUP);
        const bool padding = sorted[0] >= a.choices;  // all of this warpgroup's lines
        const int of_upper = sorted[line], of_lower = sorted[line + 8];
        const float upper_share = of_upper < a.choices ? a.shares[of_upper] : 0, lower_share = of_lower < a.choices ? a.shares[of_lower] : 0;
        float upper_scale[2], lower_scale[2];
        uint32_t of_weights[2];  // scales of the step of this lane's number
#pragma unroll
        for (int g = 0; g < 2; ++g) {
            upper_scale[g] = upper_share ? a.scales[(first + line) * 2 + g] * upper_share : 0;
            lower_scale[g] = lower_share ? a.scales[(first + line + 8) * 2 + g] * lower_share : 0;
            const float* of_part = a.second_scales + (tile.expert * 2 + tile.part) * (STEPS * 2) + g;
            of_weights[g] = of.lane < STEPS ? __float_as_uint(of_part[of.lane * 2]) : 0;
        }
        const uint32_t rows_at = shared + ROWS_AT + tiles % 2 * PANELS + of.first * 128;
        float low[64], high[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) low[i] = high[i] = 0;
        for (int k = 0; k < STEPS; ++k, ++step) {
            const uint32_t at = shared + steps.place(step) * PANELS, emptied = steps.emptied(step);
            steps.wait_for(step);
            if (!padding) {
                ask_products(low, tile_at(rows_at, 16), tile_at(at, 16));
                ask_products(high, tile_at(rows_at + PANEL, 16), tile_at(at + PANEL, 16));
            }
            const float of_low = __uint_as_float(shuffle_from(of_weights[0], k)), of_high = __uint_as_float(shuffle_from(of_weights[1], k));
            products_wait<0>();
            if (of.lane < 2) arrive_at(emptied, of.lane);
            if (padding) continue;
            const float upper_low = upper_scale[0] * of_low, upper_high = upper_scale[1] * of_high;
            const float lower_low = lower_scale[0] * of_low, lower_high = lower_scale[1] * of_high;
            // Two places take turns: whoever writes to one has met all who read it before.
            const uint32_t place = shared + WRITTEN_AT + written++ % 2 * (ROWS * 256);
            const uint32_t upper_at = place + of.upper * 256 + of.column * 2, swizzle = of.upper & 7;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const auto sum = [&](int j, float x, float y) { return low[4 * i + j] * x + high[4 * i + j] * y; };
                const uint32_t to = upper_at + ((i ^ swizzle) << 4);
                store_shared(to, pack_bf16(sum(0, upper_low, upper_high), sum(1, upper_low, upper_high)));
                store_shared(to + 8 * 256, pack_bf16(sum(2, lower_low, lower_high), sum(3, lower_low, lower_high)));
            }
            of.first ? meet<3, MULTIPLYING / 2>() : meet<2, MULTIPLYING / 2>();
            out.write(k, [&](int row) { return load_shared_4(place + (of.first + row) * 256 + ((out.piece ^ (row & 7)) << 4)); });
        }
    }
}

extern "C" __global__ void CLUSTER_OF(2) __launch_bounds__(THREADS, 1) down_blocks(const __grid_constant__ Multiply a) {
    divide_work<OfSteps>(STEPS_AT, [&](uint32_t shared) { bring(a, shared); }, [&](uint32_t shared) { multiply_tiles(a, shared); });
}
