// The second product of experts of many tokens, times each choice's share, for Hopper: block FP8 in, bfloat16 out.
// down_blocks.py compiles it at run time.
//
// A tile's rows are what gate_up_rows.cu writes, all of which shared memory keeps while it walks over a part of the columns, 128 at
// a time. What it writes goes through shared memory, so that a row of 128 columns leaves in one piece.

#include "expert_tiles.cuh"

constexpr int GROUPS = WIDTH / GROUP;
constexpr int STEPS = HIDDEN / GROUP / PARTS;  // of a tile: 128 columns each

// Shared memory.
constexpr int STAGES = 3;  // steps whose weights are there or on their way
constexpr uint32_t PANELS = GROUPS * PANEL;
constexpr uint32_t ROWS_AT = STAGES * PANELS;                 // of two tiles
constexpr uint32_t WRITTEN_AT = ROWS_AT + 2 * PANELS;         // two times 128 columns of every row, in bfloat16
constexpr uint32_t STEPS_AT = WRITTEN_AT + 2 * ROWS * 256;
constexpr uint32_t ROWS_EMPTIED_AT = STEPS_AT + Steps<STAGES>::BYTES;  // barriers of two tiles: their rows are not needed any more
constexpr uint32_t SHARED_BYTES = ROWS_EMPTIED_AT + 2 * 8 + 1024;

struct Multiply {
    const unsigned char* values;   // FP8 [rows, WIDTH]
    const float* scales;           // [rows, GROUPS]
    const unsigned char* second;   // FP8 [experts, HIDDEN, WIDTH]
    const float* second_scales;    // [experts, HIDDEN / GROUP, GROUPS]
    const float* shares;           // [choices]
    const int* sorted;             // [rows], choices, or their number and more where a row is padding, behind its block's others
    const int* experts;            // [blocks], -1 where it is another GPU's
    const int* padded;             // [1], rows of all blocks
    unsigned char* out;            // bfloat16 [choices, HIDDEN]
    int choices;
};

__device__ __forceinline__ void gather(const Multiply& a, uint32_t shared) {
    const Piece of;
    const Steps<STAGES> steps{shared + STEPS_AT};
    uint32_t step = 0, tiles = 0;
    for (Tiles<PARTS> tile(a.padded); tile.is(); tile.next()) {
        const int expert = a.experts[tile.block()];
        if (expert < 0) continue;
        const uint32_t turn = tiles / 2, rows_to = shared + ROWS_AT + tiles % 2 * PANELS + of.place();
        if (turn) wait_for_turn(shared + ROWS_EMPTIED_AT + tiles % 2 * 8, turn - 1);
        const long long first = tile.block() * static_cast<long long>(ROWS) + of.row;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const bool there = a.sorted[first + pass * OF_PASS] < a.choices;
            const unsigned char* from = a.values + (first + pass * OF_PASS) * WIDTH + 16 * of.piece;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) copy_16(rows_to + g * PANEL + pass * OF_PASS * 128, from + g * GROUP, there);
        }
        ++tiles;
        const long long column = static_cast<long long>(expert) * HIDDEN + tile.part() * STEPS * GROUP + of.row;
        const unsigned char* weights = a.second + column * WIDTH + 16 * of.piece;
        for (int k = 0; k < STEPS; ++k, ++step) {
            steps.wait_for_room(step);
            const uint32_t to = shared + steps.stage(step) * PANELS + of.place();
            const unsigned char* of_step = weights + k * GROUP * WIDTH;
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    copy_16(to + g * PANEL + pass * OF_PASS * 128, of_step + pass * OF_PASS * WIDTH + g * GROUP, true);
                }
            }
            arrive_after_copies(steps.filled(step));  // and, at the first step, after the rows
        }
    }
    wait_for_copies();
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

__device__ __forceinline__ void multiply_tiles(const Multiply& a, uint32_t shared) {
    const Lines of;
    const Steps<STAGES> steps{shared + STEPS_AT};
    uint32_t step = 0, tiles = 0, written = 0;
    const auto release = [&](uint32_t barrier) {
        if (of.lane == 0) arrive(barrier);
    };
    for (Tiles<PARTS> tile(a.padded); tile.is(); tile.next()) {
        const int expert = a.experts[tile.block()];
        const long long first = tile.block() * static_cast<long long>(ROWS) + of.first;
        const int* sorted = a.sorted + first;
        const Written out(a, sorted, tile.part() * STEPS * GROUP);
        if (expert < 0) {
            for (int k = 0; k < STEPS; ++k) out.write(k, [](int) { return uint4{0, 0, 0, 0}; });
            continue;
        }
        const bool padding = sorted[0] >= a.choices;  // all of this warpgroup's lines
        const int line = of.upper - of.first, of_upper = sorted[line], of_lower = sorted[line + 8];
        float upper_scale[GROUPS], lower_scale[GROUPS];  // with the choices' shares
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            upper_scale[g] = of_upper < a.choices ? a.scales[(first + line) * GROUPS + g] * a.shares[of_upper] : 0;
            lower_scale[g] = of_lower < a.choices ? a.scales[(first + line + 8) * GROUPS + g] * a.shares[of_lower] : 0;
        }
        const float* weight_scales = a.second_scales + (static_cast<long long>(expert) * (HIDDEN / GROUP) + tile.part() * STEPS) * GROUPS;
        const uint32_t rows_at = shared + ROWS_AT + tiles % 2 * PANELS + of.first * 128;
        float sums[64], found[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) found[i] = 0;
        for (int k = 0; k < STEPS; ++k, ++step) {
            float scale[GROUPS];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) scale[g] = weight_scales[k * GROUPS + g];
            steps.wait_for(step);
            if (padding) {
                release(steps.emptied(step));
                continue;
            }
            fence_before_products();
#pragma unroll
            for (int i = 0; i < 64; ++i) sums[i] = 0;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                ask_products(found, tile_at(rows_at + g * PANEL, 16), tile_at(shared + steps.stage(step) * PANELS + g * PANEL, 16));
                products_wait<0>();
                if (g == GROUPS - 1) release(steps.emptied(step));
                add_scaled(sums, found, upper_scale[g] * scale[g], lower_scale[g] * scale[g]);
            }
            // Two places take turns: whoever writes to one has met all who read it before.
            const uint32_t place = shared + WRITTEN_AT + written++ % 2 * (ROWS * 256);
            const uint32_t upper_at = place + of.upper * 256 + of.column * 2, swizzle = of.upper & 7;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const uint32_t at = upper_at + ((i ^ swizzle) << 4);
                store_shared(at, pack_bf16(sums[4 * i], sums[4 * i + 1]));
                store_shared(at + 8 * 256, pack_bf16(sums[4 * i + 2], sums[4 * i + 3]));
            }
            of.first ? meet<3, MULTIPLYING / 2>() : meet<2, MULTIPLYING / 2>();
            out.write(k, [&](int row) { return load_shared_4(place + (of.first + row) * 256 + ((out.piece ^ (row & 7)) << 4)); });
        }
        release(shared + ROWS_EMPTIED_AT + tiles % 2 * 8);
        ++tiles;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply(const __grid_constant__ Multiply a) {
    SHARED_MEMORY(memory);
    wait_for_inputs();
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        Steps<STAGES>{shared + STEPS_AT}.start();
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) start_barrier(shared + ROWS_EMPTIED_AT + tile * 8, WARPS);
    }
    divide_work([&] { gather(a, shared); }, [&] { multiply_tiles(a, shared); });
}
