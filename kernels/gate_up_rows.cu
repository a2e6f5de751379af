// The first product of experts of many tokens, their activation and its quantisation, for Hopper: block FP8 in and out.
// gate_up_rows.py compiles it at run time.
//
// A tile has 128 rows of one expert, the choices of tokens that SGLang's order puts into a block, and a half of the expert's
// columns: 128 of the gate with those of the projection up that belong to them. Two warpgroups multiply 64 rows each, a third brings
// what they multiply next. A block walks over tiles, so that the first steps of one come while the one before is written. Sums of
// 128 products are scaled and added in float32.
//
// L2 can give less than tensor cores could take. So two blocks, a cluster, go together: of two blocks of rows of one expert each
// brings half of the weights to both. What has no neighbour has one half of its columns in either.

#include "tiles.cuh"

constexpr int GROUP = 128;  // values that share a scale: 128 bytes
constexpr int ROWS = 128;
constexpr int WIDTH = 2 * GROUP;  // of an expert
constexpr int STEPS = HIDDEN / GROUP;
constexpr int MULTIPLYING = 256, GATHERING = 128, THREADS = MULTIPLYING + GATHERING;
constexpr int WARPS = MULTIPLYING / 32;
// Registers of each: all that the launch gives 384 threads of 168.
constexpr int MULTIPLYING_REGISTERS = 232, GATHERING_REGISTERS = 40;

// Shared memory. Panels are 128 rows of 128 bytes, whose 16-byte pieces are swizzled as tensor cores want them.
constexpr uint32_t PANEL = ROWS * 128;
constexpr int STAGES = 4;  // steps that are there or on their way
constexpr uint32_t GATE = PANEL, UP = 2 * PANEL, PANELS = 3 * PANEL;  // of a step, behind its rows
constexpr uint32_t SCALES_AT = STAGES * PANELS, SCALES = (ROWS + 4) * 4;  // of a step: of every row, of the gate, and of up
constexpr uint32_t BARRIERS = SCALES_AT + STAGES * SCALES;               // two of each stage
constexpr uint32_t SHARED_BYTES = BARRIERS + 2 * STAGES * 8 + 1024;

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

// A block's tiles, one after the other. Clusters have as many turns as there are blocks of rows.
struct Tiles {
    const int* experts;
    int lane, rank, number, end;
    int expert, block, part;
    bool both;  // whether the other block of the cluster multiplies by the same weights

    __device__ __forceinline__ explicit Tiles(const Multiply& a)
        : experts(a.experts), lane(threadIdx.x % 32), rank(cluster_rank()), number(blockIdx.x / 2), end(a.padded[0] / ROWS) {}

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

// Steps that are there or on their way, as two barriers of each tell.
struct Steps {
    uint32_t at;

    __device__ __forceinline__ explicit Steps(uint32_t shared) : at(shared + BARRIERS) {}
    __device__ __forceinline__ void start() const {
#pragma unroll
        for (int step = 0; step < STAGES; ++step) {
            start_barrier(filled(step), GATHERING + 1);
            start_barrier(emptied(step), 2 * WARPS);
        }
    }
    __device__ __forceinline__ static uint32_t stage(uint32_t step) { return step % STAGES; }
    __device__ __forceinline__ uint32_t filled(uint32_t step) const { return at + stage(step) * 8; }
    __device__ __forceinline__ uint32_t emptied(uint32_t step) const { return at + (STAGES + stage(step)) * 8; }
    __device__ __forceinline__ void wait_for(uint32_t step) const { wait_for_turn(filled(step), step / STAGES); }
    // Until both blocks have multiplied what lay in its stage.
    __device__ __forceinline__ void wait_for_room(uint32_t step) const {
        if (step >= STAGES) wait_for_turn(emptied(step), step / STAGES - 1);
    }
};

// Of a thread that gathers: one 16-byte piece of a row of a panel, and of the rows 16 further, and so on.
constexpr int OF_PASS = GATHERING / 8, PASSES = ROWS / OF_PASS;

__device__ __forceinline__ void gather(const Multiply& a, uint32_t shared) {
    const int number = threadIdx.x - MULTIPLYING, row = number / 8, piece = number % 8;
    const uint32_t place = row * 128 + ((piece ^ (row & 7)) << 4);
    const Steps steps(shared);
    uint32_t step = 0;
    for (Tiles tile(a); tile.is(); tile.next()) {
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
            const uint32_t to = shared + steps.stage(step) * PANELS, filled = steps.filled(step);
            const uint32_t scales = shared + SCALES_AT + steps.stage(step) * SCALES;
            if (number == 0) {
                arrive_before_bytes(filled, 2 * PANEL);
                const int column = k * GROUP, first = gate * GROUP;
                if (tile.both) {
                    const int half = tile.rank * 64;
                    copy_tile_to_both(to + GATE + half * 128, a.first, column, first + half, filled);
                    copy_tile_to_both(to + UP + half * 128, a.first, column, first + WIDTH + half, filled);
                } else {
#pragma unroll
                    for (int half = 0; half < 128; half += 64) {
                        copy_tile(to + GATE + half * 128, a.first, column, first + half, filled);
                        copy_tile(to + UP + half * 128, a.first, column, first + WIDTH + half, filled);
                    }
                }
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
    if (column == 0) a.scales[row * 2 + part] = largest * (1 / 448.0f);
    unsigned char* to = a.values + row * WIDTH + part * GROUP + column;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        *reinterpret_cast<unsigned short*>(to + 8 * i) = pack_fp8(inner[i].x * inverse, inner[i].y * inverse);
    }
}

// What a thread has of a tile's products are lines `upper` and 8 further, columns 8 i + `column` and the next one.
__device__ __forceinline__ void multiply_tiles(const Multiply& a, uint32_t shared) {
    const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32, first = warp / 4 * 64;
    const int upper = first + warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
    const Steps steps(shared);
    uint32_t step = 0;
    const auto release = [&] {
        if (lane < 2) arrive_at(steps.emptied(step), lane);
    };
    for (Tiles tile(a); tile.is(); tile.next()) {
        const int* sorted = a.sorted + tile.block * ROWS;
        if (sorted[first] >= a.choices) {  // all of this warpgroup's lines are padding
            for (int k = 0; k < STEPS; ++k, ++step) {
                steps.wait_for(step);
                release();
            }
            continue;
        }
        const bool upper_there = sorted[upper] < a.choices, lower_there = sorted[upper + 8] < a.choices;
        float gate[64], up[64], found[64];  // one `found` for all products, which would have registers each
#pragma unroll
        for (int i = 0; i < 64; ++i) gate[i] = up[i] = found[i] = 0;
        for (int k = 0; k < STEPS; ++k, ++step) {
            steps.wait_for(step);
            fence_before_products();
            const uint32_t at = shared + steps.stage(step) * PANELS, scales = shared + SCALES_AT + steps.stage(step) * SCALES;
            const uint64_t rows = tile_at(at + first * 128, 16);
            ask_products(found, rows, tile_at(at + GATE, 16));
            const float upper_scale = load_shared_float(scales + upper * 4), lower_scale = load_shared_float(scales + upper * 4 + 32);
            const float gate_scale = load_shared_float(scales + ROWS * 4), up_scale = load_shared_float(scales + ROWS * 4 + 4);
            products_wait<0>();
            add_scaled(gate, found, upper_scale * gate_scale, lower_scale * gate_scale);
            ask_products(found, rows, tile_at(at + UP, 16));
            products_wait<0>();
            release();
            add_scaled(up, found, upper_scale * up_scale, lower_scale * up_scale);
        }
        const long long row = tile.block * static_cast<long long>(ROWS) + upper;
        write_line<0>(a, row, tile.part, column, upper_there, gate, up);
        write_line<2>(a, row + 8, tile.part, column, lower_there, gate, up);
    }
}

extern "C" __global__ void CLUSTER_OF_2 __launch_bounds__(THREADS, 1) multiply(const __grid_constant__ Multiply a) {
    SHARED_MEMORY(memory);
    wait_for_inputs();
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
    if (threadIdx.x == 0) Steps(shared).start();
    meet_cluster();
    if (threadIdx.x >= MULTIPLYING) {
        leave_registers<GATHERING_REGISTERS>();
        gather(a, shared);
    } else {
        take_registers<MULTIPLYING_REGISTERS>();
        multiply_tiles(a, shared);
    }
    meet_cluster();  // until then the other block may write to this one
}
