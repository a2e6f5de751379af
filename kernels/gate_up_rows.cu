// The first product of experts of many tokens, their activation and its quantisation, for Hopper: block FP8 in and out.
// gate_up_rows.py compiles it at run time.
//
// Columns of a tile are 128 of the gate with those of the projection up that belong to them. Its rows are hidden states by token,
// which a third warpgroup gathers.

#include "activations.cuh"
#include "expert_tiles.cuh"

constexpr int STEPS = HIDDEN / GROUP;

// Shared memory.
constexpr int STAGES = 4;  // steps that are there or on their way
constexpr uint32_t GATE = PANEL, UP = 2 * PANEL, PANELS = 3 * PANEL;        // of a step, behind its rows
constexpr uint32_t SCALES_AT = STAGES * PANELS, SCALES = (ROWS + 4) * 4;  // of a step: of every row, of the gate, and of up
constexpr uint32_t STEPS_AT = SCALES_AT + STAGES * SCALES;
using OfSteps = Steps<STAGES, BRINGING + 1>;
constexpr uint32_t SHARED_BYTES = STEPS_AT + OfSteps::BYTES + 1024;

struct Multiply {
    TensorMap first;             // FP8 [experts * 2 * WIDTH, HIDDEN] in boxes of 64 rows and a GROUP, gate before up
    const unsigned char* x;      // FP8 [tokens, HIDDEN]
    const float* x_scales;       // [tokens, STEPS], strides below
    const float* first_scales;   // [experts, 4, STEPS]
    const int* sorted;           // [rows], choices, or their number and more where a row is padding, behind its block's others
    const int* experts;          // [blocks], of an expert one behind the other; -1 where it is another GPU's
    const int* padded;           // [1], rows of all blocks
    unsigned char* values;       // FP8 [rows, WIDTH]
    float* scales;               // [rows, 2]
    int choices, of_token;       // of all tokens, and of one
    int scales_token, scales_step;
};

// Of a thread that gathers: one 16-byte piece of a row of a panel, and of the rows 16 further, and so on.
constexpr int OF_PASS = BRINGING / 8, PASSES = ROWS / OF_PASS;

__device__ __forceinline__ void gather(const Multiply& a, uint32_t shared) {
    const int number = threadIdx.x - MULTIPLYING, row = number / 8, piece = number % 8;
    const uint32_t place = row * 128 + ((piece ^ (row & 7)) << 4);
    const OfSteps steps{{shared + STEPS_AT}};
    uint32_t step = 0;
    for (Tiles tile(a.experts, a.padded); tile.is(); tile.next()) {
        uint32_t from[PASSES], there = 0;  // of hidden states, in pieces; whether there is one, a bit each
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int choice = a.sorted[tile.block * ROWS + row + pass * OF_PASS];
            const bool is = choice < a.choices;
            there |= static_cast<uint32_t>(is) << pass;
            from[pass] = (is ? choice / a.of_token : 0) * (HIDDEN / 16) + piece;
        }
        const int choice = a.sorted[tile.block * ROWS + number], gate = tile.expert * 4 + tile.part;
        const bool is = choice < a.choices;
        const float* scale = a.x_scales + (is ? choice / a.of_token : 0) * static_cast<long long>(a.scales_token);
        const float* of_weights = a.first_scales + (gate + number % 2 * 2) * static_cast<long long>(STEPS);
        for (int k = 0; k < STEPS; ++k, ++step) {
            steps.wait_for_room(step);
            const uint32_t to = shared + steps.place(step) * PANELS, filled = steps.filled(step);
            const uint32_t scales = shared + SCALES_AT + steps.place(step) * SCALES;
            if (number == 0) {
                arrive_before_bytes(filled, 2 * PANEL);
                bring_weights(to + GATE, a.first, k * GROUP, gate * GROUP, filled, tile);
                bring_weights(to + UP, a.first, k * GROUP, gate * GROUP + WIDTH, filled, tile);
            }
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                const unsigned char* x = a.x + static_cast<long long>(from[pass]) * 16 + k * GROUP;
                copy_16(to + place + pass * OF_PASS * 128, x, there >> pass & 1);
            }
            copy_4(scales + number * 4, scale + k * a.scales_step, is);
            if (number < 2) copy_4(scales + (ROWS + number) * 4, of_weights + k, true);
            arrive_after_copies(filled);
        }
    }
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

// One line's activation: two of every four values, from `at` on. Quantised, with its scale.
template <int at>
__device__ __forceinline__ void write_line(
    const Multiply& a, long long row, int part, int column, bool there, const float (&gate)[64], const float (&up)[64]
) {
    float2 inner[16];
    float largest = 1e-10f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float2 g = rounded(gate[4 * i + at], gate[4 * i + at + 1]), u = rounded(up[4 * i + at], up[4 * i + at + 1]);
        inner[i] = rounded(opened(g.x) * u.x, opened(g.y) * u.y);
        largest = higher(largest, higher(fabsf(inner[i].x), fabsf(inner[i].y)));
    }
    largest = highest_of_line(largest);
    if (!there) return;
    const Scale scale = exact_scale(largest);
    if (column == 0) a.scales[row * 2 + part] = scale.scale;
    unsigned char* to = a.values + row * WIDTH + part * GROUP + column;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        *reinterpret_cast<unsigned short*>(to + 8 * i) = pack_fp8(inner[i].x * scale.inverse, inner[i].y * scale.inverse);
    }
}

__device__ __forceinline__ void multiply_tiles(const Multiply& a, uint32_t shared) {
    const Lines of;
    const OfSteps steps{{shared + STEPS_AT}};
    uint32_t step = 0;
    const auto release = [&] {
        if (of.lane < 2) arrive_at(steps.emptied(step), of.lane);
    };
    for (Tiles tile(a.experts, a.padded); tile.is(); tile.next()) {
        const int* sorted = a.sorted + tile.block * ROWS;
        if (sorted[of.first] >= a.choices) {  // all of this warpgroup's lines are padding
            for (int k = 0; k < STEPS; ++k, ++step) {
                steps.wait_for(step);
                release();
            }
            continue;
        }
        const bool upper_there = sorted[of.upper] < a.choices, lower_there = sorted[of.upper + 8] < a.choices;
        float gate[64], up[64], found[64];  // one `found` for all products, which would have registers each
#pragma unroll
        for (int i = 0; i < 64; ++i) gate[i] = up[i] = found[i] = 0;
        for (int k = 0; k < STEPS; ++k, ++step) {
            steps.wait_for(step);
            fence_before_products();
            const uint32_t at = shared + steps.place(step) * PANELS, scales = shared + SCALES_AT + steps.place(step) * SCALES;
            const uint64_t rows = tile_at(at + of.first * 128, 16);
            ask_products(found, rows, tile_at(at + GATE, 16));
            const float upper_scale = load_shared_float(scales + of.upper * 4), lower_scale = load_shared_float(scales + of.upper * 4 + 32);
            const float gate_scale = load_shared_float(scales + ROWS * 4), up_scale = load_shared_float(scales + ROWS * 4 + 4);
            products_wait<0>();
            add_scaled(gate, found, upper_scale * gate_scale, lower_scale * gate_scale);
            ask_products(found, rows, tile_at(at + UP, 16));
            products_wait<0>();
            release();
            add_scaled(up, found, upper_scale * up_scale, lower_scale * up_scale);
        }
        const long long row = tile.block * static_cast<long long>(ROWS) + of.upper;
        write_line<0>(a, row, tile.part, of.column, upper_there, gate, up);
        write_line<2>(a, row + 8, tile.part, of.column, lower_there, gate, up);
    }
}

extern "C" __global__ void CLUSTER_OF(2) __launch_bounds__(THREADS, 1) gate_up_rows(const __grid_constant__ Multiply a) {
    divide_work<OfSteps>(STEPS_AT, [&](uint32_t shared) { gather(a, shared); }, [&](uint32_t shared) { multiply_tiles(a, shared); });
}
