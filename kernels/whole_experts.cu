// Both products of experts of some tokens each, and what lies between them, for Hopper: block FP8 in, bfloat16 out.
// whole_experts.py compiles it at run time.
//
// Reading weights takes as long as everything, so no block may wait while others read. A tile is an expert and up to ROWS of its
// rows. Its work is in pieces: of the first product, 64 columns of the gate with those of up that belong to them, and then columns of
// the second one. Blocks take piece after piece, all first products before second ones. What a second product needs was taken long
// before, and nobody who has a first product waits for anybody. One thread brings weights, step after step through one piece and into
// the next; a warp brings rows, and waits for activations.

#include "activations.cuh"
#include "tiles.cuh"
#include "turns.cuh"

constexpr int COLUMNS = 64;  // of a warpgroup's products
constexpr int STEPS = HIDDEN / GROUP, GROUPS = WIDTH / GROUP;
constexpr int FIRSTS = WIDTH / COLUMNS, SECONDS = STEPS / EACH;  // pieces of a tile; EACH GROUPs of columns are one of the second product
// A step is two GROUPs of both parts of a first product, or of 128 columns of a second one.
constexpr int FIRST_STEPS = STEPS / 2, SECOND_STEPS = GROUPS / 2;
constexpr int WARPS = 8, MULTIPLYING = WARPS * 32, THREADS = MULTIPLYING + 64;
static_assert(STEPS % 2 == 0 && GROUPS % 2 == 0 && STEPS % EACH == 0, "pieces have whole steps");
static_assert(ROWS == 16 || ROWS == 32 || ROWS == 64, "tensor cores take so many, and a lane what it gathers of each");

// Shared memory: steps that are there or on their way, STAGES at once, of each four panels of weights and two GROUPs of rows, with
// scales; sums of a warpgroup for the other; what every warp writes.
constexpr uint32_t PANEL = COLUMNS * 128, OF_ROWS = ROWS * 128;
constexpr uint32_t ROWS_AT = 4 * PANEL, STAGE = ROWS_AT + 2 * OF_ROWS;
// Of a step: scales of rows and of weights; of a piece of a second product's first one, choices of rows and their shares too.
constexpr uint32_t OF_WEIGHTS = 2 * ROWS * 4, CHOICES = OF_WEIGHTS + 4 * 4, SHARES = CHOICES + ROWS * 4, SCALES = SHARES + ROWS * 4;
constexpr uint32_t SUMS_AT = STAGES * STAGE;
constexpr uint32_t PITCH = 48, WRITTEN = ROWS * PITCH;  // of 16 columns in bfloat16
constexpr uint32_t WRITTEN_AT = SUMS_AT + ROWS * 128 * 4;
constexpr uint32_t SCALES_AT = WRITTEN_AT + WARPS * WRITTEN;
constexpr int AHEAD = 4;  // pieces that are known at once
constexpr uint32_t PIECES_AT = SCALES_AT + STAGES * SCALES, COUNTED_AT = PIECES_AT + AHEAD * 8;
constexpr uint32_t BARRIERS_AT = COUNTED_AT + 8;
[[maybe_unused]] constexpr uint32_t SHARED_BYTES = BARRIERS_AT + 2 * (STAGES + AHEAD) * 8 + 1024;

struct Experts {
    TensorMap first;             // e4m3 [experts * 2 * WIDTH, HIDDEN] in boxes of COLUMNS rows, gate before up
    TensorMap second;            // e4m3 [experts * HIDDEN, WIDTH], likewise
    const unsigned char* x;      // e4m3 [tokens, HIDDEN]
    const float* x_scales;       // [tokens, STEPS]
    const float* first_scales;   // [experts, 2 * GROUPS, STEPS]
    const float* second_scales;  // [experts, STEPS, GROUPS]
    const float* shares;         // [choices]
    const int* sorted;           // [rows], choices, or their number and more where a row is padding
    const int* experts;          // [tiles]; -1 where it is another GPU's
    const int* padded;           // [1], rows of all tiles
    uint32_t* counters;          // [1 + tiles * GROUPS], zeros: pieces that are taken, and of each GROUP of a tile how far it is
    unsigned short* activated;   // bfloat16 [rows, WIDTH]
    unsigned char* inner;        // e4m3 [rows, WIDTH]
    float* inner_scales;         // [rows, GROUPS]
    unsigned char* out;          // bfloat16 [choices, HIDDEN]
    int choices, of_token;       // of all tokens, and of one
    int unused[4];
};

// How far a GROUP of a tile's activations is: both of its pieces count, and who quantises.
constexpr uint32_t THERE = 3;

// The `number`th of all tiles' pieces of first products, and behind these of second ones.
struct Piece {
    int number, expert, firsts;

    __device__ __forceinline__ bool second() const { return number >= firsts; }
    __device__ __forceinline__ bool is() const { return number < firsts / FIRSTS * (FIRSTS + SECONDS); }
    __device__ __forceinline__ int tile() const { return second() ? (number - firsts) / SECONDS : number / FIRSTS; }
    __device__ __forceinline__ int part() const { return second() ? (number - firsts) % SECONDS : number % FIRSTS; }
};

struct Places {
    uint32_t shared;
    Turns<STAGES> steps;
    Turns<AHEAD> pieces;

    __device__ __forceinline__ explicit Places(uint32_t shared)
        : shared(shared), steps{shared + BARRIERS_AT}, pieces{steps.at + steps.BYTES} {}
    __device__ __forceinline__ void start() const {
        steps.start(1 + 32, WARPS);
        pieces.start(1, WARPS + 1);
    }
    __device__ __forceinline__ uint32_t step(uint32_t turn) const { return shared + steps.place(turn) * STAGE; }
    __device__ __forceinline__ uint32_t scales(uint32_t turn) const { return shared + SCALES_AT + steps.place(turn) * SCALES; }
    __device__ __forceinline__ uint32_t piece(uint32_t turn) const { return shared + PIECES_AT + pieces.place(turn) * 8; }

    // The next piece, for a warp.
    __device__ __forceinline__ Piece next(uint32_t& turn, int firsts) const {
        pieces.wait_for(turn);
        const uint2 found = load_shared_2(piece(turn));
        sync_warp();
        if (threadIdx.x % 32 == 0) arrive(pieces.emptied(turn));
        ++turn;
        return {static_cast<int>(found.x), static_cast<int>(found.y), firsts};
    }
};

__device__ __forceinline__ int firsts_of(const Experts& a) { return a.padded[0] / ROWS * FIRSTS; }

// What one thread does, which takes pieces too, each while the one before comes.
__device__ __forceinline__ void bring_weights(const Experts& a, const Places& of) {
    const int firsts = firsts_of(a);
    const auto take = [&] {
        Piece piece{static_cast<int>(add_to_counter(a.counters, 1)), 0, firsts};
        if (piece.is()) piece.expert = a.experts[piece.tile()];
        return piece;
    };
    uint32_t step = 0, turn = 0;
    const auto bring = [&](const TensorMap& weights, int column, int row, int other_row, int third_column, int third_row) {
        of.steps.wait_for_room(step);
        const uint32_t at = of.step(step), filled = of.steps.filled(step);
        arrive_before_bytes(filled, 4 * PANEL);
        copy_tile(at, weights, column, row, filled);
        copy_tile(at + PANEL, weights, column, other_row, filled);
        copy_tile(at + 2 * PANEL, weights, third_column, third_row, filled);
        copy_tile(at + 3 * PANEL, weights, third_column, third_row + other_row - row, filled);
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
            int row = piece.expert * HIDDEN + piece.part() * EACH * GROUP;
            for (int i = 0; i < EACH; ++i, row += GROUP) {
                for (int k = 0; k < WIDTH; k += 2 * GROUP) bring(a.second, k, row, row + COLUMNS, k + GROUP, row);
            }
        } else {
            const int row = piece.expert * 2 * WIDTH + piece.part() * COLUMNS;
            for (int k = 0; k < HIDDEN; k += 2 * GROUP) bring(a.first, k, row, row + WIDTH, k + GROUP, row);
        }
        piece = next;
    }
}

// What one warp does: rows, and scales. A lane has 16 bytes of every fourth row, in both GROUPs of a step; and the scale of every row
// that comes 32 behind another, counting those of the second GROUP behind those of the first.
struct Gathering {
    static constexpr int COPIES = ROWS / 4, SCALED = 2 * ROWS / 32, OWN = (ROWS + 31) / 32;
    const Experts& a;
    const Places& of;
    int lane, row, byte;
    uint32_t step;
    const unsigned char* from[COPIES];
    const float* scale[SCALED];
    uint32_t there, scaled;  // bits: whether there is one

    __device__ __forceinline__ Gathering(const Experts& a, const Places& of)
        : a(a), of(of), lane(threadIdx.x % 32), row(lane / 8), byte(lane % 8 * 16), step(0) {}

    // Of rows that lie at `values`, `width` bytes each with as many scales as GROUPs. `number(row)` is a row's, or less than 0.
    template <int width, class Number>
    __device__ __forceinline__ void begin(const unsigned char* values, const float* scales, Number number) {
        there = scaled = 0;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int found = number(row + 4 * i);
            there |= static_cast<uint32_t>(found >= 0) << i;
            from[i] = values + max(found, 0) * static_cast<long long>(width) + byte;
        }
#pragma unroll
        for (int i = 0; i < SCALED; ++i) {
            const int at = lane + 32 * i, found = number(at % ROWS);
            scaled |= static_cast<uint32_t>(found >= 0) << i;
            scale[i] = scales + max(found, 0) * static_cast<long long>(width / GROUP) + at / ROWS;
        }
    }
    // The two GROUPs from `group` on, and `count` scales of weights.
    __device__ __forceinline__ void bring(int group, const float* of_weights, int count) {
        const uint32_t to = of.step(step) + ROWS_AT + row * 128, scales = of.scales(step);
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const uint32_t place = to + i * 4 * 128 + (byte ^ ((row + 4 * i & 7) << 4));
            copy_16(place, from[i] + group * GROUP, there >> i & 1);
            copy_16(place + OF_ROWS, from[i] + (group + 1) * GROUP, there >> i & 1);
        }
#pragma unroll
        for (int i = 0; i < SCALED; ++i) copy_4(scales + (lane + 32 * i) * 4, scale[i] + group, scaled >> i & 1);
        if (lane < count) copy_4(scales + OF_WEIGHTS + lane * 4, of_weights + group, true);
        arrive_after_copies(of.steps.filled(step++));
    }

    // Weights' scales are of the gate in both GROUPs, and of up.
    __device__ __forceinline__ void first(const Piece& piece) {
        const int* sorted = a.sorted + piece.tile() * ROWS;
        begin<HIDDEN>(a.x, a.x_scales, [&](int row) {
            const int choice = sorted[row];
            return choice < a.choices ? choice / a.of_token : -1;
        });
        const int gate = piece.expert * 2 * GROUPS + piece.part() / 2;
        const float* of_weights = a.first_scales + (gate + lane / 2 % 2 * GROUPS) * static_cast<long long>(STEPS) + lane % 2;
        for (int k = 0; k < STEPS; k += 2) {
            of.steps.wait_for_room(step);
            bring(k, of_weights, 4);
        }
    }
    __device__ __forceinline__ void second(const Piece& piece) {
        const int first_row = piece.tile() * ROWS;
        int choice[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) choice[i] = a.sorted[first_row + (lane + 32 * i) % ROWS];
        for (int group = lane; group < GROUPS; group += 32) {
            while (load_counter(a.counters + 1 + piece.tile() * GROUPS + group) < THERE) {
            }
        }
        sync_warp();
        begin<WIDTH>(a.inner, a.inner_scales, [&](int row) { return first_row + row; });
        const float* of_weights = a.second_scales + (piece.expert * STEPS + piece.part() * EACH) * static_cast<long long>(GROUPS) + lane;
        for (int i = 0; i < EACH; ++i, of_weights += GROUPS) {
            for (int k = 0; k < GROUPS; k += 2) {
                of.steps.wait_for_room(step);
                if (i == 0 && k == 0) {
                    const uint32_t to = of.scales(step) + lane * 4;
#pragma unroll
                    for (int j = 0; j < OWN; ++j) {
                        if (lane + 32 * j >= ROWS) break;
                        copy_4(to + CHOICES + j * 128, a.sorted + first_row + lane + 32 * j, true);
                        copy_4(to + SHARES + j * 128, a.shares + (choice[j] < a.choices ? choice[j] : 0), choice[j] < a.choices);
                    }
                }
                bring(k, of_weights, 2);
            }
        }
    }
};

__device__ __forceinline__ void gather(const Experts& a, const Places& of) {
    const int firsts = firsts_of(a);
    Gathering gathering(a, of);
    uint32_t turn = 0;
    for (Piece piece = of.next(turn, firsts); piece.is(); piece = of.next(turn, firsts)) {
        if (piece.expert < 0) continue;
        if (piece.second()) gathering.second(piece);
        else gathering.first(piece);
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

struct Columns {
    uint32_t at;
    float scale;
};
struct Factors {  // rows, and where their scales lie
    uint32_t at, scales;
};

// Of a thread that multiplies: its sums are of columns `upper` and 8 further of 64, rows 8 i + `row` and the next one, the first
// column's before the second one's.
struct Multiplying {
    const Experts& a;
    const Places& of;
    int warp, group, lane, upper, row;  // `group`: its warpgroup
    uint32_t step;

    __device__ __forceinline__ Multiplying(const Experts& a, const Places& of)
        : a(a), of(of), warp(warp_uniform(threadIdx.x / 32)), group(warp / 4), lane(threadIdx.x % 32), upper(warp % 4 * 16 + lane / 4),
          row(lane % 4 * 2), step(0) {}

    __device__ __forceinline__ void release() const {
        sync_warp();
        if (lane == 0) arrive(of.steps.emptied(step));
    }
    // Where rows' values lie, as `add_scaled` takes them.
    __device__ __forceinline__ void add_scaled(Sums& sums, const Sums& found, uint32_t of_rows, float of_weights) const {
#pragma unroll
        for (int i = 0; i < ROWS / 8; ++i) {
            const uint2 two = load_shared_2(of_rows + (8 * i + row) * 4);
            const float even = __uint_as_float(two.x) * of_weights, odd = __uint_as_float(two.y) * of_weights;
            sums[4 * i] += found[4 * i] * even;
            sums[4 * i + 1] += found[4 * i + 1] * odd;
            sums[4 * i + 2] += found[4 * i + 2] * even;
            sums[4 * i + 3] += found[4 * i + 3] * odd;
        }
    }

    // Two products of 64 columns and rows, 128 bytes each, one behind the other where there are no registers for both.
    __device__ __forceinline__ void add_products(
        Sums& sums, Columns columns, Factors rows, Sums& other_sums, Columns other_columns, Factors other_rows
    ) const {
        Sums found, others;
        products_begin();
        ask_products(found, columns.at, rows.at);
        if (ROWS <= 32) ask_products(others, other_columns.at, other_rows.at);
        products_commit();
        products_wait<0>();
        add_scaled(sums, found, rows.scales, columns.scale);
        if (ROWS <= 32) {
            add_scaled(other_sums, others, other_rows.scales, other_columns.scale);
        } else {
            products_begin();
            ask_products(found, other_columns.at, other_rows.at);
            products_commit();
            products_wait<0>();
            add_scaled(other_sums, found, other_rows.scales, other_columns.scale);
        }
    }

    // Warpgroups have a GROUP of every step each; the first adds up, and writes.
    __device__ __forceinline__ void first(const Piece& piece) {
        Sums gate, up;
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) gate[i] = up[i] = 0;
        for (int k = 0; k < FIRST_STEPS; ++k, ++step) {
            of.steps.wait_for(step);
            fence_before_products();
            const uint32_t at = of.step(step) + group * 2 * PANEL, scales = of.scales(step), of_weights = scales + OF_WEIGHTS + group * 4;
            const Factors both{of.step(step) + ROWS_AT + group * OF_ROWS, scales + group * ROWS * 4};
            add_products(gate, {at, load_shared_float(of_weights)}, both, up, {at + PANEL, load_shared_float(of_weights + 8)}, both);
            release();
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
        const int first_row = piece.tile() * ROWS, of_group = piece.part() / 2;
        unsigned short* to = a.activated + (first_row + row) * static_cast<long long>(WIDTH) + piece.part() * COLUMNS + upper;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i += 2) {
            const float2 g = rounded(gate[i], gate[i + 1]), u = rounded(up[i], up[i + 1]);
            const uint32_t both = pack_bf16(opened(g.x) * u.x, opened(g.y) * u.y);
            unsigned short* place = to + i / 4 * 8 * WIDTH + i / 2 % 2 * 8;
            place[0] = static_cast<unsigned short>(both);
            place[WIDTH] = static_cast<unsigned short>(both >> 16);
        }
        uint32_t* counter = a.counters + 1 + piece.tile() * GROUPS + of_group;
        if (count(counter) == 0) return;
        quantise(first_row, of_group);
        count(counter);
    }

    // What came before, once this warpgroup has written.
    __device__ __forceinline__ uint32_t count(uint32_t* counter) const {
        meet<2, MULTIPLYING / 2>();
        if (threadIdx.x == 0) store_shared(of.shared + COUNTED_AT, add_to_counter(counter, 1));
        meet<2, MULTIPLYING / 2>();
        return load_shared(of.shared + COUNTED_AT);
    }

    // A GROUP of a tile's activations, by the block that has the later half of it. A thread has 16 of a row at a time.
    __device__ __forceinline__ void quantise(int first_row, int of_group) const {
#pragma unroll
        for (int i = threadIdx.x; i < ROWS * 8; i += MULTIPLYING / 2) {
            const long long at = (first_row + i / 8) * static_cast<long long>(GROUPS) + of_group;
            const unsigned short* from = a.activated + at * GROUP + i % 8 * 16;
            const uint4 near = load_written(from), far = load_written(from + 8);
            const uint32_t given[8] = {near.x, near.y, near.z, near.w, far.x, far.y, far.z, far.w};
            float largest = 1e-10f;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 two = unpack_bf16(given[j]);
                largest = higher(largest, higher(fabsf(two.x), fabsf(two.y)));
            }
#pragma unroll
            for (int lanes = 1; lanes < 8; lanes *= 2) largest = higher(largest, shuffle_xor(largest, lanes));
            const Scale scale = exact_scale(largest);
            uint32_t found[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 low = unpack_bf16(given[2 * j]), high = unpack_bf16(given[2 * j + 1]);
                found[j] = pack_fp8(low.x * scale.inverse, low.y * scale.inverse) | pack_fp8(high.x * scale.inverse, high.y * scale.inverse) << 16;
            }
            *reinterpret_cast<uint4*>(a.inner + at * GROUP + i % 8 * 16) = {found[0], found[1], found[2], found[3]};
            if (i % 8 == 0) a.inner_scales[at] = scale.scale;
        }
    }

    // Where a choice has a piece's columns: of this warp's 16 a lane has eight, of every 16th row. Null where the row is padding.
    __device__ __forceinline__ unsigned char* out_of(int choice, const Piece& piece) const {
        const int column = piece.part() * EACH * GROUP + warp * 16 + lane % 2 * 8;
        return choice < a.choices ? a.out + (choice * static_cast<long long>(HIDDEN) + column) * 2 : nullptr;
    }

    // Warpgroups have half of the columns of every step each.
    __device__ __forceinline__ void second(const Piece& piece) {
        unsigned char* out[ROWS / 16];
        float shares[ROWS / 4];
        const uint32_t written = of.shared + WRITTEN_AT + warp * WRITTEN;
        for (int i = 0; i < EACH; ++i) {
            Sums sums;
#pragma unroll
            for (int j = 0; j < ROWS / 2; ++j) sums[j] = 0;
            for (int k = 0; k < SECOND_STEPS; ++k, ++step) {
                of.steps.wait_for(step);
                fence_before_products();
                const uint32_t at = of.step(step) + group * PANEL, rows = of.step(step) + ROWS_AT, scales = of.scales(step);
                if (i == 0 && k == 0) {
#pragma unroll
                    for (int j = 0; j < ROWS / 16; ++j) {
                        out[j] = out_of(static_cast<int>(load_shared(scales + CHOICES + (16 * j + lane / 2) * 4)), piece);
                    }
#pragma unroll
                    for (int j = 0; j < ROWS / 8; ++j) {
                        const uint2 two = load_shared_2(scales + SHARES + (8 * j + row) * 4);
                        shares[2 * j] = __uint_as_float(two.x), shares[2 * j + 1] = __uint_as_float(two.y);
                    }
                }
                const uint2 of_weights = load_shared_2(scales + OF_WEIGHTS);
                add_products(
                    sums, {at, __uint_as_float(of_weights.x)}, {rows, scales}, sums, {at + 2 * PANEL, __uint_as_float(of_weights.y)},
                    {rows + OF_ROWS, scales + ROWS * 4}
                );
                release();
            }
            const uint32_t to = written + row * PITCH + lane / 4 * 2;
#pragma unroll
            for (int j = 0; j < ROWS / 2; j += 2) {
                const uint32_t both = pack_bf16(sums[j] * shares[j / 4 * 2], sums[j + 1] * shares[j / 4 * 2 + 1]);
                const uint32_t place = to + j / 4 * 8 * PITCH + j / 2 % 2 * 16;
                store_shared_half(place, both & 0xffff);
                store_shared_half(place + PITCH, both >> 16);
            }
            sync_warp();
#pragma unroll
            for (int j = 0; j < ROWS / 16; ++j) {
                const uint4 found = load_shared_4(written + (16 * j + lane / 2) * PITCH + lane % 2 * 16);
                if (out[j]) *reinterpret_cast<uint4*>(out[j] + i * GROUP * 2) = found;
            }
            sync_warp();
        }
    }

    __device__ __forceinline__ void write_zeros(const Piece& piece) const {
#pragma unroll
        for (int j = 0; j < ROWS / 16; ++j) {
            unsigned char* out = out_of(a.sorted[piece.tile() * ROWS + 16 * j + lane / 2], piece);
            for (int i = 0; out && i < EACH; ++i) *reinterpret_cast<uint4*>(out + i * GROUP * 2) = {0, 0, 0, 0};
        }
    }
};

__device__ __forceinline__ void multiply(const Experts& a, const Places& of) {
    const int firsts = firsts_of(a);
    Multiplying multiplying(a, of);
    uint32_t turn = 0;
    for (Piece piece = of.next(turn, firsts); piece.is(); piece = of.next(turn, firsts)) {
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
