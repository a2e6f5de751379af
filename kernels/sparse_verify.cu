// Sparse MLA for several rows of one request, for Hopper, on a bfloat16 or FP8 KV cache: compiled at run time by
// sparse_verify.py. Where groups are many, so that each has one block, a bfloat16 cache has sparse_prefill.cu.
//
// A block takes one group of rows, whose heads are the 64 lines of a tensor-core tile, and one part of the different slots that
// they chose. It makes that part itself: a slot belongs to the part that its hash says, entries of a part meet in a hash table
// in shared memory, and each slot is listed once with a bit for every row that chose it. Order and sums depend on the inputs
// alone, so that equal inputs give equal bits, unless a row names a slot twice.
// Two warpgroups make the list and walk it, 64 tokens a step: each scores half of the tokens for all lines, they agree on the
// highest score of a line through shared memory, and each weighs one half of the latent. A third gathers the next step's tokens
// meanwhile; those of the first step, which the first row chose, while the list is made. FP8 values become bfloat16 there, once
// for all rows.
// In the end the blocks of a group wait for each other, and each adds up the parts of some lines. All of them run at once: a
// grid has no more blocks than the GPU has SMs, or one block a group. Where another kernel has some of the SMs, as one of NCCL's
// on a stream beside, it is as well: blocks of a group follow each other in the grid, so only the last group that has begun can
// lack some, and those before it end and make room.
//
// Compute Sanitizer's racecheck takes some of this for races. Threads store their entries in a cell of the hash table at once, of
// which any may stay. They set a row's bit in the top byte of a word of which others read the slot alone. And it does not follow
// barriers in shared memory.

#include "rows_together.cuh"

// Registers of each: all that the launch gives 384 threads of 168.
constexpr int ATTENDING_REGISTERS = 184, GATHERING_REGISTERS = 136;

constexpr uint32_t COUNTS_AT = OWN_AT;               // slots listed, by warp
constexpr uint32_t AHEAD_AT = COUNTS_AT + WARPS * 4;  // tokens of the first step, by warp
constexpr uint32_t SHARED_BYTES = AHEAD_AT + WARPS * 4;
// While the list is made, where the second step's tokens and the weights will lie: entries by warp, for each whose slot it lists,
// and the hash table of entries' numbers. With more than fit there nothing is gathered meanwhile, and all lie where tokens will.
constexpr bool AHEAD = ENTRIES <= 8192;
constexpr uint32_t ENTRIES_AT = TOKENS_AT + (AHEAD ? PANELS : 0);
constexpr uint32_t LISTERS_AT = ENTRIES_AT + 4 * ENTRIES;
constexpr uint32_t TABLE_AT = LISTERS_AT + 2 * ENTRIES;
constexpr uint32_t CELLS = AHEAD ? 16384 : 24576;
constexpr int AHEAD_OF_WARP = TOKENS / WARPS;
constexpr int KEPT = AHEAD ? TOKENS : 2 * TOKENS;  // words at the list's begin that are kept in shared memory
static_assert(TABLE_AT + 2 * CELLS <= BITS_AT, "what lists are made from has no room");
static_assert(ENTRIES <= 16384 && ENTRIES <= static_cast<int>(CELLS), "more entries than cells");

constexpr uint32_t NONE = 0xffff;  // of an entry's number
constexpr int BEFORE_LIST = AHEAD ? 1 : 0;  // steps

__device__ __forceinline__ uint32_t part_of(uint32_t slot, uint32_t parts) { return __umulhi(slot * 0x9e3779b1u, parts); }

__device__ __forceinline__ uint32_t cell_of(uint32_t slot) { return __umulhi(slot * 0x85ebca6bu, CELLS); }

// A number of 16 bits for every row, two in a word.
struct ByRow {
    uint32_t words[ROWS / 2 + 1];

    __device__ __forceinline__ int operator[](int j) const {  // `j` is a constant
        return words[j / 2] >> j % 2 * 16 & 0xffff;
    }
    __device__ __forceinline__ void set(int j, uint32_t x) { words[j / 2] |= x << j % 2 * 16; }  // was 0; likewise
};

// Writes this warp's entries that belong to the part, row after row; where each row begins, and at ROWS where they end.
__device__ __forceinline__ ByRow compact(const Chosen& chosen, uint32_t parts, uint32_t part, uint32_t to) {
    const int thread = threadIdx.x, lane = thread % 32;
    uint32_t here[ROWS];
    ByRow counts{}, before, begins{};
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        here[j] = 0;
#pragma unroll
        for (int c = 0; c < PER_THREAD; ++c) {
            const uint32_t slot = chosen.slot[j][c];
            const bool is = c * ATTENDING + thread < chosen.end[j] && slot < SLOT && part_of(slot, parts) == part;
            here[j] |= static_cast<uint32_t>(is) << c;
        }
        counts.set(j, __popc(here[j]));
    }
#pragma unroll
    for (int k = 0; k < ROWS / 2 + 1; ++k) before.words[k] = of_lanes_before(counts.words[k], lane);
    uint32_t begin = 0;
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        begins.set(j, begin);
        uint32_t at = to + 4 * (begin + before[j]);
#pragma unroll
        for (int c = 0; c < PER_THREAD; ++c) {
            if (here[j] >> c & 1) {
                store_shared(at, chosen.slot[j][c]);
                at += 4;
            }
        }
        begin += shuffle_from(before[j] + counts[j], 31);
    }
    begins.set(ROWS, begin);
    sync_warp();
    return begins;
}

// An entry of the first row, which is one of those that a warp of the list has written; 0 where there is none.
__device__ __forceinline__ uint32_t word_ahead(uint32_t shared, int token) {
    const int warp = token % 32 / 4, i = token / 32 * 4 + token % 4;
    if (i >= static_cast<int>(load_shared(shared + AHEAD_AT + 4 * warp))) return 0;
    return load_shared(shared + ENTRIES_AT + 4 * (warp * (ENTRIES / WARPS) + i)) | 1u << 24;
}

// Marks a row's slots, which are entries `begin` to `end` of this warp: the entry that the table has for a slot gets the row's bit
// above the slot. Who finds no other bit there lists the slot. Returns how many list one, less those that the table has.
__device__ __forceinline__ int mark_row(uint32_t shared, uint32_t warps_first, int begin, int end, int j, int lane) {
    constexpr int AT_ONCE = 3;
    const uint32_t entries = shared + ENTRIES_AT, listers = shared + LISTERS_AT, table = shared + TABLE_AT, bit = 1u << j;
    int excess = 0;
    const auto mark = [&](bool found, uint32_t entry, uint32_t owner, uint32_t word) {
        const bool lists = found && word < 1u << 24;
        store_shared_byte_if(found, entries + 4 * owner + 3, word >> 24 | bit);
        store_shared_half_if(found, listers + 2 * entry, lists ? owner : NONE);
        excess += lists - (found && owner == entry);
    };
    for (int first = begin + lane; first < end; first += 32 * AT_ONCE) {
        uint32_t slot[AT_ONCE], owner[AT_ONCE], word[AT_ONCE], left = 0;
        const uint32_t entry = warps_first + first;
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) slot[u] = load_shared(entries + 4 * (entry + 32 * u)) & SLOT;  // of others behind the end
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) owner[u] = load_shared_half(table + 2 * cell_of(slot[u]));
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) word[u] = load_shared(entries + 4 * (owner[u] % ENTRIES));
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const bool there = first + 32 * u < end, found = (word[u] & SLOT) == slot[u];
            mark(there && found, entry + 32 * u, owner[u], word[u]);
            left |= static_cast<uint32_t>(there && !found) << u;
        }
        for (; left; left &= left - 1) {  // another slot has the cell
            const uint32_t other = entry + 32 * (__ffs(left) - 1), mine = load_shared(entries + 4 * other) & SLOT;
            for (uint32_t cell = cell_of(mine);;) {
                cell = cell + 1 == CELLS ? 0 : cell + 1;
                const uint32_t had = swap_shared_half(table + 2 * cell, NONE, other), by = had == NONE ? other : had;
                const uint32_t found = load_shared(entries + 4 * by);
                if ((found & SLOT) == mine) {
                    mark(true, other, by, found);
                    break;
                }
            }
        }
    }
    return excess;
}

// Writes the words of this block's slots to `list`, and the first KEPT of them to shared memory too, in an order that the inputs
// decide; how many there are. A warp's first entries of the first row are gathered instead, and their rows' bits are written.
__device__ __forceinline__ int make_list(
    const Attend& a, uint32_t shared, int warp, int rows, uint32_t part, uint32_t* list, const Chosen& chosen
) {
    const int thread = threadIdx.x, lane = thread % 32;
    const uint32_t table = shared + TABLE_AT, warps_first = warp * (ENTRIES / WARPS);
    const uint32_t entries = shared + ENTRIES_AT + 4 * warps_first, listers = shared + LISTERS_AT + 2 * warps_first;
    for (uint32_t i = 8 * thread; i < CELLS; i += 8 * ATTENDING) store_shared_4(table + 2 * i, {EMPTY, EMPTY, EMPTY, EMPTY});
    const ByRow begins = compact(chosen, a.parts, part, entries);
    stamp<1>();  // its entries are apart
    const int ahead = AHEAD ? min(begins[1], AHEAD_OF_WARP) : 0, end = begins[ROWS];
    if (AHEAD && lane == 0) store_shared(shared + AHEAD_AT + 4 * warp, ahead);
    meet_all();
    // Of the entries of a cell any one is kept.
    constexpr int AT_ONCE = 4;
    for (int first = lane; first < end; first += 32 * AT_ONCE) {
        uint32_t slot[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) slot[u] = load_shared(entries + 4 * (first + 32 * u));  // of others behind the end
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            store_shared_half_if(first + 32 * u < end, table + 2 * cell_of(slot[u]), warps_first + first + 32 * u);
        }
    }
    meet_attending();
    // Rows one after the other, so that no two of them write to an entry at once.
    int excess = 0, row_begin = 0;
    ByRow left = begins;
#pragma unroll 1
    for (int j = 0; j < rows; ++j) {
        // The next row's begin: numbers move down by one.
#pragma unroll
        for (int k = 0; k < ROWS / 2 + 1; ++k) left.words[k] = left.words[k] >> 16 | (k < ROWS / 2 ? left.words[k + 1] << 16 : 0);
        const int row_end = left[0];
        excess += mark_row(shared, warps_first, row_begin, row_end, j, lane);
        row_begin = row_end;
        meet_attending();
    }
    const auto lists = [&](int i) { return load_shared_half(listers + 2 * i); };
    int listed, place, all;
    const auto count = [&] {
        listed = 0;
#pragma unroll 4
        for (int i = ahead + lane; i < end; i += 32) listed += lists(i) != NONE;
        place = of_lanes_before(listed, lane);
        const uint32_t sums = of_lanes_before(excess, lane) + excess;
        if (lane == 31) store_shared(shared + COUNTS_AT + 4 * warp, (place + listed) | sums << 16);
        meet_attending();
        excess = all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const uint32_t of_warp = load_shared(shared + COUNTS_AT + 4 * w);
            place += w < warp ? of_warp & 0xffff : 0;
            all += of_warp & 0xffff;
            excess += of_warp >> 16;
        }
    };
    count();
    if (excess & 0xffff) {  // a row names a slot twice, and both list it: one of them shall
        for (int i = lane; i < end; i += 32) {
            if (lists(i) != NONE) store_shared_half(table + 2 * lists(i), warps_first + i);
        }
        meet_attending();
        for (int i = lane; i < end; i += 32) {
            if (lists(i) != NONE && load_shared_half(table + 2 * lists(i)) != warps_first + i) store_shared_half(listers + 2 * i, NONE);
        }
        meet_attending();
        count();
    }
    for (int first = ahead + lane; first < end; first += 32 * AT_ONCE) {
        uint32_t owner[AT_ONCE], word[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) owner[u] = first + 32 * u < end ? lists(first + 32 * u) : NONE;
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) word[u] = load_shared(shared + ENTRIES_AT + 4 * (owner[u] % ENTRIES));
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            if (owner[u] != NONE) {
                list[place] = word[u];
                if (place < KEPT) store_shared(shared + HIGHEST_AT + 4 * place, word[u]);
                ++place;
            }
        }
    }
    if (AHEAD && lane < AHEAD_OF_WARP) {
        const uint32_t owner = lane < ahead ? lists(lane) : NONE;
        const uint32_t bits = owner == NONE ? 0 : load_shared(shared + ENTRIES_AT + 4 * owner) >> 24;
        store_shared(shared + BITS_AT + 4 * (lane / 4 * 32 + warp * 4 + lane % 4), bits);
    }
    return all;
}

// What the third warpgroup does: the query, and every step's tokens once those of two steps before are weighed.
__device__ __forceinline__ void gather_part(const Attend& a, uint32_t shared, int row, int rows, const uint32_t* list) {
    const Gathering gather(a, shared);
    gather.query(row, rows * HEADS);
    meet_all();  // entries of the first row are there
    if (AHEAD) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) gather.copy(0, pass, word_ahead(shared, gather.row + pass * OF_PASS));
#if FP8
        gather.dequantise(0);
#endif
    }
    meet_all();  // and the list
    int listed = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) listed += load_shared(shared + COUNTS_AT + 4 * w) & 0xffff;
    gather_list<BEFORE_LIST>(gather, shared, list, listed);
}

// Adds up the parts of this block's share of the lines, once all blocks of the group have written theirs.
__device__ __forceinline__ void join(const Attend& a, uint32_t shared, int part, int lines, long long first_line) {
    const int thread = threadIdx.x;
    uint32_t* const met = a.met + 2 * blockIdx.y;
    meet_attending();
    if (thread == 0) {
        add_to_counter(met, 1);
        while (load_counter(met) < static_cast<uint32_t>(a.parts)) {
        }
        if (add_to_counter(met + 1, 1) == static_cast<uint32_t>(a.parts) - 1) met[0] = met[1] = 0;  // for the next call
    }
    meet_attending();
    stamp<6>();  // all parts are written
    const int first = lines * part / a.parts, mine = lines * (part + 1) / a.parts - first;
    const unsigned char* from = a.of_parts + (first_line + first) * a.parts * 2 * LATENT;
    const float* lse = a.lse + (first_line + first) * a.parts;
    for (int i = thread; i < mine * a.parts * PIECES; i += ATTENDING) copy_16(shared + TOKENS_AT + 16 * i, from + 16 * i, true);
    if (thread < mine * a.parts) store_shared(shared + WEIGHTS_AT + 4 * thread, load_list(reinterpret_cast<const uint32_t*>(lse) + thread));
    meet_attending();
    float weight = 0;
    if (thread < mine * a.parts) {
        const uint32_t of_line = shared + WEIGHTS_AT + 4 * (thread / a.parts * a.parts);
        float best = -INFINITE, total = 0;
        for (int p = 0; p < a.parts; ++p) best = higher(best, load_shared_float(of_line + 4 * p));
        const float from_best = best == -INFINITE ? 0 : best;
        for (int p = 0; p < a.parts; ++p) total += exp2_fast(load_shared_float(of_line + 4 * p) - from_best);
        weight = total == 0 ? 0 : exp2_fast(load_shared_float(shared + WEIGHTS_AT + 4 * thread) - from_best) / total;
        if (a.joined_lse && thread % a.parts == 0) a.joined_lse[first_line + first + thread / a.parts] = lse_of(best, total);
    }
    wait_for_copies();
    meet_attending();
    if (thread < mine * a.parts) store_shared(shared + WEIGHTS_AT + 4 * thread, __float_as_uint(weight));
    meet_attending();
    for (int i = thread; i < mine * PIECES; i += ATTENDING) {
        const int line = i / PIECES, along = i % PIECES;
        float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 4
        for (int p = 0; p < a.parts; ++p) {
            const float of_part = load_shared_float(shared + WEIGHTS_AT + 4 * (line * a.parts + p));
            const uint4 values = load_shared_4(shared + TOKENS_AT + 16 * ((line * a.parts + p) * PIECES + along));
            const uint32_t pairs[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                sums[2 * k] += of_part * __uint_as_float(pairs[k] << 16);
                sums[2 * k + 1] += of_part * __uint_as_float(pairs[k] & 0xffff0000);
            }
        }
        const uint4 joined = {
            pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3]), pack_bf16(sums[4], sums[5]), pack_bf16(sums[6], sums[7])
        };
        *reinterpret_cast<uint4*>(a.out + (first_line + first + line) * 2 * LATENT + along * 16) = joined;
    }
}

// What two warpgroups do: the list, and attention to it.
__device__ __forceinline__ void attend_to_part(const Attend& a, uint32_t shared, int row, int rows, uint32_t* list) {
    const OfThread of;
    const int warp = of.warp, lane = of.lane, half = of.half, upper = of.upper, lower = of.lower, column = of.column;
    const int part = blockIdx.x, lines = rows * HEADS;
    const long long first_line = static_cast<long long>(row) * HEADS;
    const int listed = make_list(a, shared, warp, rows, part, list, chosen_of(a, row, rows));
    meet_all();  // the list is written, and what it was made from is read
    stamp<2>();

    const uint32_t upper_bit = OfThread::bit_of(upper, lines), lower_bit = OfThread::bit_of(lower, lines);
    const uint32_t highest_at = shared + HIGHEST_AT, weights_at = shared + WEIGHTS_AT;
    const uint64_t query_tile = tile_at(shared + QUERY_AT, 16), weights_tile = tile_at(weights_at, 16);
    float upper_best = -INFINITE, lower_best = -INFINITE, upper_sum = 0, lower_sum = 0;
    float out[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] = 0;

    const int steps = BEFORE_LIST + steps_of(listed);
    for (int step = 0; step < steps; ++step) {
        const uint32_t tokens = shared + TOKENS_AT + step % 2 * PANELS;
        products_wait<0>();  // of the step before, whose tokens may now be written over
        if (step > 0 && lane == 0) arrive(shared + EMPTIED_AT + (step - 1) % 2 * 8);
        wait_for_turn(shared + FILLED_AT + step % 2 * 8, step / 2);
        if (step == 0) stamp<3>();  // the first tokens are there
        fence_before_products();
        float s[16];
        const uint64_t tokens_tile = tile_at(tokens + half * 32 * 128, 16), latent_tile = tile_at(tokens + half * 4 * PANEL, PANEL);
        ask_scores(s, query_tile, tokens_tile);
        products_wait<0>();
        float upper_highest = -INFINITE, lower_highest = -INFINITE;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint2 bits = load_shared_2(shared + BITS_AT + 4 * (step % 2 * TOKENS + half * 32 + 8 * i + column));
            s[4 * i] = bits.x & upper_bit ? s[4 * i] * a.scale : -INFINITE;
            s[4 * i + 1] = bits.y & upper_bit ? s[4 * i + 1] * a.scale : -INFINITE;
            s[4 * i + 2] = bits.x & lower_bit ? s[4 * i + 2] * a.scale : -INFINITE;
            s[4 * i + 3] = bits.y & lower_bit ? s[4 * i + 3] * a.scale : -INFINITE;
            upper_highest = higher(upper_highest, higher(s[4 * i], s[4 * i + 1]));
            lower_highest = higher(lower_highest, higher(s[4 * i + 2], s[4 * i + 3]));
        }
        upper_highest = highest_of_line(upper_highest);
        lower_highest = highest_of_line(lower_highest);
        if (column == 0) {
            store_shared(highest_at + 4 * (half * LINES + upper), __float_as_uint(upper_highest));
            store_shared(highest_at + 4 * (half * LINES + lower), __float_as_uint(lower_highest));
        }
        meet_attending();
        const float upper_other = load_shared_float(highest_at + 4 * ((1 - half) * LINES + upper));
        const float lower_other = load_shared_float(highest_at + 4 * ((1 - half) * LINES + lower));
        const float upper_new = higher(upper_best, higher(upper_highest, upper_other));
        const float lower_new = higher(lower_best, higher(lower_highest, lower_other));
        const float upper_from = base_of(upper_new), lower_from = base_of(lower_new);
        const float upper_fade = exp2_fast(upper_best - upper_from), lower_fade = exp2_fast(lower_best - lower_from);
        upper_best = upper_new;
        lower_best = lower_new;
        upper_sum *= upper_fade;
        lower_sum *= lower_fade;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float p0 = exp2_fast(s[4 * i] - upper_from), p1 = exp2_fast(s[4 * i + 1] - upper_from);
            const float p2 = exp2_fast(s[4 * i + 2] - lower_from), p3 = exp2_fast(s[4 * i + 3] - lower_from);
            upper_sum += p0 + p1;
            lower_sum += p2 + p3;
            const uint32_t at = (((half * 4 + i) ^ (upper & 7)) << 4) + column * 2;  // `lower` is swizzled as `upper` is
            store_shared(weights_at + upper * 128 + at, pack_bf16(p0, p1));
            store_shared(weights_at + lower * 128 + at, pack_bf16(p2, p3));
        }
        fence_before_products();
        meet_attending();
        if (warp_ballot(upper_fade != 1 || lower_fade != 1)) fade(out, upper_fade, lower_fade);
        ask_sums(out, weights_tile, latent_tile);
    }
    products_wait<0>();
    stamp<4>();  // all are weighed

    write_lines(a, shared, of, part, lines, first_line, out, upper_best, lower_best, upper_sum, lower_sum);
    stamp<5>();
    if (a.parts > 1) join(a, shared, part, lines, first_line);
    stamp<7>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Attend a) {
    SHARED_MEMORY(memory);
    wait_for_inputs();
    stamp<0>();
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
    const auto [row, rows] = Group(a);
    uint32_t* list = a.lists + (static_cast<long long>(blockIdx.y) * a.parts + blockIdx.x) * ENTRIES;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            start_barrier(shared + FILLED_AT + 8 * step, FILLING);
            start_barrier(shared + EMPTIED_AT + 8 * step, WARPS);
        }
    }
    if (threadIdx.x >= ATTENDING) {
        leave_registers<GATHERING_REGISTERS>();
        gather_part(a, shared, row, rows, list);
    } else {
        take_registers<ATTENDING_REGISTERS>();
        attend_to_part(a, shared, row, rows, list);
    }
}
