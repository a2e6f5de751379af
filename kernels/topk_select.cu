// KV slots of the highest of each row of index scores, for Hopper. topk_select.py compiles it at run time.
//
// A cluster of blocks reads a row once and keeps its part in registers, as far as they reach. Counts of scores by their leading
// bits, in bins of a 16th of an octave or less, say which bin the last selected score lies in: what lies above is written at once,
// and the few in that bin are told apart by the rest of their bits, then by their positions. So a selection is exact, whatever the
// scores.

#include "warps.cuh"

constexpr int FINE_BINS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr int CHUNK = THREADS * VECTORS;  // groups of four scores that a block's registers hold
constexpr int PAGE = 64;
constexpr int LISTED = 2048;  // scores of one bin, at most, that one block tells apart
constexpr int FEW = 128;  // that it compares with each other
constexpr int OF_THREAD = (LISTED + THREADS - 1) / THREADS;
static_assert(WARPS <= 32 && FINE_BINS % THREADS == 0, "a lane adds up a warp's counts, a thread those of some bins");

// Magnitudes that bins divide: 32 octaves. Those below share one bin, and those above.
static_assert(BINS == 1024 || BINS == 2048, "bins of each sign divide them");
constexpr uint32_t BIN_BITS = BINS == 1024 ? 19 : 18, LEAST = (127u - 16) << 23, MOST = LEAST + (1u << 28) - 1;

// Shared memory: counts of each block of the cluster, those of this one's list, and the list, a key and a position each.
constexpr uint32_t COUNTS = BINS * 4, FINE_AT = CLUSTER * COUNTS, LIST_AT = FINE_AT + FINE_BINS * 4;
constexpr uint32_t SUMS_AT = LIST_AT + LISTED * 8;  // of each warp, of two kinds
constexpr uint32_t FOUND_AT = SUMS_AT + 2 * 32 * 4;
constexpr uint32_t COUNTERS_AT = FOUND_AT + 8 * 4;
constexpr uint32_t GATHERED_AT = COUNTERS_AT + 2 * 4, FILLED_AT = GATHERED_AT + 8;  // barriers
[[maybe_unused]] constexpr uint32_t SHARED_BYTES = FILLED_AT + 8 + 16;

struct Select {
    const float* scores;   // [rows, stride]
    const int* lengths;    // [rows]
    const int* pages;      // [rows, table_stride]
    int* slots;            // [rows, topk], -1 behind a row of fewer
    long long stride, table_stride;
    int topk;
    int share;  // scores of a row that deserve a block of their own
};

// In the order of which the first are selected: less where the score is higher.
__device__ __forceinline__ uint32_t key_of(uint32_t bits) { return bits >> 31 ? bits : bits ^ 0x7fffffffu; }

__device__ __forceinline__ uint32_t bin_of(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffffu, within = max(min(magnitude, MOST), LEAST) - LEAST;
    return (within >> BIN_BITS) ^ (bits >> 31 ? BINS / 2 : BINS / 2 - 1);
}

// The least key in a bin.
__device__ __forceinline__ uint32_t first_of(uint32_t bin) {
    if (bin == 0) return 0;
    if (bin < BINS / 2) return 0x80000000u - (LEAST + ((BINS / 2 - bin) << BIN_BITS));
    return 0x80000000u + (bin > BINS / 2 ? LEAST + ((bin - BINS / 2) << BIN_BITS) : 0);
}

__device__ __forceinline__ uint32_t last_of(uint32_t bin) { return bin + 1 < BINS ? first_of(bin + 1) - 1 : 0xffffffffu; }

// By how many bits values between these two are shifted so that FINE_BINS suffice.
__device__ __forceinline__ uint32_t shift_of(uint32_t first, uint32_t last) {
    const int bits = 32 - __clz(last - first);
    return bits > 10 ? bits - 10 : 0;
}

struct Found {
    uint32_t bin, before, count;          // `before`: in bins before this one
    uint32_t lower_before, lower_count;  // of both, those in blocks of the cluster before this one
};

// The bin that has the `wanted`th; `counts` and `lower` are of a thread's neighbouring bins, in the order of threads.
template <int N> __device__ __forceinline__ Found find(uint32_t shared, const uint32_t (&counts)[N], const uint32_t (&lower)[N], uint32_t wanted) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t own = 0, own_lower = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) own += counts[i], own_lower += lower[i];
    uint32_t before = of_lanes_before(own, lane), lower_before = CLUSTER > 1 ? of_lanes_before(own_lower, lane) : 0;
    if (lane == 31) {
        store_shared(shared + SUMS_AT + warp * 4, before + own);
        if (CLUSTER > 1) store_shared(shared + SUMS_AT + (32 + warp) * 4, lower_before + own_lower);
    }
    meet<1, THREADS>();
    const bool earlier = lane < warp;
    before += warp_sum(earlier ? load_shared(shared + SUMS_AT + lane * 4) : 0);
    if (CLUSTER > 1) lower_before += warp_sum(earlier ? load_shared(shared + SUMS_AT + (32 + lane) * 4) : 0);
    if (before < wanted && wanted <= before + own) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (before < wanted && wanted <= before + counts[i]) {
                store_shared(shared + FOUND_AT, threadIdx.x * N + i);
                store_shared(shared + FOUND_AT + 4, before);
                store_shared(shared + FOUND_AT + 8, counts[i]);
                store_shared(shared + FOUND_AT + 12, lower_before);
                store_shared(shared + FOUND_AT + 16, lower[i]);
            }
            before += counts[i];
            lower_before += lower[i];
        }
    }
    meet<1, THREADS>();
    const auto word = [&](int i) { return load_shared(shared + FOUND_AT + i * 4); };
    return {word(0), word(1), word(2), word(3), word(4)};
}

template <int bins> __device__ __forceinline__ void clear(uint32_t at) {
#pragma unroll
    for (int begin = 0; begin < bins / 4; begin += THREADS) {
        const int i = begin + static_cast<int>(threadIdx.x);
        if (i < bins / 4) store_shared_4(at + i * 16, uint4{0, 0, 0, 0});
    }
}

// A row as far as one block reads it, four scores at a time.
struct Part {
    const float* scores;
    const int* pages;
    int length, begin, end;  // of the row in scores, of the part in fours

    __device__ __forceinline__ int chunks() const { return (end - begin + CHUNK - 1) / CHUNK; }

    uint4 values[VECTORS];
    int page[VECTORS];

    __device__ __forceinline__ int at(int chunk, int i) const { return begin + chunk * CHUNK + i * THREADS + static_cast<int>(threadIdx.x); }
    __device__ __forceinline__ void load(int chunk) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int four = at(chunk, i);
            if (four >= end) continue;
            values[i] = *reinterpret_cast<const uint4*>(scores + 4 * four);
            page[i] = pages[four / (PAGE / 4)];
        }
    }
    // Calls f(bits, position, page) of what is loaded.
    template <class F> __device__ __forceinline__ void each(int chunk, F f) const {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int four = at(chunk, i), position = 4 * four;
            if (four >= end) continue;
            f(values[i].x, position, page[i]);
            if (position + 1 < length) f(values[i].y, position + 1, page[i]);
            if (position + 2 < length) f(values[i].z, position + 2, page[i]);
            if (position + 3 < length) f(values[i].w, position + 3, page[i]);
        }
    }
};

// What is not told apart yet: keys and positions from one to another, of which only either differ. Selected are all that come
// before, and `wanted` of the `count` here.
struct Range {
    uint32_t first, last, first_position, last_position, wanted, count;
    uint32_t lower_before, lower_count;  // before it and in it, in earlier blocks of the cluster

    __device__ __forceinline__ bool has(uint32_t key, uint32_t position) const {
        return key >= first && key <= last && position >= first_position && position <= last_position;
    }
    __device__ __forceinline__ bool is_before(uint32_t key, uint32_t position) const {
        return key < first || (key <= last && position < first_position);
    }
    __device__ __forceinline__ bool by_position() const { return first == last; }
    __device__ __forceinline__ uint32_t shift() const {
        return by_position() ? shift_of(first_position, last_position) : shift_of(first, last);
    }
    __device__ __forceinline__ uint32_t bin(uint32_t key, uint32_t position) const {
        return (by_position() ? position - first_position : key - first) >> shift();
    }
    // To one of its bins.
    __device__ __forceinline__ void narrow(const Found& found) {
        const uint32_t bits = shift(), begin = found.bin << bits, more = (1u << bits) - 1;
        if (by_position()) {
            first_position += begin;
            last_position = first_position + more;  // none lies behind the last one
        } else {
            first += begin;
            if (last - first > more) last = first + more;
        }
        take(found);
    }
    __device__ __forceinline__ void take(const Found& found) {
        wanted -= found.before;
        count = found.count;
        lower_before += found.lower_before;
        lower_count = found.lower_count;
    }
};

// Adds N neighbouring words.
template <int N> __device__ __forceinline__ void add_words(uint32_t at, uint32_t (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        if constexpr (N % 4 == 0) {
            const uint4 x = load_shared_4(at + i * 4);
            sums[i] += x.x, sums[i + 1] += x.y, sums[i + 2] += x.z, sums[i + 3] += x.w;
        } else if constexpr (N == 2) {
            const uint2 x = load_shared_2(at);
            sums[0] += x.x, sums[1] += x.y;
        } else {
            static_assert(N == 1, "words of one load");
            sums[0] += load_shared(at);
        }
    }
}

// The blocks of a row, which show each other what they have counted.
struct Blocks {
    uint32_t shared;
    int rank, count;
    uint32_t turn;  // how often they have

    __device__ __forceinline__ uint32_t counts_of(int other) const { return shared + other * COUNTS; }

    // Finds in bins that all threads have counted in the bin of the `wanted`th.
    template <int bins> __device__ __forceinline__ Found find_in_all(uint32_t wanted) {
        const bool several = CLUSTER > 1 && count > 1;
        if (several) fence_before_products();
        meet<1, THREADS>();
        if (several) {
            const uint32_t gathered = shared + GATHERED_AT;
            if (threadIdx.x == 0) arrive_before_bytes(gathered, (count - 1) * bins * 4);
            if (threadIdx.x % 32 == 0) {  // a warp for each of the others
                for (int other = threadIdx.x / 32; other < count; other += WARPS) {
                    if (other != rank) copy_to_block(other, counts_of(rank), counts_of(rank), bins * 4, gathered);
                }
            }
            wait_for_turn(gathered, turn++);
        }
        constexpr int N = bins / THREADS;
        uint32_t counts[N], lower[N];
#pragma unroll
        for (int i = 0; i < N; ++i) counts[i] = lower[i] = 0;
        for (int other = 0; other < count; ++other) {
            if (CLUSTER > 1 && other == rank) {
#pragma unroll
                for (int i = 0; i < N; ++i) lower[i] = counts[i];
            }
            add_words(counts_of(other) + threadIdx.x * N * 4, counts);
        }
        return find(shared, counts, lower, wanted);
    }
};

// Writes those that are wanted of FEW listed scores or less from `to` on. A warp ranks some of them, each of which is a lane's.
__device__ __forceinline__ void rank_few(uint32_t shared, const Range& range, const int* pages, int* to) {
    static_assert(FEW <= THREADS, "a lane has one at most");
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = warp + lane * WARPS;
    const uint2 own = place < range.count ? load_shared_2(shared + LIST_AT + place * 8) : uint2{0, 0};
    const int page = place < range.count ? pages[own.y / PAGE] : 0;
    uint2 others[FEW / 32];
#pragma unroll
    for (int j = 0; j < FEW / 32; ++j) {
        const uint32_t other = lane + 32 * j;
        others[j] = other < range.count ? load_shared_2(shared + LIST_AT + other * 8) : uint2{0xffffffffu, 0xffffffffu};
    }
    uint32_t rank = 0xffffffffu;
    for (uint32_t n = 0; warp + n * WARPS < range.count; ++n) {
        const uint32_t key = shuffle_from(own.x, n), position = shuffle_from(own.y, n);
        uint32_t before = 0;
#pragma unroll
        for (int j = 0; j < FEW / 32; ++j) {
            before += __popc(warp_ballot(others[j].x < key || (others[j].x == key && others[j].y < position)));
        }
        if (lane == n) rank = before;
    }
    if (rank < range.wanted) to[rank] = page * PAGE + own.y % PAGE;
}

// Tells `range.count` listed scores apart, and writes those that are wanted from `to` on.
__device__ __forceinline__ void tell_apart(uint32_t shared, Range range, const int* pages, int* to) {
    uint32_t key[OF_THREAD], position[OF_THREAD];
    int page[OF_THREAD];
    bool left[OF_THREAD];
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
        const uint32_t place = threadIdx.x + i * THREADS;
        left[i] = place < range.count;
        const uint2 entry = left[i] ? load_shared_2(shared + LIST_AT + place * 8) : uint2{0, 0};
        key[i] = entry.x;
        position[i] = entry.y;
        page[i] = left[i] ? pages[entry.y / PAGE] : 0;
    }
    const auto write = [&](int i) {
        to[take_shared(shared + COUNTERS_AT + 4, 1)] = made_again(page[i]) * PAGE + position[i] % PAGE;  // a page comes late
        left[i] = false;
    };
    while (range.count != range.wanted) {
#pragma unroll
        for (int i = 0; i < OF_THREAD; ++i) {
            if (left[i]) add_shared(shared + FINE_AT + range.bin(key[i], position[i]) * 4, 1);
        }
        meet<1, THREADS>();
        uint32_t counts[FINE_BINS / THREADS] = {}, none[FINE_BINS / THREADS] = {};
        add_words(shared + FINE_AT + threadIdx.x * sizeof counts, counts);
        const Found found = find(shared, counts, none, range.wanted);
        clear<FINE_BINS>(shared + FINE_AT);
#pragma unroll
        for (int i = 0; i < OF_THREAD; ++i) {
            if (!left[i]) continue;
            const uint32_t bin = range.bin(key[i], position[i]);
            if (bin < found.bin) write(i);
            else left[i] = bin == found.bin;
        }
        range.narrow(found);
        meet<1, THREADS>();
    }
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
        if (left[i]) write(i);
    }
}

// All of a row's tokens.
__device__ __forceinline__ void take_all(const Select& a, const int* pages, int length, int* slots) {
    for (int i = threadIdx.x; i < a.topk; i += THREADS) slots[i] = i < length ? pages[i / PAGE] * PAGE + i % PAGE : -1;
}

extern "C" __global__ void CLUSTER_OF(CLUSTER) __launch_bounds__(THREADS, BLOCKS_OF_SM) topk_select(const __grid_constant__ Select a) {
    SHARED_MEMORY(memory);
    const uint32_t shared = (shared_address(memory) + 15) & ~15u;
    const long long row = blockIdx.y;
    const int length = a.lengths[row];
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    Blocks blocks{shared, rank, min(CLUSTER, max(1, (length + a.share - 1) / a.share)), 0};
    if (rank >= blocks.count || (rank && length <= a.topk)) return;
    clear<BINS>(blocks.counts_of(rank));
    clear<FINE_BINS>(shared + FINE_AT);
    if (threadIdx.x < 2) store_shared(shared + COUNTERS_AT + threadIdx.x * 4, 0);
    const bool several = CLUSTER > 1 && blocks.count > 1 && length > a.topk;
    if (several) {
        if (threadIdx.x == 0) {
            start_barrier(shared + GATHERED_AT, 1);
            start_barrier(shared + FILLED_AT, 1);
            show_barriers();
        }
        arrive_at_cluster();
    }
    int* slots = a.slots + row * a.topk;
    const int* pages = a.pages + row * a.table_stride;
    const int fours = (length + 3) / 4, share = (fours + blocks.count - 1) / blocks.count;
    Part part{a.scores + row * a.stride, pages, length, min(rank * share, fours), min((rank + 1) * share, fours)};
    const int chunks = part.chunks();
    meet<1, THREADS>();
    wait_for_inputs();
    let_others_begin();
    if (length <= a.topk) return take_all(a, pages, length, slots);

    for (int chunk = 0; chunk < chunks; ++chunk) {
        part.load(chunk);
        part.each(chunk, [&](uint32_t bits, uint32_t, int) { add_shared(blocks.counts_of(rank) + bin_of(bits) * 4, 1); });
    }
    if (several) wait_for_cluster();  // until then a block may not have started
    Range range{0, 0, 0, static_cast<uint32_t>(length) - 1, static_cast<uint32_t>(a.topk), 0, 0, 0};
    Found found = blocks.find_in_all<BINS>(range.wanted);
    range.first = first_of(found.bin);
    range.last = last_of(found.bin);
    range.take(found);
    // Too many scores are alike: all blocks tell them apart, which reads the row again.
    while (range.count > LISTED && range.count != range.wanted) {
        if (several) meet_cluster();  // nobody reads what others have counted any more
        clear<FINE_BINS>(blocks.counts_of(rank));
        meet<1, THREADS>();
        for (int chunk = 0; chunk < chunks; ++chunk) {
            part.load(chunk);
            part.each(chunk, [&](uint32_t bits, uint32_t position, int) {
                const uint32_t key = key_of(bits);
                if (range.has(key, position)) add_shared(blocks.counts_of(rank) + range.bin(key, position) * 4, 1);
            });
        }
        found = blocks.find_in_all<FINE_BINS>(range.wanted);
        range.narrow(found);
    }
    if (several) arrive_at_cluster();

    // Scores of the range go to the first block's list, unless all are wanted. A warp asks once for places of what its threads have.
    const bool all = range.count == range.wanted;
    const uint32_t before = a.topk - range.wanted;
    const uint32_t kept_from = range.lower_before + (all ? range.lower_count : 0), listed_from = range.lower_count;
    const int lane = threadIdx.x % 32;
    if (several && rank == 0 && !all && threadIdx.x == 0) {
        arrive_before_bytes(shared + FILLED_AT, (range.count - load_shared(blocks.counts_of(0) + found.bin * 4)) * 8);
    }
    for (int chunk = chunks - 1; chunk >= 0; --chunk) {
        if (chunk != chunks - 1) part.load(chunk);
        uint32_t counts = 0;  // kept ones, and 65536 for each that is listed
        part.each(chunk, [&](uint32_t bits, uint32_t position, int) {
            const uint32_t key = key_of(bits);
            if (range.is_before(key, position)) ++counts;
            else if (range.has(key, position)) counts += all ? 1 : 1 << 16;
        });
        const uint32_t of_others = of_lanes_before(counts, lane);
        uint32_t taken = 0;
        if (lane == 31) taken = take_shared(shared + COUNTERS_AT, of_others + counts);
        taken = shuffle_from(taken, 31) + of_others;
        uint32_t kept = kept_from + (taken & 0xffff), listed = listed_from + (taken >> 16);
        part.each(chunk, [&](uint32_t bits, uint32_t position, int page) {
            const uint32_t key = key_of(bits);
            const bool here = range.has(key, position);
            if (range.is_before(key, position) || (here && all)) {
                slots[kept++] = page * PAGE + position % PAGE;
            } else if (here) {
                const uint2 entry{key, position};
                const uint32_t to = shared + LIST_AT + listed++ * 8;
                rank ? store_to_block(0, to, entry, shared + FILLED_AT) : store_shared_2(to, entry);
            }
        });
    }
    if (rank == 0 && !all) {
        if (several) wait_for_turn(shared + FILLED_AT, 0);
        meet<1, THREADS>();
        range.count <= FEW ? rank_few(shared, range, pages, slots + before) : tell_apart(shared, range, pages, slots + before);
    }
    if (several) wait_for_cluster();  // until then this block's counts are on their way to others
}
