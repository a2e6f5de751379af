// Sparse MLA for many groups of rows of one request, for Hopper, on a bfloat16 KV cache: prefills, and rounds of many requests.
// sparse_verify.py compiles it at run time, and takes sparse_verify.cu for FP8 and where a group's slots are divided.
//
// A block takes one group of rows, whose heads are the 64 lines of a tensor-core tile, and the different slots that they chose.
// Every row marks its slots in a map of bits in shared memory, and each slot is listed once with a bit for every row that chose it.
// Slots further apart than a map has bits are listed one window after the other. Order and sums depend on the inputs alone, so
// that equal inputs give equal bits.
// Two warpgroups make the list and walk it, 64 tokens a step. They take turns to score a step's tokens, for all lines; the weights
// and the score of each line that weighs 1 go through shared memory, and each of both weighs one half of the latent. So while one
// makes weights of scores, tensor cores work for the other. A third gathers the next step's tokens meanwhile.
//
// Compute Sanitizer's racecheck takes some of this for races, as it does not follow barriers in shared memory.

#include "rows_together.cuh"

static_assert(!FP8, "it makes no bfloat16 values of FP8 ones");

// Registers of each: all that the launch gives 384 threads of 168.
constexpr int ATTENDING_REGISTERS = 216, GATHERING_REGISTERS = 72;

constexpr uint32_t WEIGHTS_OF_TOKENS = 8 * PANEL;    // a step's weights lie where its tokens' RoPE lay, once they have scores
constexpr uint32_t WEIGHTED_AT = OWN_AT;             // barriers of two steps: they have weights
constexpr uint32_t RAISED_AT = WEIGHTED_AT + 2 * 8;  // and of the first of two: what weighs 1 is decided
constexpr uint32_t LISTED_AT = RAISED_AT + 8;        // how many slots are
constexpr uint32_t BY_WARP_AT = LISTED_AT + 8;       // two numbers of each, while the list is made
constexpr uint32_t SHARED_BYTES = BY_WARP_AT + 2 * WARPS * 4;
// While the list is made, where tokens will lie: a bit for every slot of a window, by row.
constexpr uint32_t MARKS_AT = TOKENS_AT;
constexpr uint32_t OF_ROW = (BITS_AT - MARKS_AT) / ROWS / 16 * 16;  // bytes
constexpr uint32_t WINDOW = 8 * OF_ROW;                            // slots
constexpr uint32_t KEPT = 2 * TOKENS;  // words at the list's begin that are kept in shared memory

// What weighs 1 of scores in base 2: another one where weights would pass 2^8, as sums so far are multiplied then.
__device__ __forceinline__ float raised(float best, float highest) { return highest > best + 8 ? highest : best; }

__device__ __forceinline__ void meet_half(bool second) { second ? meet<4, ATTENDING / 2>() : meet<3, ATTENDING / 2>(); }

// Of the numbers that a block's warps have, in one of two places.
__device__ __forceinline__ uint32_t of_warp(uint32_t shared, int place, int warp) {
    return load_shared(shared + BY_WARP_AT + 4 * (place * WARPS + warp));
}

// Writes the words of this block's slots to `list`, and the first KEPT of them to shared memory too; how many there are. They
// come in the order of windows of slots, and of threads within.
__device__ __forceinline__ int make_list(uint32_t shared, int warp, uint32_t* list, const Chosen& chosen) {
    const int thread = threadIdx.x, lane = thread % 32;
    const auto tell = [&](int place, uint32_t x, bool tells) {
        if (tells) store_shared(shared + BY_WARP_AT + 4 * (place * WARPS + warp), x);
    };
    uint32_t here[ROWS];  // which of a thread's entries are slots, a bit each
    uint32_t begin = EMPTY, last = 0;
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        here[j] = 0;
#pragma unroll
        for (int c = 0; c < PER_THREAD; ++c) {
            const uint32_t slot = chosen.slot[j][c];
            const bool is = c * ATTENDING + thread < chosen.end[j] && slot < SLOT;
            here[j] |= static_cast<uint32_t>(is) << c;
            begin = is ? min(begin, slot) : begin;
            last = is ? max(last, slot) : last;
        }
    }
    tell(0, warp_least(begin), lane == 0);
    tell(1, warp_most(last), lane == 0);
    meet_attending();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        begin = min(begin, of_warp(shared, 0, w));
        last = max(last, of_warp(shared, 1, w));
    }
    uint32_t listed = 0;
    while (begin != EMPTY) {  // a window
        const uint32_t words = min(last - begin, WINDOW - 1) / 32 + 1;
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            for (uint32_t i = 4 * thread; i < words; i += 4 * ATTENDING) store_shared_4(shared + MARKS_AT + j * OF_ROW + 4 * i, {0, 0, 0, 0});
        }
        meet_attending();
        uint32_t next = EMPTY;  // slot behind the window
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            const uint32_t marks = shared + MARKS_AT + j * OF_ROW;
            uint32_t along[PER_THREAD];
            bool differ = false;
#pragma unroll
            for (int c = 0; c < PER_THREAD; ++c) {
                const bool is = here[j] >> c & 1;
                along[c] = is ? chosen.slot[j][c] - begin : EMPTY;
                if (is && along[c] >= WINDOW && chosen.slot[j][c] >= begin) next = min(next, chosen.slot[j][c]);
                const uint32_t of_first = shuffle_from(along[c], 0);
                differ |= is && along[c] / 32 != of_first / 32;
            }
            if (warp_ballot(differ)) {
#pragma unroll
                for (int c = 0; c < PER_THREAD; ++c) {
                    if (along[c] < WINDOW) or_shared(marks + along[c] / 32 * 4, 1u << along[c] % 32);
                }
            } else {  // slots that follow each other, as those of a short row do
#pragma unroll
                for (int c = 0; c < PER_THREAD; ++c) {
                    const uint32_t bits = warp_or(along[c] < WINDOW ? 1u << along[c] % 32 : 0);
                    if (lane == 0 && bits) or_shared(marks + along[c] / 32 * 4, bits);
                }
            }
        }
        tell(0, warp_least(next), lane == 0);
        meet_attending();
#pragma unroll
        for (int w = 0; w < WARPS; ++w) next = min(next, of_warp(shared, 0, w));
        uint32_t count = 0;
        for (uint32_t i = thread; i < words; i += ATTENDING) {
            uint32_t any = 0;
#pragma unroll
            for (int j = 0; j < ROWS; ++j) any |= load_shared(shared + MARKS_AT + j * OF_ROW + 4 * i);
            count += __popc(any);
        }
        const uint32_t before = of_lanes_before(count, lane);
        tell(1, before + count, lane == 31);
        meet_attending();
        uint32_t place = listed + before;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            place += w < warp ? of_warp(shared, 1, w) : 0;
            listed += of_warp(shared, 1, w);
        }
        for (uint32_t i = thread; i < words; i += ATTENDING) {
            uint32_t marks[ROWS], any = 0;
#pragma unroll
            for (int j = 0; j < ROWS; ++j) any |= marks[j] = load_shared(shared + MARKS_AT + j * OF_ROW + 4 * i);
            for (; any; any &= any - 1, ++place) {
                const int bit = __ffs(any) - 1;
                uint32_t word = begin + 32 * i + bit;
#pragma unroll
                for (int j = 0; j < ROWS; ++j) word |= (marks[j] >> bit & 1) << (24 + j);
                list[place] = word;
                if (place < KEPT) store_shared(shared + HIGHEST_AT + 4 * place, word);
            }
        }
        begin = next;
        if (begin != EMPTY) meet_attending();  // the marks are read
    }
    if (thread == 0) store_shared(shared + LISTED_AT, listed);
    return listed;
}

struct Weighted {  // of a step, and a thread's lines
    float upper_highest, lower_highest, upper_more, lower_more;
};

// What two warpgroups do: the list, and attention to it.
__device__ __forceinline__ void attend_to_list(const Attend& a, uint32_t shared, int row, int rows, uint32_t* list) {
    const OfThread of;
    const int warp = of.warp, lane = of.lane, half = of.half, upper = of.upper, lower = of.lower, column = of.column;
    const int lines = rows * HEADS;
    const int listed = make_list(shared, warp, list, chosen_of(a, row, rows));
    meet_all();  // the list is written, and what it was made from is read

    const uint32_t upper_bit = OfThread::bit_of(upper, lines), lower_bit = OfThread::bit_of(lower, lines);
    const uint32_t highest_at = shared + HIGHEST_AT;
    const uint64_t query_tile = tile_at(shared + QUERY_AT, 16);
    float upper_best = -INFINITE, lower_best = -INFINITE, upper_sum = 0, lower_sum = 0;
    float out[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] = 0;

    const auto tokens_of = [&](int step) { return shared + TOKENS_AT + step % 2 * PANELS; };
    // Tokens of a step may be written over, as far as this warp goes.
    const auto release = [&](int step) {
        if (lane == 0) arrive(shared + EMPTIED_AT + step % 2 * 8);
    };
    // Sums and what was weighed so far become those of other scores that weigh 1.
    const auto raise = [&](float upper_new, float lower_new) {
        if (!warp_ballot(upper_new != upper_best || lower_new != lower_best)) return;
        const float upper_fade = exp2_fast(upper_best - base_of(upper_new)), lower_fade = exp2_fast(lower_best - base_of(lower_new));
        upper_best = upper_new;
        lower_best = lower_new;
        upper_sum *= upper_fade;
        lower_sum *= lower_fade;
        fade(out, upper_fade, lower_fade);
    };
    const auto raise_as_other = [&](int step) {
        const uint32_t highest = highest_at + 4 * (step % 2 * LINES);
        raise(load_shared_float(highest + 4 * upper), load_shared_float(highest + 4 * lower));
    };
    // Asks for what a step's tokens add to the half.
    const auto weigh_step = [&](int step) {
        const uint32_t tokens = tokens_of(step);
        const uint64_t weights_tile = tile_at(tokens + WEIGHTS_OF_TOKENS, 16), latent_tile = tile_at(tokens + half * 4 * PANEL, PANEL);
        ask_sums(out, weights_tile, latent_tile);
    };
    // Asks for the scores of a step's tokens.
    const auto score_step = [&](int step, float (&s)[32]) {
        const uint32_t tokens = tokens_of(step);
        wait_for_turn(shared + FILLED_AT + step % 2 * 8, step / 2);
        fence_before_products();
        const uint64_t tokens_tile = tile_at(tokens, 16);
        ask_scores(s, query_tile, tokens_tile);
    };
    // Of a thread's scores of a step, a bit each: its line is of a row that chose the token.
    const auto chosen_of_step = [&](int step) {
        uint32_t chosen = 0;
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) {
            const uint2 bits = load_shared_2(shared + BITS_AT + 4 * (step % 2 * TOKENS + 8 * i + column));
            chosen |= (bits.x & upper_bit ? 1u : 0) << 4 * i | (bits.y & upper_bit ? 2u : 0) << 4 * i;
            chosen |= (bits.x & lower_bit ? 4u : 0) << 4 * i | (bits.y & lower_bit ? 8u : 0) << 4 * i;
        }
        return chosen;
    };
    // Scores become weights, which both warpgroups may read; what else it returns: the highest scores and sums of weights.
    const auto weights_of_step = [&](int step, bool second, float (&s)[32], uint32_t chosen) {  // `second` is a constant
        const uint32_t weights_at = tokens_of(step) + WEIGHTS_OF_TOKENS;
        float upper_highest = -INFINITE, lower_highest = -INFINITE;
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            s[i] = chosen >> i & 1 ? s[i] : -INFINITE;
            s[i + 1] = chosen >> (i + 1) & 1 ? s[i + 1] : -INFINITE;
            s[i + 2] = chosen >> (i + 2) & 1 ? s[i + 2] : -INFINITE;
            s[i + 3] = chosen >> (i + 3) & 1 ? s[i + 3] : -INFINITE;
            upper_highest = higher(upper_highest, higher(s[i], s[i + 1]));
            lower_highest = higher(lower_highest, higher(s[i + 2], s[i + 3]));
        }
        upper_highest = raised(upper_best, highest_of_line(upper_highest) * a.scale);
        lower_highest = raised(lower_best, highest_of_line(lower_highest) * a.scale);
        if (column == 0) {
            store_shared(highest_at + 4 * (step % 2 * LINES + upper), __float_as_uint(upper_highest));
            store_shared(highest_at + 4 * (step % 2 * LINES + lower), __float_as_uint(lower_highest));
        }
        if (!second) {
            sync_warp();
            if (lane == 0) arrive(shared + RAISED_AT);
        }
        const float upper_from = base_of(upper_highest), lower_from = base_of(lower_highest);
        float upper_more = 0, lower_more = 0;
        const uint32_t at_row = made_again(upper * 128 + column * 2), swizzle = (upper & 7) << 4;  // those of `lower` too
        meet_half(second);  // all warps have the scores, for which RoPE was read
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) {
            const float p0 = exp2_fast(s[4 * i] * a.scale - upper_from), p1 = exp2_fast(s[4 * i + 1] * a.scale - upper_from);
            const float p2 = exp2_fast(s[4 * i + 2] * a.scale - lower_from), p3 = exp2_fast(s[4 * i + 3] * a.scale - lower_from);
            const uint32_t of_upper = pack_bf16(p0, p1), of_lower = pack_bf16(p2, p3);
            upper_more += __uint_as_float(of_upper << 16) + __uint_as_float(of_upper & 0xffff0000);
            lower_more += __uint_as_float(of_lower << 16) + __uint_as_float(of_lower & 0xffff0000);
            const uint32_t at = weights_at + (at_row ^ swizzle ^ i << 4);
            store_shared(at, of_upper);
            store_shared(at + 8 * 128, of_lower);
        }
        fence_before_products();
        sync_warp();
        if (lane == 0) arrive(shared + WEIGHTED_AT + step % 2 * 8);
        return Weighted{upper_highest, lower_highest, upper_more, lower_more};
    };
    // What a step of this warpgroup adds, once what was asked for before is there.
    const auto weigh_own = [&](int step, const Weighted& weighted) {
        raise(weighted.upper_highest, weighted.lower_highest);
        upper_sum += weighted.upper_more;
        lower_sum += weighted.lower_more;
        wait_for_turn(shared + WEIGHTED_AT + step % 2 * 8, step / 2);
        weigh_step(step);
        products_wait<0>();
        release(step);
    };
    // Of two steps the first one's weights are made while the second's scores are computed, and the second's while what the first
    // adds is. Nothing is computed while what was weighed so far may be raised.
    const int steps = steps_of(listed);
    if (half == 0) {
        for (int step = 0; step < steps; step += 2) {
            float s[32];
            score_step(step, s);
            const uint32_t chosen = chosen_of_step(step);
            if (step > 0) {
                products_wait<1>();
                release(step - 1);
            }
            products_wait<0>();
            weigh_own(step, weights_of_step(step, false, s, chosen));
            if (step + 1 == steps) break;
            wait_for_turn(shared + WEIGHTED_AT + 8, step / 2);
            raise_as_other(step + 1);
            weigh_step(step + 1);
        }
    } else {
        for (int step = 0; step < steps; step += 2) {
            float s[32];
            wait_for_turn(shared + RAISED_AT, step / 2);
            raise_as_other(step);
            if (step + 1 == steps) {
                wait_for_turn(shared + WEIGHTED_AT, step / 2);
                weigh_step(step);
                break;
            }
            score_step(step + 1, s);
            const uint32_t chosen = chosen_of_step(step + 1);
            wait_for_turn(shared + WEIGHTED_AT, step / 2);
            weigh_step(step);
            products_wait<1>();
            const Weighted weighted = weights_of_step(step + 1, true, s, chosen);
            products_wait<0>();
            release(step);
            weigh_own(step + 1, weighted);
        }
    }
    products_wait<0>();

    write_lines(a, shared, of, 0, lines, static_cast<long long>(row) * HEADS, out, upper_best, lower_best, upper_sum, lower_sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Attend a) {
    SHARED_MEMORY(memory);
    wait_for_inputs();
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
    const auto [row, rows] = Group(a);
    uint32_t* list = a.lists + static_cast<long long>(blockIdx.y) * ENTRIES;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            start_barrier(shared + FILLED_AT + 8 * step, FILLING);
            start_barrier(shared + WEIGHTED_AT + 8 * step, WARPS / 2);
            start_barrier(shared + EMPTIED_AT + 8 * step, WARPS);
        }
        start_barrier(shared + RAISED_AT, WARPS / 2);
    }
    if (threadIdx.x >= ATTENDING) {
        leave_registers<GATHERING_REGISTERS>();
        const Gathering gather(a, shared);
        gather.query(row, rows * HEADS);
        meet_all();  // the list is there
        gather_list<0>(gather, shared, list, load_shared(shared + LISTED_AT));
    } else {
        take_registers<ATTENDING_REGISTERS>();
        attend_to_list(a, shared, row, rows, list);
    }
}
