// What sources share that attend for several rows of one request: sparse_verify.cu and sparse_prefill.cu.

#pragma once

#include "tiles.cuh"
#include "warps.cuh"

#define INFINITE __int_as_float(0x7f800000)

constexpr uint32_t RANKS = 1 << RANKS_LOG2;  // that divide slots; RANK is this one, and its rows of the cache its slots over them
constexpr int LATENT = 512;
constexpr int LINES = 64;     // of a tile: heads of one row after the other
constexpr int TOKENS = 64;    // of a step
constexpr int ATTENDING = 256;  // threads: two warpgroups
constexpr int GATHERING = 128;
constexpr int THREADS = ATTENDING + GATHERING;
constexpr int WARPS = ATTENDING / 32;
constexpr int PER_THREAD = (TOPK + ATTENDING - 1) / ATTENDING;  // entries of a row
constexpr int ENTRIES = ROWS * PER_THREAD * ATTENDING;           // of a group, some of them none
static_assert(PER_THREAD <= 32, "a thread has a bit for every entry of a row that it looks at");
static_assert(ROWS * HEADS <= LINES && ROWS <= 8, "the rows of a group do not fit a tile, or their bits a byte");

// Shared memory. A panel is 64 rows of 64 values, 128 bytes a row, whose 16-byte pieces are swizzled as tensor cores want them.
constexpr uint32_t PANEL = LINES * 128;
constexpr uint32_t PANELS = 9 * PANEL;  // 512 values of the latent and 64 of RoPE
constexpr uint32_t QUERY_AT = 0;
constexpr uint32_t TOKENS_AT = PANELS;  // two steps
constexpr uint32_t WEIGHTS_AT = 3 * PANELS;
constexpr uint32_t BITS_AT = WEIGHTS_AT + PANEL;           // of the tokens of two steps: rows that chose them
constexpr uint32_t HIGHEST_AT = BITS_AT + 2 * TOKENS * 4;  // two scores of every line; before, words at the list's begin
constexpr uint32_t FILLED_AT = HIGHEST_AT + 2 * LINES * 4;  // barriers of two steps: their tokens are there
constexpr uint32_t EMPTIED_AT = FILLED_AT + 2 * 8;          // and are weighed
constexpr uint32_t OWN_AT = EMPTIED_AT + 2 * 8;             // of one source alone

constexpr uint32_t SLOT = 0xffffff;  // of a word; the rows' bits are above it
constexpr uint32_t EMPTY = 0xffffffff;

struct Attend {
    const unsigned char* q_nope;  // bfloat16 [rows, HEADS, 512], strides below in bytes
    const unsigned char* q_rope;  // bfloat16 [rows, HEADS, 64]
    const unsigned char* kv;      // [slots, 576] in bfloat16, or FP8: 512 values, 4 scales in float32, 64 values in bfloat16
    const int* slots;             // [rows, slots_stride], -1 where there is none
    const int* lens;              // [rows], entries of a row to look at
    uint32_t* lists;              // [groups, parts, ENTRIES], what blocks hand to themselves
    unsigned char* out;           // bfloat16 [rows * HEADS, 512]
    unsigned char* of_parts;      // bfloat16 [rows * HEADS, parts, 512], each part by itself; where parts are several
    float* lse;                   // [rows * HEADS, parts], base 2, -inf where a part has nothing for a line; likewise
    float* joined_lse;            // [rows * HEADS], of all parts; null where nobody asks
    uint32_t* met;                // [groups, 2], blocks that have written their part and that have seen all parts; zeros between calls
    long long q_nope_row, q_nope_head, q_rope_row, q_rope_head, slots_stride, kv_stride;
    float scale;  // of scores, base 2
    int parts, all_rows, rows_per_request, groups_per_request;
};

// Of the highest score, in base 2, and the sum of all over it.
__device__ __forceinline__ float lse_of(float best, float sum) { return sum == 0 ? -INFINITE : best + log2_fast(sum); }

__device__ __forceinline__ float sum_of_line(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// What is subtracted from scores where `best` weighs 1: a line may have none yet.
__device__ __forceinline__ float base_of(float best) { return best == -INFINITE ? 0 : best; }

// Of a thread's two lines.
__device__ __forceinline__ void fade(float (&out)[128], float upper, float lower) {
#pragma unroll
    for (int i = 0; i < 128; i += 4) {
        out[i] *= upper;
        out[i + 1] *= upper;
        out[i + 2] *= lower;
        out[i + 3] *= lower;
    }
}

// Asks for the scores of a step's tokens, all or half of them.
template <int N> __device__ __forceinline__ void ask_scores(float (&s)[N], uint64_t query_tile, uint64_t tokens_tile) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = 0;
    products_begin();
#pragma unroll
    for (int k = 0; k < 36; ++k) {
        const uint32_t along = k / 4 * PANEL + k % 4 * 32;
        score(s, query_tile + (along >> 4), tokens_tile + (along >> 4), k > 0);
    }
    products_commit();
}

// Asks for what a step's tokens add to half of the latent.
__device__ __forceinline__ void ask_sums(float (&out)[128], uint64_t weights_tile, uint64_t latent_tile) {
    products_begin();
#pragma unroll
    for (int k = 0; k < TOKENS / 16; ++k) weigh(out, weights_tile + (k * 32 >> 4), latent_tile + (k * 16 * 128 >> 4));
    products_commit();
}

// The rows of this block's group.
struct Group {
    int row, rows;

    __device__ __forceinline__ explicit Group(const Attend& a) {
        const int group = blockIdx.y % a.groups_per_request;
        row = blockIdx.y / a.groups_per_request * a.rows_per_request + group * ROWS;
        rows = min(ROWS, min(a.rows_per_request - group * ROWS, a.all_rows - row));
    }
};

// What a thread looks at of a group: entries of its rows, as rows of this rank's cache; EMPTY where it has none.
struct Chosen {
    uint32_t slot[ROWS][PER_THREAD];
    int end[ROWS];
};

__device__ __forceinline__ Chosen chosen_of(const Attend& a, int row, int rows) {
    Chosen chosen;
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        chosen.end[j] = j < rows ? a.lens[row + j] : 0;
#pragma unroll
        for (int c = 0; c < PER_THREAD; ++c) {
            const int i = c * ATTENDING + static_cast<int>(threadIdx.x);
            const uint32_t slot = j < rows && i < TOPK ? a.slots[(row + j) * a.slots_stride + i] : EMPTY;
            chosen.slot[j][c] = slot % RANKS == RANK ? slot / RANKS : EMPTY;  // -1 over their number is no slot
        }
    }
    return chosen;
}

__device__ __forceinline__ void meet_attending() { meet<1, ATTENDING>(); }

__device__ __forceinline__ void meet_all() { meet<2, THREADS>(); }

constexpr int OF_PASS = GATHERING / 8;  // rows that are gathered at once: eight threads have one
constexpr int PASSES = TOKENS / OF_PASS;

#if FP8
// Two of four e4m3 values, times a scale. A value's bits, moved to where bfloat16 has them, are 2^-120 of it, denormal ones too.
__device__ __forceinline__ uint32_t dequantised(uint32_t four, uint32_t selected, uint32_t scale, uint32_t rest) {
    const uint32_t apart = __byte_perm(four, 0, selected);
    const uint32_t moved = (apart & 0x80008000) | (apart >> 4 & 0x07f007f0);
    const uint32_t value = multiply_bf16(moved, 0x7b807b80);
    return multiply_add_bf16(value, scale, multiply_bf16(value, rest));
}
#endif

// A thread that gathers: one 16-byte piece of every 128 bytes of a row of a panel, and of the rows 16, 32 and 48 further. In FP8
// a piece has the values of two pieces of a panel.
struct Gathering {
    const Attend& a;
    uint32_t shared;
    int row, piece;

    __device__ __forceinline__ Gathering(const Attend& a, uint32_t shared)
        : a(a), shared(shared), row((threadIdx.x - ATTENDING) / 8), piece(threadIdx.x % 8) {}

    __device__ __forceinline__ uint32_t row_at(uint32_t begin, int pass) const {
        return shared + begin + (row + pass * OF_PASS) * 128;
    }
    __device__ __forceinline__ uint32_t swizzled() const { return (piece ^ (row & 7)) << 4; }  // of all rows of a thread

    __device__ __forceinline__ void query(int first_row, int lines) const {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int line = row + pass * OF_PASS, j = line / HEADS, head = line % HEADS;
            const bool there = line < lines;
            const unsigned char* nope = a.q_nope + (there ? (first_row + j) * a.q_nope_row + head * a.q_nope_head : 0) + 16 * piece;
            const unsigned char* rope = a.q_rope + (there ? (first_row + j) * a.q_rope_row + head * a.q_rope_head : 0) + 16 * piece;
            const uint32_t to = row_at(QUERY_AT, pass) + swizzled();
#pragma unroll
            for (int panel = 0; panel < 8; ++panel) copy_16(to + panel * PANEL, nope + panel * 128, there);
            copy_16(to + 8 * PANEL, rope, there);
        }
    }

    __device__ __forceinline__ void bits(int step, int pass, uint32_t word) const {
        if (piece == 0) store_shared(shared + BITS_AT + 4 * (step % 2 * TOKENS + row + pass * OF_PASS), word >> 24);
    }

    // In FP8 each quarter of the latent goes to the row's place in a panel, and the scales to the fifth: all in this row alone.
    __device__ __forceinline__ void copy(int step, int pass, uint32_t word) const {
        const unsigned char* from = a.kv + (word & SLOT) * a.kv_stride + 16 * piece;
        const uint32_t to = row_at(TOKENS_AT, pass) + step % 2 * PANELS;
#if FP8
#pragma unroll
        for (int i = 0; i < 4; ++i) copy_16(to + i * PANEL + 16 * piece, from + i * 128, word != 0);
        if (piece == 0) copy_16(to + 4 * PANEL, from + LATENT, word != 0);
        copy_16(to + 8 * PANEL + swizzled(), from + LATENT + 16, word != 0);
#else
#pragma unroll
        for (int panel = 0; panel < 9; ++panel) copy_16(to + panel * PANEL + swizzled(), from + panel * 128, word != 0);
#endif
    }

#if FP8
    // Once they are copied: quarters become panels. The threads of a row are of one warp. One pass after the other, as the code of
    // all of them would not stay in the instruction cache beside the other warpgroups'.
    __device__ __forceinline__ void dequantise(int step) const {
        const uint32_t upper = piece / 4;  // which of its two pieces comes first, so that threads of a row write to all banks
        const uint32_t first = ((piece % 4 * 2 + upper) ^ (row & 7)) << 4, second = first ^ 16;
        wait_for_copies();
        sync_warp();
#pragma unroll 1
        for (int pass = 0; pass < PASSES; ++pass) {
            const uint32_t at = row_at(TOKENS_AT, pass) + step % 2 * PANELS, panel = at + upper * PANEL;
            uint4 quarters[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) quarters[i] = load_shared_4(at + i * PANEL + 16 * piece);
            const uint4 of_row = load_shared_4(at + 4 * PANEL);
            const uint32_t scales[4] = {of_row.x, of_row.y, of_row.z, of_row.w};
            sync_warp();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 four = quarters[i];
                const float scale = __uint_as_float(scales[i]);
                const uint32_t rounded = pack_bf16(scale, scale);
                const float left = scale - __uint_as_float(rounded << 16);
                const uint32_t rest = pack_bf16(left, left);
                const auto eight = [&](uint32_t low, uint32_t high) {
                    return uint4{
                        dequantised(low, 0x1404, rounded, rest), dequantised(low, 0x3424, rounded, rest),
                        dequantised(high, 0x1404, rounded, rest), dequantised(high, 0x3424, rounded, rest)
                    };
                };
                store_shared_4(panel + 2 * i * PANEL + first, eight(upper ? four.z : four.x, upper ? four.w : four.y));
                store_shared_4(panel + 2 * i * PANEL + second, eight(upper ? four.x : four.z, upper ? four.y : four.w));
            }
        }
        fence_before_products();
    }
#endif

    // A step's tokens are there, or will be once its copies have landed; so is the query, before the first. An arrival behind copies
    // orders nothing but those: rows' bits, which a thread stores, are handed over by one more arrival of its warp.
    __device__ __forceinline__ void filled(int step) const {
#if FP8
        arrive(shared + FILLED_AT + step % 2 * 8);
#else
        arrive_after_copies(shared + FILLED_AT + step % 2 * 8);
        sync_warp();
        if (threadIdx.x % 32 == 0) arrive(shared + FILLED_AT + step % 2 * 8);
#endif
    }
};

constexpr int FILLING = FP8 ? GATHERING : GATHERING + GATHERING / 32;  // arrivals that fill a step

__device__ __forceinline__ int steps_of(int listed) { return (listed + TOKENS - 1) / TOKENS; }

// Gathers every step's tokens once those of two steps before are weighed; those of `before` steps, none or one, are on their way.
template <int before>
__device__ __forceinline__ void gather_list(const Gathering& gather, uint32_t shared, const uint32_t* list, int listed) {
    // Words of the list are asked for a step early. Those in shared memory are read before others write there.
    uint32_t words[PASSES], later[PASSES];
    const auto place_of = [&](int step, int pass) { return (step - before) * TOKENS + gather.row + pass * OF_PASS; };
    const auto kept = [&](int place) { return place < listed ? load_shared(shared + HIGHEST_AT + 4 * place) : 0u; };
    const auto word_of = [&](int place) { return place < listed ? load_list(list + place) : 0u; };
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        words[pass] = kept(place_of(before, pass));
        later[pass] = before ? 0 : kept(place_of(1, pass));
    }
    if (before) {
        gather.filled(0);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) later[pass] = word_of(place_of(2, pass));
    }
    const int steps = before + steps_of(listed);
    for (int step = before; step < steps; ++step) {
        if (step >= 2) wait_for_turn(shared + EMPTIED_AT + step % 2 * 8, step / 2 - 1);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            gather.bits(step, pass, words[pass]);
            gather.copy(step, pass, words[pass]);
            words[pass] = later[pass];
            later[pass] = word_of(place_of(step + 2, pass));
        }
#if FP8
        gather.dequantise(step);
#endif
        gather.filled(step);
    }
    wait_for_copies();
}

constexpr int PIECES = LATENT / 8;  // of a line, 16 bytes each

// Of a thread of the two warpgroups that attend: what it has of a tile of products are lines `upper` and `upper` + 8, columns
// 8 i + `column` and the next one. A half has the first 256 columns of the latent or the others.
struct OfThread {
    int warp, lane, half, upper, lower, column;

    __device__ __forceinline__ OfThread()
        : warp(warp_uniform(threadIdx.x / 32)), lane(threadIdx.x % 32), half(warp / 4), upper(warp % 4 * 16 + lane / 4),
          lower(upper + 8), column(lane % 4 * 2) {}

    __device__ __forceinline__ static uint32_t bit_of(int line, int lines) { return line < lines ? 1u << (line / HEADS) : 0; }
};

// Divides by the sums of weights, and writes lines and log-sum-exps: of a part, or where there is one alone the result.
__device__ __forceinline__ void write_lines(
    const Attend& a, uint32_t shared, const OfThread& of, int part, int lines, long long first_line, const float (&out)[128],
    float upper_best, float lower_best, float upper_sum, float lower_sum
) {
    const int thread = threadIdx.x, half = of.half, upper = of.upper, lower = of.lower, column = of.column;
    const uint32_t highest_at = shared + HIGHEST_AT;
    upper_sum = sum_of_line(upper_sum);
    lower_sum = sum_of_line(lower_sum);
    meet_attending();
    if (column == 0) {
        store_shared(highest_at + 4 * (half * LINES + upper), __float_as_uint(upper_sum));
        store_shared(highest_at + 4 * (half * LINES + lower), __float_as_uint(lower_sum));
    }
    meet_attending();
    // In one order, so that both halves divide by the same.
    const auto sum_of = [&](int line) {
        const float low = load_shared_float(highest_at + 4 * line);
        return low + load_shared_float(highest_at + 4 * (LINES + line));
    };
    upper_sum = sum_of(upper);
    lower_sum = sum_of(lower);
    const float upper_over = upper_sum == 0 ? 0 : 1 / upper_sum, lower_over = lower_sum == 0 ? 0 : 1 / lower_sum;
    float* const lse = a.parts > 1 ? a.lse + part : a.joined_lse;
    if (lse && half == 0 && column == 0) {
        if (upper < lines) lse[(first_line + upper) * a.parts] = lse_of(upper_best, upper_sum);
        if (lower < lines) lse[(first_line + lower) * a.parts] = lse_of(lower_best, lower_sum);
    }
    // Through shared memory, where tokens lay, so that a line leaves in one piece.
    const uint32_t lines_at = shared + TOKENS_AT;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const uint32_t at = (((half * 32 + i) ^ (upper & 7)) << 4) + column * 2;
        store_shared(lines_at + upper * 2 * LATENT + at, pack_bf16(out[4 * i] * upper_over, out[4 * i + 1] * upper_over));
        store_shared(lines_at + lower * 2 * LATENT + at, pack_bf16(out[4 * i + 2] * lower_over, out[4 * i + 3] * lower_over));
    }
    meet_attending();
    unsigned char* const out_at = a.parts == 1 ? a.out + first_line * 2 * LATENT : a.of_parts + (first_line * a.parts + part) * 2 * LATENT;
#pragma unroll 8
    for (int i = thread; i < lines * PIECES; i += ATTENDING) {
        const int line = i / PIECES, along = i % PIECES;
        const uint4 values = load_shared_4(lines_at + line * 2 * LATENT + ((along ^ (line & 7)) << 4));
        *reinterpret_cast<uint4*>(out_at + static_cast<long long>(line) * a.parts * 2 * LATENT + along * 16) = values;
    }
}
