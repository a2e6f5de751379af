// The first product of experts of many tokens, their activation and its quantisation, for Hopper: block FP8 in and out.
// gate_up_rows.py compiles it at run time.
//
// A tile has 128 rows of one expert, the choices of tokens that SGLang's order puts into a block, and 128 columns of the gate with
// those of the projection up that belong to them. Two warpgroups multiply 64 rows each, a third gathers what they multiply next:
// rows of hidden states by token, and rows of weights. A block walks over tiles, so that the first steps of one are gathered while
// the one before is written. Sums of 128 values are scaled and added in float32.

#include "tiles.cuh"

constexpr int GROUP = 128;  // values that share a scale; of hidden states 128 bytes, which are a step
constexpr int ROWS = 128;
constexpr int STEPS = HIDDEN / GROUP, PARTS = WIDTH / GROUP;
constexpr int MULTIPLYING = 256, GATHERING = 128, THREADS = MULTIPLYING + GATHERING;
constexpr int WARPS = MULTIPLYING / 32;
// Registers of each: all that the launch gives 384 threads of 168.
constexpr int MULTIPLYING_REGISTERS = 232, GATHERING_REGISTERS = 40;

// Shared memory. A panel is 128 rows of 128 bytes, whose 16-byte pieces are swizzled as tensor cores want them.
constexpr int STAGES = 4;  // steps that are there or on their way
constexpr uint32_t PANEL = ROWS * 128;
constexpr uint32_t GATE = PANEL, UP = 2 * PANEL, PANELS = 3 * PANEL;  // of a step, behind its rows
constexpr uint32_t FILLED_AT = STAGES * PANELS;         // barriers of steps: they are there
constexpr uint32_t EMPTIED_AT = FILLED_AT + STAGES * 8;  // and are multiplied
constexpr uint32_t SHARED_BYTES = EMPTIED_AT + STAGES * 8 + 1024;

struct Multiply {
    const unsigned char* x;      // FP8 [tokens, HIDDEN]
    const float* x_scales;       // [tokens, STEPS]
    const unsigned char* first;  // FP8 [experts, 2 * WIDTH, HIDDEN], gate before up
    const float* first_scales;   // [experts, 2 * PARTS, STEPS]
    const int* sorted;           // [rows], choices, or their number and more where a row is padding, behind its block's others
    const int* experts;          // [blocks], -1 where it is another GPU's
    const int* padded;           // [1], rows of all blocks
    unsigned char* values;       // FP8 [rows, WIDTH]
    float* scales;               // [rows, PARTS]
    int choices, of_token;       // of all tokens, and of one
};

// A block's tiles, one after the other; what it multiplies of a tile is the same for both kinds of threads.
struct Tile {
    int number, end;

    __device__ __forceinline__ explicit Tile(const Multiply& a) : number(blockIdx.x), end(a.padded[0] / ROWS * PARTS) {}
    __device__ __forceinline__ bool is() const { return number < end; }
    __device__ __forceinline__ void next() { number += gridDim.x; }
    __device__ __forceinline__ int block() const { return number / PARTS; }
    __device__ __forceinline__ int part() const { return number % PARTS; }
};

__device__ __forceinline__ uint32_t filled(uint32_t shared, uint32_t step) { return shared + FILLED_AT + step % STAGES * 8; }

__device__ __forceinline__ uint32_t emptied(uint32_t shared, uint32_t step) { return shared + EMPTIED_AT + step % STAGES * 8; }

// A thread has one 16-byte piece of a row, and of the rows 16 further, and so on.
__device__ __forceinline__ void gather(const Multiply& a, uint32_t shared) {
    constexpr int OF_PASS = GATHERING / 8, PASSES = ROWS / OF_PASS;
    const int row = (threadIdx.x - MULTIPLYING) / 8, piece = threadIdx.x % 8;
    const uint32_t place = row * 128 + ((piece ^ (row & 7)) << 4);
    uint32_t step = 0;
    for (Tile tile(a); tile.is(); tile.next()) {
        const int expert = a.experts[tile.block()];
        if (expert < 0) continue;
        uint32_t from[PASSES], there = 0;  // of hidden states, in pieces; whether there is one, a bit each
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int choice = a.sorted[tile.block() * ROWS + row + pass * OF_PASS];
            const bool is = choice < a.choices;
            there |= static_cast<uint32_t>(is) << pass;
            from[pass] = (is ? choice / a.of_token : 0) * (HIDDEN / 16) + piece;
        }
        const long long weights = static_cast<long long>(expert) * 2 * WIDTH + tile.part() * GROUP + row;
        const unsigned char* gate = a.first + weights * HIDDEN + 16 * piece;
        for (int k = 0; k < STEPS; ++k, ++step) {
            if (step >= STAGES) wait_for_turn(emptied(shared, step), step / STAGES - 1);
            const uint32_t to = shared + step % STAGES * PANELS + place;
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
            arrive_after_copies(filled(shared, step));
        }
    }
    wait_for_copies();
}

// Adds what a step gives, scaled by line.
__device__ __forceinline__ void add_scaled(float (&sums)[64], const float (&found)[64], float upper, float lower) {
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
        sums[i] += found[i] * upper;
        sums[i + 1] += found[i + 1] * upper;
        sums[i + 2] += found[i + 2] * lower;
        sums[i + 3] += found[i + 3] * lower;
    }
}

// Through bfloat16, as what SGLang's first product hands over.
__device__ __forceinline__ float2 rounded(float a, float b) {
    const uint32_t packed = pack_bf16(a, b);
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000)};
}

__device__ __forceinline__ float opened(float gate) {
    return divide_fast(gate, 1 + exp2_fast(gate * __uint_as_float(0xbfb8aa3b)));  // times -log2(e)
}

// One line's activation of 2 of 8 columns in every 8 values of the arrays, from `at` on: quantised, with its scale.
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

// What two warpgroups do. Of a tile's products a thread has lines `upper` and 8 further, columns 8 i + `column` and the next one.
__device__ __forceinline__ void multiply_tiles(const Multiply& a, uint32_t shared) {
    const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int first_line = warp / 4 * 64, upper = first_line + warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
    uint32_t step = 0;
    const auto release = [&] {
        if (lane == 0) arrive(emptied(shared, step));
    };
    for (Tile tile(a); tile.is(); tile.next()) {
        const int expert = a.experts[tile.block()];
        if (expert < 0) continue;
        const int part = tile.part();
        const int* sorted = a.sorted + tile.block() * ROWS;
        if (sorted[first_line] >= a.choices) {  // all of this warpgroup's lines are padding
            for (int k = 0; k < STEPS; ++k, ++step) {
                wait_for_turn(filled(shared, step), step / STAGES);
                release();
            }
            continue;
        }
        const int of_upper = sorted[upper], of_lower = sorted[upper + 8];
        const bool upper_there = of_upper < a.choices, lower_there = of_lower < a.choices;
        const float* upper_scales = a.x_scales + (upper_there ? of_upper / a.of_token : 0) * static_cast<long long>(STEPS);
        const float* lower_scales = a.x_scales + (lower_there ? of_lower / a.of_token : 0) * static_cast<long long>(STEPS);
        const float* gate_scales = a.first_scales + (expert * 2 * PARTS + part) * static_cast<long long>(STEPS);
        const float* up_scales = gate_scales + PARTS * STEPS;
        float gate[64], up[64], found[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) gate[i] = up[i] = found[i] = 0;
        float upper_scale = upper_scales[0], lower_scale = lower_scales[0], gate_scale = gate_scales[0], up_scale = up_scales[0];
        for (int k = 0; k < STEPS; ++k, ++step) {
            wait_for_turn(filled(shared, step), step / STAGES);
            fence_before_products();
            const uint32_t at = shared + step % STAGES * PANELS;
            const uint64_t rows = tile_at(at + first_line * 128, 16);
            const auto multiply = [&](uint64_t weights) {
                products_begin();
#pragma unroll
                for (int i = 0; i < GROUP / 32; ++i) multiply_fp8(found, rows + 2 * i, weights + 2 * i, i > 0);
                products_commit();
            };
            multiply(tile_at(at + GATE, 16));
            const int next = min(k + 1, STEPS - 1);  // its scales are asked for early
            const float upper_next = upper_scales[next], lower_next = lower_scales[next];
            const float gate_next = gate_scales[next], up_next = up_scales[next];
            products_wait<0>();
            add_scaled(gate, found, upper_scale * gate_scale, lower_scale * gate_scale);
            multiply(tile_at(at + UP, 16));
            products_wait<0>();
            release();
            add_scaled(up, found, upper_scale * up_scale, lower_scale * up_scale);
            upper_scale = upper_next;
            lower_scale = lower_next;
            gate_scale = gate_next;
            up_scale = up_next;
        }
        const long long row = tile.block() * static_cast<long long>(ROWS) + upper;
        write_line<0>(a, row, part, column, upper_there, gate, up);
        write_line<2>(a, row + 8, part, column, lower_there, gate, up);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply(const __grid_constant__ Multiply a) {
    SHARED_MEMORY(memory);
    wait_for_inputs();
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int step = 0; step < STAGES; ++step) {
            start_barrier(filled(shared, step), GATHERING);
            start_barrier(emptied(shared, step), WARPS);
        }
    }
    meet<1, THREADS>();
    if (threadIdx.x >= MULTIPLYING) {
        leave_registers<GATHERING_REGISTERS>();
        gather(a, shared);
    } else {
        take_registers<MULTIPLYING_REGISTERS>();
        multiply_tiles(a, shared);
    }
}
