// The first product of experts of many tokens, their activation and its quantisation, for Hopper: block FP8 in and out.
// gate_up_rows.py compiles it at run time.
//
// A tile has 128 columns of the gate with those of the projection up that belong to them. Its rows are hidden states by token.

#include "expert_tiles.cuh"

constexpr int STEPS = HIDDEN / GROUP;
static_assert(PARTS == WIDTH / GROUP);

// Shared memory.
constexpr int STAGES = 4;  // steps that are there or on their way
constexpr uint32_t GATE = PANEL, UP = 2 * PANEL, PANELS = 3 * PANEL;  // of a step, behind its rows
constexpr uint32_t STEPS_AT = STAGES * PANELS;
constexpr uint32_t SHARED_BYTES = STEPS_AT + Steps<STAGES>::BYTES + 1024;

struct Multiply {
    const unsigned char* x;      // FP8 [tokens, HIDDEN]
    const float* x_scales;       // [tokens, STEPS], strides below
    const unsigned char* first;  // FP8 [experts, 2 * WIDTH, HIDDEN], gate before up
    const float* first_scales;   // [experts, 2 * PARTS, STEPS]
    const int* sorted;           // [rows], choices, or their number and more where a row is padding, behind its block's others
    const int* experts;          // [blocks], -1 where it is another GPU's
    const int* padded;           // [1], rows of all blocks
    unsigned char* values;       // FP8 [rows, WIDTH]
    float* scales;               // [rows, PARTS]
    int choices, of_token;       // of all tokens, and of one
    int scales_token, scales_step;
};

__device__ __forceinline__ void gather(const Multiply& a, uint32_t shared) {
    const Piece of;
    const Steps<STAGES> steps{shared + STEPS_AT};
    uint32_t step = 0;
    for (Tiles<PARTS> tile(a.padded); tile.is(); tile.next()) {
        const int expert = a.experts[tile.block()];
        if (expert < 0) continue;
        uint32_t from[PASSES], there = 0;  // of hidden states, in pieces; whether there is one, a bit each
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int choice = a.sorted[tile.block() * ROWS + of.row + pass * OF_PASS];
            const bool is = choice < a.choices;
            there |= static_cast<uint32_t>(is) << pass;
            from[pass] = (is ? choice / a.of_token : 0) * (HIDDEN / 16) + of.piece;
        }
        const long long weights = static_cast<long long>(expert) * 2 * WIDTH + tile.part() * GROUP + of.row;
        const unsigned char* gate = a.first + weights * HIDDEN + 16 * of.piece;
        for (int k = 0; k < STEPS; ++k, ++step) {
            steps.wait_for_room(step);
            const uint32_t to = shared + steps.stage(step) * PANELS + of.place();
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                const unsigned char* x = a.x + static_cast<long long>(from[pass]) * 16 + k * GROUP;
                copy_16(to + pass * OF_PASS * 128, x, there >> pass & 1);
            }
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                const unsigned char* of_gate = gate + pass * OF_PASS * HIDDEN + k * GROUP;
                copy_16(to + GATE + pass * OF_PASS * 128, of_gate, true);
                copy_16(to + UP + pass * OF_PASS * 128, of_gate + WIDTH * HIDDEN, true);
            }
            arrive_after_copies(steps.filled(step));
        }
    }
    wait_for_copies();
}

// Through bfloat16, as what SGLang's first product hands over.
__device__ __forceinline__ float2 rounded(float a, float b) {
    const uint32_t packed = pack_bf16(a, b);
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000)};
}

__device__ __forceinline__ float opened(float gate) {
    return divide_fast(gate, 1 + exp2_fast(gate * __uint_as_float(0xbfb8aa3b)));  // times -log2(e)
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
    const float inverse = divide_fast(448, largest);
    if (column == 0) a.scales[row * PARTS + part] = largest * (1 / 448.0f);
    unsigned char* to = a.values + row * WIDTH + part * GROUP + column;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        *reinterpret_cast<unsigned short*>(to + 8 * i) = pack_fp8(inner[i].x * inverse, inner[i].y * inverse);
    }
}

__device__ __forceinline__ void multiply_tiles(const Multiply& a, uint32_t shared) {
    const Lines of;
    const Steps<STAGES> steps{shared + STEPS_AT};
    uint32_t step = 0;
    const auto release = [&] {
        if (of.lane == 0) arrive(steps.emptied(step));
    };
    for (Tiles<PARTS> tile(a.padded); tile.is(); tile.next()) {
        const int expert = a.experts[tile.block()];
        if (expert < 0) continue;
        if (APART > 0) {  // so that tensor cores work for one warpgroup while the other scales what they gave it
            meet<2, MULTIPLYING>();
            if (of.first) pause<APART>();
        }
        const int part = tile.part();
        const int* sorted = a.sorted + tile.block() * ROWS;
        if (sorted[of.first] >= a.choices) {  // all of this warpgroup's lines are padding
            for (int k = 0; k < STEPS; ++k, ++step) {
                steps.wait_for(step);
                release();
            }
            continue;
        }
        const int of_upper = sorted[of.upper], of_lower = sorted[of.upper + 8];
        const bool upper_there = of_upper < a.choices, lower_there = of_lower < a.choices;
        const float* upper_scales = a.x_scales + (upper_there ? of_upper / a.of_token : 0) * static_cast<long long>(a.scales_token);
        const float* lower_scales = a.x_scales + (lower_there ? of_lower / a.of_token : 0) * static_cast<long long>(a.scales_token);
        const float* gate_scales = a.first_scales + (expert * 2 * PARTS + part) * static_cast<long long>(STEPS);
        const float* up_scales = gate_scales + PARTS * STEPS;
        float gate[64], up[64], found[64];  // one `found` for all products, which would have registers each
#pragma unroll
        for (int i = 0; i < 64; ++i) gate[i] = up[i] = found[i] = 0;
        float upper_scale = upper_scales[0], lower_scale = lower_scales[0], gate_scale = gate_scales[0], up_scale = up_scales[0];
        for (int k = 0; k < STEPS; ++k, ++step) {
            steps.wait_for(step);
            fence_before_products();
            const uint32_t at = shared + steps.stage(step) * PANELS;
            const uint64_t rows = tile_at(at + of.first * 128, 16);
            ask_products(found, rows, tile_at(at + GATE, 16));
            const int next = min(k + 1, STEPS - 1);  // its scales are asked for early
            const float upper_next = upper_scales[next * a.scales_step], lower_next = lower_scales[next * a.scales_step];
            const float gate_next = gate_scales[next], up_next = up_scales[next];
            products_wait<0>();
            add_scaled(gate, found, upper_scale * gate_scale, lower_scale * gate_scale);
            ask_products(found, rows, tile_at(at + UP, 16));
            products_wait<0>();
            release();
            add_scaled(up, found, upper_scale * up_scale, lower_scale * up_scale);
            upper_scale = upper_next;
            lower_scale = lower_next;
            gate_scale = gate_next;
            up_scale = up_next;
        }
        const long long row = tile.block() * static_cast<long long>(ROWS) + of.upper;
        write_line<0>(a, row, part, of.column, upper_there, gate, up);
        write_line<2>(a, row + 8, part, of.column, lower_there, gate, up);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply(const __grid_constant__ Multiply a) {
    SHARED_MEMORY(memory);
    wait_for_inputs();
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
    if (threadIdx.x == 0) Steps<STAGES>{shared + STEPS_AT}.start();
    divide_work([&] { gather(a, shared); }, [&] { multiply_tiles(a, shared); });
}
