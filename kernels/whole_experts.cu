// Both products of experts of a few tokens each, and what lies between them, for Hopper: block FP8 in, bfloat16 out.
// whole_experts.py compiles it at run time.
//
// Reading weights takes as long as everything, so no block may wait while others read. A tile is an expert and up to ROWS of its
// rows. Its work is in pieces: quarters of the first product, 64 columns of the gate with those of up that belong to them, and
// CHUNKS of the second one's columns. Blocks take piece after piece, first products before second ones. What a second product
// needs was taken long before, and nobody who has a first product waits for anybody. One thread brings weights, step after step
// through one piece and into the next; a warp brings rows, and waits for activations.

#include "activations.cuh"
#include "tiles.cuh"

constexpr int GROUP = 128;        // values that share a scale: 128 bytes
constexpr int WIDTH = 2 * GROUP;  // of an expert
constexpr int COLUMNS = 64;       // of a warpgroup's products
constexpr int STEPS = HIDDEN / GROUP;
constexpr int QUARTERS = WIDTH / COLUMNS, CHUNKS = 8;
// Of a piece: two GROUPs of 64 columns, twice, or 128 columns of two GROUPs.
constexpr int FIRST_STEPS = STEPS / 2, SECOND_STEPS = STEPS / CHUNKS;
constexpr int WARPS = 8, MULTIPLYING = WARPS * 32, THREADS = MULTIPLYING + 64;
static_assert(HIDDEN % (CHUNKS * GROUP) == 0, "pieces have whole steps");
static_assert(ROWS == 16, "a lane that gathers has two rows' scales, and 16 bytes of rows 4 apart");

// Shared memory: steps that are there or on their way, STAGES at once, of each four panels of weights and, of the first product,
// rows of two GROUPs, with their scales; activations of two pieces, as they come and as they are multiplied; sums of a warpgroup
// for the other; what every warp writes.
constexpr uint32_t PANEL = COLUMNS * 128, OF_ROWS = ROWS * 128;
constexpr uint32_t ROWS_AT = 4 * PANEL, STAGE = ROWS_AT + 2 * OF_ROWS;
constexpr uint32_t INNER_AT = STAGES * STAGE, INNER = 2 * OF_ROWS;
constexpr uint32_t GIVEN_AT = INNER_AT + 2 * INNER, GIVEN_CHOICES = ROWS * WIDTH * 2, GIVEN_SHARES = GIVEN_CHOICES + ROWS * 4;
constexpr uint32_t GIVEN = GIVEN_SHARES + ROWS * 4;
constexpr uint32_t SUMS_AT = GIVEN_AT + 2 * GIVEN;
constexpr uint32_t PITCH = 48, WRITTEN = ROWS * PITCH;  // of 16 columns in bfloat16
constexpr uint32_t WRITTEN_AT = SUMS_AT + ROWS * 128 * 4;
constexpr uint32_t OF_WEIGHTS = 2 * ROWS * 4, SCALES = OF_WEIGHTS + 4 * 4;  // of a step
constexpr uint32_t SCALES_AT = WRITTEN_AT + WARPS * WRITTEN;
constexpr uint32_t INNER_SCALES_AT = SCALES_AT + STAGES * SCALES;  // of two pieces
constexpr int AHEAD = 4;                                           // pieces that are known at once
constexpr uint32_t PIECES_AT = INNER_SCALES_AT + 2 * 2 * ROWS * 4;
constexpr uint32_t BARRIERS_AT = PIECES_AT + AHEAD * 8;
[[maybe_unused]] constexpr uint32_t SHARED_BYTES = BARRIERS_AT + 2 * (STAGES + 2 + AHEAD) * 8 + 1024;

struct Experts {
    TensorMap first;             // e4m3 [experts * 2 * WIDTH, HIDDEN] in boxes of COLUMNS rows, gate before up
    TensorMap second;            // e4m3 [experts * HIDDEN, WIDTH], likewise
    const unsigned char* x;      // e4m3 [tokens, HIDDEN]
    const float* x_scales;       // [tokens, STEPS]
    const float* first_scales;   // [experts, 4, STEPS]
    const float* second_scales;  // [experts, STEPS, 2]
    const float* shares;         // [choices]
    const int* sorted;           // [rows], choices, or their number and more where a row is padding
    const int* experts;          // [tiles]; -1 where it is another GPU's
    const int* padded;           // [1], rows of all tiles
    uint32_t* taken;             // [1 + tiles], zeros: pieces that are taken, and quarters of a tile that are there
    unsigned short* inner;       // bfloat16 [rows, WIDTH]
    unsigned char* out;          // bfloat16 [choices, HIDDEN]
    int choices, of_token;       // of all tokens, and of one
    int unused[8];
};

// The `number`th of all tiles' quarters, and behind these of their chunks.
struct Piece {
    int number, expert, quarters;

    __device__ __forceinline__ bool second() const { return number >= quarters; }
    __device__ __forceinline__ bool is() const { return number < quarters / QUARTERS * (QUARTERS + CHUNKS); }
    __device__ __forceinline__ int tile() const { return second() ? (number - quarters) / CHUNKS : number / QUARTERS; }
    __device__ __forceinline__ int part() const { return second() ? (number - quarters) % CHUNKS : number % QUARTERS; }
};

// A place in shared memory that is filled and emptied in turns, the one of `at` and what barriers tell of it.
template <int count> struct Turns {
    uint32_t barriers;

    __device__ __forceinline__ void start(int filling, int emptying) const {
#pragma unroll
        for (uint32_t i = 0; i < count; ++i) {
            start_barrier(filled(i), filling);
            start_barrier(emptied(i), emptying);
        }
    }
    __device__ __forceinline__ uint32_t filled(uint32_t turn) const { return barriers + turn % count * 8; }
    __device__ __forceinline__ uint32_t emptied(uint32_t turn) const { return filled(turn) + count * 8; }
    __device__ __forceinline__ void wait(uint32_t turn) const { wait_for_turn(filled(turn), turn / count); }
    __device__ __forceinline__ void wait_for_room(uint32_t turn) const {
        if (turn >= count) wait_for_turn(emptied(turn), turn / count - 1);
    }
};

struct Places {
    uint32_t shared;
    Turns<STAGES> steps;
    Turns<2> given;
    Turns<AHEAD> pieces;

    __device__ __forceinline__ explicit Places(uint32_t shared)
        : shared(shared), steps{shared + BARRIERS_AT}, given{steps.barriers + 2 * STAGES * 8}, pieces{given.barriers + 2 * 2 * 8} {}
    __device__ __forceinline__ void start() const {
        steps.start(1 + 32, WARPS);
        given.start(32, WARPS);
        pieces.start(1, WARPS + 1);
    }
    __device__ __forceinline__ uint32_t step(uint32_t turn) const { return shared + turn % STAGES * STAGE; }
    __device__ __forceinline__ uint32_t scales(uint32_t turn) const { return shared + SCALES_AT + turn % STAGES * SCALES; }
    __device__ __forceinline__ uint32_t given_at(uint32_t turn) const { return shared + GIVEN_AT + turn % 2 * GIVEN; }
    __device__ __forceinline__ uint32_t inner(uint32_t turn) const { return shared + INNER_AT + turn % 2 * INNER; }
    __device__ __forceinline__ uint32_t inner_scales(uint32_t turn) const { return shared + INNER_SCALES_AT + turn % 2 * 2 * ROWS * 4; }
    __device__ __forceinline__ uint32_t piece(uint32_t turn) const { return shared + PIECES_AT + turn % AHEAD * 8; }

    // The next piece, for a warp.
    __device__ __forceinline__ Piece next(uint32_t& turn, int quarters) const {
        pieces.wait(turn);
        const uint2 found = load_shared_2(piece(turn));
        sync_warp();
        if (threadIdx.x % 32 == 0) arrive(pieces.emptied(turn));
        ++turn;
        return {static_cast<int>(found.x), static_cast<int>(found.y), quarters};
    }
};

__device__ __forceinline__ int quarters_of(const Experts& a) { return a.padded[0] / ROWS * QUARTERS; }

// What one thread does, which takes pieces too, each while the one before comes.
__device__ __forceinline__ void bring_weights(const Experts& a, const Places& of) {
    const int quarters = quarters_of(a);
    const auto take = [&] {
        Piece piece{static_cast<int>(add_to_counter(a.taken, 1)), 0, quarters};
        if (piece.is()) piece.expert = a.experts[piece.tile()];
        return piece;
    };
    uint32_t step = 0, turn = 0;
    const auto bring = [&](const TensorMap& weights, int column, int row, int right, int down) {
        of.steps.wait_for_room(step);
        const uint32_t at = of.step(step), filled = of.steps.filled(step);
        arrive_before_bytes(filled, 4 * PANEL);
        copy_tile(at, weights, column, row, filled);
        copy_tile(at + PANEL, weights, column, row + down, filled);
        copy_tile(at + 2 * PANEL, weights, column + right, row, filled);
        copy_tile(at + 3 * PANEL, weights, column + right, row + down, filled);
        ++step;
    };
    for (Piece piece = take();; ++turn) {
        of.pieces.wait_for_room(turn);
        store_shared_2(of.piece(turn), {static_cast<uint32_t>(piece.number), static_cast<uint32_t>(piece.expert)});
        arrive(of.pieces.filled(turn));
        if (!piece.is()) break;
        const Piece next = take();
        if (piece.expert < 0) {
        } else if (piece.second()) {
            const int row = piece.expert * HIDDEN + piece.part() * SECOND_STEPS * GROUP;
            for (int k = 0; k < SECOND_STEPS; ++k) bring(a.second, 0, row + k * GROUP, GROUP, COLUMNS);
        } else {
            const int row = piece.expert * 2 * WIDTH + piece.part() * COLUMNS;
            for (int k = 0; k < FIRST_STEPS; ++k) bring(a.first, k * 2 * GROUP, row, GROUP, WIDTH);
        }
        piece = next;
    }
}

// What one warp does: rows of first products, activations of second ones, and scales.
struct Gathering {
    const Experts& a;
    const Places& of;
    int lane;
    uint32_t step, chunks;

    __device__ __forceinline__ void rows(const Piece& piece) {
        const int row = lane / 8, byte = lane % 8 * 16, *sorted = a.sorted + piece.tile() * ROWS;
        const unsigned char* from[ROWS / 4];
        uint32_t there = 0;
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) {
            const int choice = sorted[row + 4 * i];
            const bool is = choice < a.choices;
            there |= static_cast<uint32_t>(is) << i;
            from[i] = a.x + (is ? choice / a.of_token : 0) * static_cast<long long>(HIDDEN) + byte;
        }
        // A lane has the scale of a row in one of both GROUPs, and four have one of weights: the gate's in both, and up's.
        const int choice = sorted[lane % ROWS];
        const bool is = choice < a.choices;
        const float* scale = a.x_scales + (is ? choice / a.of_token : 0) * STEPS + lane / ROWS;
        const float* of_weights = a.first_scales + (piece.expert * 4 + piece.part() / 2 + lane / 2 % 2 * 2) * static_cast<long long>(STEPS) + lane % 2;
        for (int k = 0; k < FIRST_STEPS; ++k, ++step) {
            of.steps.wait_for_room(step);
            const uint32_t to = of.step(step) + ROWS_AT + row * 128, scales = of.scales(step);
#pragma unroll
            for (int i = 0; i < ROWS / 4; ++i) {
                const uint32_t place = to + i * 4 * 128 + (byte ^ ((row + 4 * i & 7) << 4));
#pragma unroll
                for (int group = 0; group < 2; ++group) {
                    copy_16(place + group * OF_ROWS, from[i] + (2 * k + group) * GROUP, there >> i & 1);
                }
            }
            copy_4(scales + lane * 4, scale + 2 * k, is);
            if (lane < 4) copy_4(scales + OF_WEIGHTS + lane * 4, of_weights + 2 * k, true);
            arrive_after_copies(of.steps.filled(step));
        }
    }
    __device__ __forceinline__ void activations(const Piece& piece) {
        const int tile = piece.tile();
        const int choice = a.sorted[tile * ROWS + lane % ROWS];
        of.given.wait_for_room(chunks);
        const uint32_t to = of.given_at(chunks);
        while (load_counter(a.taken + 1 + tile) < QUARTERS) {
        }
        const unsigned char* from = reinterpret_cast<const unsigned char*>(a.inner + tile * static_cast<long long>(ROWS * WIDTH));
#pragma unroll
        for (int i = lane * 16; i < ROWS * WIDTH * 2; i += 32 * 16) copy_16(to + i, from + i, true);
        if (lane < ROWS) {
            copy_4(to + GIVEN_CHOICES + lane * 4, a.sorted + tile * ROWS + lane, true);
            copy_4(to + GIVEN_SHARES + lane * 4, a.shares + (choice < a.choices ? choice : 0), true);
        }
        arrive_after_copies(of.given.filled(chunks++));
        const float* scale = a.second_scales + (piece.expert * STEPS + piece.part() * SECOND_STEPS) * 2ll + lane;
        for (int k = 0; k < SECOND_STEPS; ++k, ++step) {
            of.steps.wait_for_room(step);
            if (lane < 2) copy_4(of.scales(step) + OF_WEIGHTS + lane * 4, scale + 2 * k, true);
            arrive_after_copies(of.steps.filled(step));
        }
    }
};

__device__ __forceinline__ void gather(const Experts& a, const Places& of) {
    const int quarters = quarters_of(a);
    Gathering gathering{a, of, static_cast<int>(threadIdx.x % 32), 0, 0};
    uint32_t turn = 0;
    for (Piece piece = of.next(turn, quarters); piece.is(); piece = of.next(turn, quarters)) {
        if (piece.expert < 0) continue;
        if (piece.second()) gathering.activations(piece);
        else gathering.rows(piece);
    }
    wait_for_copies();
}

using Sums = float[ROWS / 2];

// Products of 64 columns and of rows, 128 bytes each.
__device__ __forceinline__ void ask_products(Sums& found, uint32_t columns, uint32_t rows) {
    const uint64_t of_columns = tile_at(columns, 16), of_rows = tile_at(rows, 16);
#pragma unroll
    for (int i = 0; i < GROUP / 32; ++i) multiply_fp8(found, of_columns + 2 * i, of_rows + 2 * i, i > 0);
}

__device__ __forceinline__ void add_scaled(Sums& sums, const Sums& found, const float (&of_rows)[4], float of_weights) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) sums[i] += found[i] * (of_rows[i / 4 * 2 + i % 2] * of_weights);
}

// Of a thread that multiplies: its sums are of columns `upper` and 8 further of 64, rows 8 i + `row` and the next one, the first
// column's before the second one's.
struct Multiplying {
    const Experts& a;
    const Places& of;
    int warp, group, lane, upper, row;  // `group`: its warpgroup
    uint32_t step, chunks;

    __device__ __forceinline__ Multiplying(const Experts& a, const Places& of)
        : a(a), of(of), warp(warp_uniform(threadIdx.x / 32)), group(warp / 4), lane(threadIdx.x % 32), upper(warp % 4 * 16 + lane / 4),
          row(lane % 4 * 2), step(0), chunks(0) {}

    __device__ __forceinline__ void release() {
        products_wait<0>();
        if (lane == 0) arrive(of.steps.emptied(step));
    }
    // This thread's four rows' values, which lie there.
    __device__ __forceinline__ void load_rows(float (&to)[4], uint32_t at) const {
        const uint2 low = load_shared_2(at + row * 4), high = load_shared_2(at + (row + 8) * 4);
        to[0] = __uint_as_float(low.x), to[1] = __uint_as_float(low.y), to[2] = __uint_as_float(high.x), to[3] = __uint_as_float(high.y);
    }

    // Warpgroups have a GROUP of every step each; the first adds up, and writes.
    __device__ __forceinline__ void first(const Piece& piece) {
        Sums gate, up;
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) gate[i] = up[i] = 0;
        for (int k = 0; k < FIRST_STEPS; ++k, ++step) {
            Sums of_gate, of_up;
            of.steps.wait(step);
            fence_before_products();
            const uint32_t at = of.step(step) + group * 2 * PANEL, rows = of.step(step) + ROWS_AT + group * OF_ROWS;
            products_begin();
            ask_products(of_gate, at, rows);
            ask_products(of_up, at + PANEL, rows);
            products_commit();
            float of_rows[4];
            load_rows(of_rows, of.scales(step) + group * ROWS * 4);
            const uint32_t of_weights = of.scales(step) + OF_WEIGHTS + group * 4;
            const float gate_scale = load_shared_float(of_weights), up_scale = load_shared_float(of_weights + 8);
            release();
            add_scaled(gate, of_gate, of_rows, gate_scale);
            add_scaled(up, of_up, of_rows, up_scale);
        }
        const uint32_t sums = of.shared + SUMS_AT + threadIdx.x % 128 * 4;
        if (group == 1) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) {
                store_shared(sums + i * 512, __float_as_uint(gate[i]));
                store_shared(sums + (ROWS / 2 + i) * 512, __float_as_uint(up[i]));
            }
        }
        meet<1, MULTIPLYING>();
        if (group == 0) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) {
                gate[i] += load_shared_float(sums + i * 512);
                up[i] += load_shared_float(sums + (ROWS / 2 + i) * 512);
            }
        }
        meet<1, MULTIPLYING>();  // until then they lie there
        if (group == 1) return;
        unsigned short* to = a.inner + piece.tile() * static_cast<long long>(ROWS * WIDTH) + piece.part() * COLUMNS + upper;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i += 2) {
            const float2 g = rounded(gate[i], gate[i + 1]), u = rounded(up[i], up[i + 1]);
            const uint32_t both = pack_bf16(opened(g.x) * u.x, opened(g.y) * u.y);
            unsigned short* place = to + (i / 4 * 8 + row) * WIDTH + i / 2 % 2 * 8;
            place[0] = static_cast<unsigned short>(both);
            place[WIDTH] = static_cast<unsigned short>(both >> 16);
        }
        meet<2, MULTIPLYING / 2>();
        if (threadIdx.x == 0) add_to_counter(a.taken + 1 + piece.tile(), 1);
    }

    // A thread has 16 of a row's activations, which are 16 bytes when they are quantised.
    __device__ __forceinline__ void quantise() const {
        const int of_row = threadIdx.x / 16, at = threadIdx.x % 16;
        uint32_t given[8];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 four = load_shared_4(of.given_at(chunks) + of_row * WIDTH * 2 + at * 32 + i * 16);
            given[4 * i] = four.x, given[4 * i + 1] = four.y, given[4 * i + 2] = four.z, given[4 * i + 3] = four.w;
        }
        float largest = 1e-10f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 two = unpack_bf16(given[i]);
            largest = higher(largest, higher(fabsf(two.x), fabsf(two.y)));
        }
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) largest = higher(largest, shuffle_xor(largest, lanes));
        const Scale scale = exact_scale(largest);
        uint32_t found[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 low = unpack_bf16(given[2 * i]), high = unpack_bf16(given[2 * i + 1]);
            found[i] = pack_fp8(low.x * scale.inverse, low.y * scale.inverse) | pack_fp8(high.x * scale.inverse, high.y * scale.inverse) << 16;
        }
        const uint32_t to = of.inner(chunks) + at / 8 * OF_ROWS + of_row * 128 + ((at % 8 ^ (of_row & 7)) << 4);
        store_shared_4(to, {found[0], found[1], found[2], found[3]});
        if (at % 8 == 0) store_shared(of.inner_scales(chunks) + (at / 8 * ROWS + of_row) * 4, __float_as_uint(scale.scale));
    }

    // What a choice gets of this warp's 16 columns: a lane has eight of them, of one row. Null where the row is padding.
    __device__ __forceinline__ unsigned char* out_of(int choice, const Piece& piece) const {
        const int column = piece.part() * SECOND_STEPS * GROUP + warp * 16 + lane % 2 * 8;
        return choice < a.choices ? a.out + (choice * static_cast<long long>(HIDDEN) + column) * 2 : nullptr;
    }

    // Warpgroups have half of the columns of every step each.
    __device__ __forceinline__ void second(const Piece& piece) {
        float shares[4], low_scales[4], high_scales[4];
        const uint32_t given = of.given_at(chunks);
        of.given.wait(chunks);
        unsigned char* out = out_of(static_cast<int>(load_shared(given + GIVEN_CHOICES + lane / 2 * 4)), piece);
        load_rows(shares, given + GIVEN_SHARES);
        quantise();
        fence_before_products();
        sync_warp();
        if (lane == 0) arrive(of.given.emptied(chunks));
        meet<1, MULTIPLYING>();
        load_rows(low_scales, of.inner_scales(chunks));
        load_rows(high_scales, of.inner_scales(chunks) + ROWS * 4);
        const uint32_t written = of.shared + WRITTEN_AT + warp * WRITTEN, inner = of.inner(chunks++);
        for (int k = 0; k < SECOND_STEPS; ++k, ++step) {
            Sums low, high, sums;
            of.steps.wait(step);
            const uint32_t at = of.step(step) + group * PANEL;
            products_begin();
            ask_products(low, at, inner);
            ask_products(high, at + 2 * PANEL, inner + OF_ROWS);
            products_commit();
            const uint2 of_weights = load_shared_2(of.scales(step) + OF_WEIGHTS);
            release();
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) sums[i] = 0;
            add_scaled(sums, low, low_scales, __uint_as_float(of_weights.x));
            add_scaled(sums, high, high_scales, __uint_as_float(of_weights.y));
            const uint32_t to = written + row * PITCH + lane / 4 * 2;
#pragma unroll
            for (int i = 0; i < ROWS / 2; i += 2) {
                const uint32_t both = pack_bf16(sums[i] * shares[i / 4 * 2], sums[i + 1] * shares[i / 4 * 2 + 1]);
                const uint32_t place = to + i / 4 * 8 * PITCH + i / 2 % 2 * 16;
                store_shared_half(place, both & 0xffff);
                store_shared_half(place + PITCH, both >> 16);
            }
            sync_warp();
            const uint4 found = load_shared_4(written + lane / 2 * PITCH + lane % 2 * 16);
            if (out) *reinterpret_cast<uint4*>(out + k * GROUP * 2) = found;
            sync_warp();
        }
    }

    __device__ __forceinline__ void write_zeros(const Piece& piece) const {
        unsigned char* out = out_of(a.sorted[piece.tile() * ROWS + lane / 2], piece);
        for (int k = 0; out && k < SECOND_STEPS; ++k) *reinterpret_cast<uint4*>(out + k * GROUP * 2) = {0, 0, 0, 0};
    }
};

__device__ __forceinline__ void multiply(const Experts& a, const Places& of) {
    const int quarters = quarters_of(a);
    Multiplying multiplying(a, of);
    uint32_t turn = 0;
    for (Piece piece = of.next(turn, quarters); piece.is(); piece = of.next(turn, quarters)) {
        if (!piece.second()) {
            if (piece.expert >= 0) multiplying.first(piece);
        } else if (piece.expert >= 0) {
            multiplying.second(piece);
        } else {
            multiplying.write_zeros(piece);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) whole_experts(const __grid_constant__ Experts a) {
    SHARED_MEMORY(memory);
    const Places of((shared_address(memory) + 1023) & ~1023u);
    if (threadIdx.x == 0) {
        of.start();
        fence_before_products();
    }
    meet<0, THREADS>();
    wait_for_inputs();
    if (threadIdx.x < MULTIPLYING) {
        multiply(a, of);
    } else if (threadIdx.x >= MULTIPLYING + 32) {
        gather(a, of);
    } else if (threadIdx.x == MULTIPLYING) {
        bring_weights(a, of);
    }
}
