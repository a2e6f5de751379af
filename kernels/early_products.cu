// Products of up to eight rows, whose weights come before their rows do, for Hopper. early_products.py compiles it at run time.
//
// A block has COLUMNS columns of one weight, and each of its warps a part of the inner dimension, of which its registers hold
// AHEAD chunks at once: the first are asked for while the kernel ahead runs. Rows go through shared memory. Sums of 128 products
// are scaled and added in float32, those of warps in their order, so that a sum depends on nothing but its inputs.
// Two products are of block-FP8 weights; a third is of bfloat16 weights and of rows before they were quantised.

#include "few_rows.cuh"

constexpr int GROUPS = INNER / GROUP, OF_WARP = GROUPS / WARPS;
static_assert(GROUPS % WARPS == 0, "a warp has whole groups");
constexpr int ROWS = 8;     // of a tile of tensor cores, which has 16 columns
constexpr int CHUNKS = OF_WARP * OF_GROUP;
constexpr int TILES = COLUMNS / 16;
constexpr int THREADS = WARPS * 32;

// Shared memory: rows, so far apart that lanes of two read from all banks; scales of both; and sums of all warps.
constexpr uint32_t PITCH = INNER + CHUNK, SCALES_AT = ROWS * PITCH, WEIGHT_SCALES_AT = SCALES_AT + ROWS * GROUPS * 4;
constexpr uint32_t SUMS_AT = WEIGHT_SCALES_AT + GROUPS * 4;
constexpr uint32_t OF_TILE = 16 * ROWS * 4;
[[maybe_unused]] constexpr uint32_t SHARED_BYTES = SUMS_AT + WARPS * TILES * OF_TILE;

struct Weight {
    const unsigned char* values;  // e4m3 [columns, INNER]
    const float* scales;          // [columns / GROUP, GROUPS]
    unsigned short* out;          // bfloat16 [rows, columns]
    int columns, blocks;
};

struct Products {
    Weight first, second;
    const unsigned char* gates;   // bfloat16 [columns, INNER]
    void* gates_out;              // float32, or bfloat16 where GATES_BF16, [rows, columns]
    const unsigned char* x;       // e4m3 [rows, INNER]
    const float* x_scales;        // [rows, GROUPS], strides below
    const unsigned char* hidden;  // bfloat16 [rows, INNER]
    long long row_stride, group_stride;
    int gates_columns, rows;
    int before_ours;  // whether the next kernel waits for this one
    int unused;
};

// Shows other warps this one's sums of a tile: columns `row` and 8 further, rows 2 * `piece` and the next one.
__device__ __forceinline__ void write_sums(uint32_t shared, const Place& of, int tile, const float (&sums)[4]) {
    const uint32_t at = shared + SUMS_AT + (of.warp * TILES + tile) * OF_TILE + (of.row * ROWS + 2 * of.piece) * 4;
    store_shared_2(at, {__float_as_uint(sums[0]), __float_as_uint(sums[1])});
    store_shared_2(at + 8 * ROWS * 4, {__float_as_uint(sums[2]), __float_as_uint(sums[3])});
}

// Calls f(row, column, sum) once for all sums of a block's tiles, once all warps have written theirs.
template <int columns, class F> __device__ __forceinline__ void each_sum(uint32_t shared, int rows, F f) {
    meet<1, THREADS>();
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * columns; i += THREADS) {
        const int row = i / columns, column = i % columns;
        const uint32_t at = shared + SUMS_AT + column / 16 * OF_TILE + (column % 16 * ROWS + row) * 4;
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += load_shared_float(at + warp * TILES * OF_TILE);
        f(row, column, sum);
    }
}

__device__ __forceinline__ void multiply_fp8_rows(const Products& a, const Weight weight, int block, uint32_t shared) {
    const Place of;
    const int column = block * COLUMNS, begin = of.warp * OF_WARP;
    uint4 values[AHEAD][TILES][2];
    const auto load = [&](int chunk) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const long long at = static_cast<long long>(column + tile * 16 + half * 8 + of.row) * INNER;
                values[chunk % AHEAD][tile][half] = load_once(weight.values + at + begin * GROUP + chunk * CHUNK + of.piece * 16);
            }
        }
    };
#pragma unroll
    for (int chunk = 0; chunk < BEFORE; ++chunk) load(chunk);
    for (int group = threadIdx.x; group < GROUPS; group += THREADS) {
        copy_4(shared + WEIGHT_SCALES_AT + group * 4, weight.scales + column / GROUP * GROUPS + group, true);
    }

    wait_for_inputs();
#pragma unroll 2
    for (int i = threadIdx.x; i < a.rows * (INNER / 16); i += THREADS) {
        const int row = i / (INNER / 16), piece = i % (INNER / 16);
        copy_16(shared + row * PITCH + piece * 16, a.x + row * static_cast<long long>(INNER) + piece * 16, true);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < a.rows * GROUPS; i += THREADS) {
        copy_4(shared + SCALES_AT + i * 4, a.x_scales + i / GROUPS * a.row_stride + i % GROUPS * a.group_stride, true);
    }
#pragma unroll
    for (int chunk = BEFORE; chunk < AHEAD; ++chunk) load(chunk);
    wait_for_copies();
    meet<1, THREADS>();

    float sums[TILES][4] = {};
#pragma unroll
    for (int group = 0; group < OF_WARP; ++group) {
        float found[TILES][4] = {};
#pragma unroll
        for (int part = 0; part < OF_GROUP; ++part) {
            const int chunk = group * OF_GROUP + part;
            uint4 x = {0, 0, 0, 0};
            if (of.row < a.rows) x = load_shared_4(shared + of.row * PITCH + begin * GROUP + chunk * CHUNK + of.piece * 16);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                add_products(found[tile], values[chunk % AHEAD][tile][0], values[chunk % AHEAD][tile][1], x);
            }
            if (chunk + AHEAD < CHUNKS) load(chunk + AHEAD);
        }
        const uint32_t scales = shared + SCALES_AT + (2 * of.piece * GROUPS + begin + group) * 4;
        const float of_weight = load_shared_float(shared + WEIGHT_SCALES_AT + (begin + group) * 4);
        const float even = load_shared_float(scales) * of_weight, odd = load_shared_float(scales + GROUPS * 4) * of_weight;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            sums[tile][0] += found[tile][0] * even;
            sums[tile][1] += found[tile][1] * odd;
            sums[tile][2] += found[tile][2] * even;
            sums[tile][3] += found[tile][3] * odd;
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) write_sums(shared, of, tile, sums[tile]);
    each_sum<COLUMNS>(shared, a.rows, [&](int row, int at, float sum) {
        weight.out[row * static_cast<long long>(weight.columns) + column + at] = static_cast<unsigned short>(pack_bf16(sum, sum));
    });
}

// Of eight columns, as their values take twice the bytes.
constexpr int GATES = 8;

__device__ __forceinline__ void multiply_gates(const Products& a, int block, uint32_t shared) {
    const Place of;
    const int column = block * GATES, begin = of.warp * OF_WARP * GROUP * 2;  // bytes
    constexpr int STEPS = OF_WARP * GROUP * 2 / CHUNK, TOGETHER = STEPS / 2, ROWS_TOGETHER = STEPS / 4;
    static_assert(STEPS % 4 == 0);
    const unsigned char* weight = a.gates + (column + of.row) * static_cast<long long>(INNER) * 2 + begin + of.piece * 16;
    const unsigned char* x = a.hidden + of.row * static_cast<long long>(INNER) * 2 + begin + of.piece * 16;
    uint4 values[TOGETHER];
    float sums[4] = {};
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        if (part % 2 == 0) {
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) values[i] = load_early(weight + (part / 2 * TOGETHER + i) * CHUNK);
        }
        if (part == 0) wait_for_inputs();
        uint4 rows[ROWS_TOGETHER];
#pragma unroll
        for (int i = 0; i < ROWS_TOGETHER; ++i) {
            rows[i] = {0, 0, 0, 0};
            if (of.row < a.rows) rows[i] = *reinterpret_cast<const uint4*>(x + (part * ROWS_TOGETHER + i) * CHUNK);
        }
#pragma unroll
        for (int i = 0; i < ROWS_TOGETHER; ++i) {
            const uint4 of_weight = values[part % 2 * ROWS_TOGETHER + i];
            multiply_few_bf16(sums, of_weight.x, 0, of_weight.y, 0, rows[i].x, rows[i].y);
            multiply_few_bf16(sums, of_weight.z, 0, of_weight.w, 0, rows[i].z, rows[i].w);
        }
    }
    write_sums(shared, of, 0, sums);
    each_sum<GATES>(shared, a.rows, [&](int row, int at, float sum) {
        const long long place = row * static_cast<long long>(a.gates_columns) + column + at;
        if (GATES_BF16) static_cast<unsigned short*>(a.gates_out)[place] = static_cast<unsigned short>(pack_bf16(sum, sum));
        else static_cast<float*>(a.gates_out)[place] = sum;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_SM) early_products(const __grid_constant__ Products a) {
    SHARED_MEMORY(memory);
    const uint32_t shared = (shared_address(memory) + 15) & ~15u;
    if (a.before_ours) let_others_begin();
    const int block = blockIdx.x, of_second = block - a.first.blocks, of_gates = of_second - a.second.blocks;
    if (of_gates >= 0) return multiply_gates(a, of_gates, shared);
    multiply_fp8_rows(a, of_second < 0 ? a.first : a.second, of_second < 0 ? block : of_second, shared);
}
