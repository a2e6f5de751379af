// Sparse MLA for several rows of one request, for Hopper, in bfloat16: compiled at run time by sparse_verify_cuda.py.
//
// A block takes one group of rows, whose heads are the 64 lines of a tensor-core tile, and one part of the different slots that
// they chose. It makes that part itself: a slot belongs to the part that its hash says, entries of a part meet in a hash table
// in shared memory, and each slot is listed once with a bit for every row that chose it. Order and sums depend on the inputs
// alone, so that equal inputs give equal bits.
// Then two warpgroups walk the list, 64 tokens a step: each scores half of the tokens for all lines, they agree on the highest
// score of a line through shared memory, and each weighs one half of the latent. The next step's tokens are gathered meanwhile.
//
// With EMULATE a host compiler takes this file: what is PTX here comes from emulation.h then.

#ifdef EMULATE
#include "emulation.h"
#else

#ifdef __CUDACC_RTC__
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#define SHARED_MEMORY(name) extern __shared__ unsigned char name[]

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Orders this thread's accesses to shared memory before those of tensor cores that come after the next barrier.
__device__ __forceinline__ void fence_before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Sixteen bytes, or zeros where they are not there.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ uint2 load_shared_2(uint32_t address) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ uint4 load_shared_4(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(x) : "memory");
}

// What was there; `x` is stored where that is `expected`.
__device__ __forceinline__ uint32_t swap_shared(uint32_t address, uint32_t expected, uint32_t x) {
    uint32_t old;
    asm volatile("atom.shared.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "r"(address), "r"(expected), "r"(x) : "memory");
    return old;
}

__device__ __forceinline__ uint32_t or_shared(uint32_t address, uint32_t x) {
    uint32_t old;
    asm volatile("atom.shared.or.b32 %0, [%1], %2;" : "=r"(old) : "r"(address), "r"(x) : "memory");
    return old;
}

__device__ __forceinline__ uint32_t load_list(const uint32_t* from) {
    uint32_t x;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }

__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ __forceinline__ uint32_t warp_ballot(bool x) { return __ballot_sync(0xffffffffu, x); }

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// d (+)= A [64, 16] . B [32, 16]^T, both K-major.
__device__ __forceinline__ void score(float (&d)[16], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

#define OF_8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// d += A [64, 16] . B [16, 256]: A is K-major, and B's columns lie next to each other.
__device__ __forceinline__ void weigh(float (&d)[128], uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, 1, 1, 1, 0, 1;"
        : OF_8(d, 0), OF_8(d, 8), OF_8(d, 16), OF_8(d, 24), OF_8(d, 32), OF_8(d, 40), OF_8(d, 48), OF_8(d, 56), OF_8(d, 64),
          OF_8(d, 72), OF_8(d, 80), OF_8(d, 88), OF_8(d, 96), OF_8(d, 104), OF_8(d, 112), OF_8(d, 120)
        : "l"(a), "l"(b));
}
#endif

#define INFINITE __int_as_float(0x7f800000)

constexpr int LATENT = 512;
constexpr int LINES = 64;     // of a tile: heads of one row after the other
constexpr int TOKENS = 64;    // of a step
constexpr int THREADS = 256;  // two warpgroups
constexpr int WARPS = THREADS / 32;
constexpr int PER_THREAD = (TOPK + THREADS - 1) / THREADS;  // entries of a row
constexpr int ENTRIES = ROWS * PER_THREAD * THREADS;         // of a group, some of them none
static_assert(ROWS * HEADS <= LINES && ROWS <= 8, "the rows of a group do not fit a tile, or their bits a byte");

// Shared memory. A panel is 64 rows of 64 values, 128 bytes a row, whose 16-byte pieces are swizzled as tensor cores want them.
constexpr uint32_t PANEL = LINES * 128;
constexpr uint32_t PANELS = 9 * PANEL;  // 512 values of the latent and 64 of RoPE
constexpr uint32_t QUERY_AT = 0;
constexpr uint32_t TOKENS_AT = PANELS;  // two steps
constexpr uint32_t WEIGHTS_AT = 3 * PANELS;
constexpr uint32_t BITS_AT = WEIGHTS_AT + PANEL;           // of the tokens of two steps: rows that chose them
constexpr uint32_t HIGHEST_AT = BITS_AT + 2 * TOKENS * 4;  // of a line, by warpgroup; before, the list's first two steps
constexpr uint32_t SHARED_BYTES = HIGHEST_AT + 2 * LINES * 4;
// While the list is made, where tokens will lie: entries by warp, and the hash table. In the end, lines on their way out.
constexpr uint32_t TABLE_AT = TOKENS_AT + ENTRIES * 4;
constexpr int CELL_BITS = 14;
constexpr uint32_t CELLS = 1 << CELL_BITS;
static_assert(TABLE_AT + 4 * CELLS <= WEIGHTS_AT, "the hash table has no room");
static_assert(ROWS * TOPK <= static_cast<int>(CELLS), "more slots than cells");

constexpr uint32_t SLOT = 0xffffff;  // of a word; the rows' bits are above it
constexpr uint32_t EMPTY = 0xffffffff;

struct Attend {
    const unsigned char* q_nope;  // bfloat16 [rows, HEADS, 512], strides below in bytes
    const unsigned char* q_rope;  // bfloat16 [rows, HEADS, 64]
    const unsigned char* kv;      // bfloat16 [slots, 576]
    const int* slots;             // [rows, slots_stride], -1 where there is none
    const int* lens;              // [rows], entries of a row to look at
    uint32_t* lists;              // [groups, parts, ENTRIES], what blocks hand to themselves
    unsigned char* out;           // bfloat16 [rows * HEADS, parts, 512], each part by itself
    float* lse;                   // [rows * HEADS, parts], base 2, -inf where a part has nothing for a line; where parts are several
    long long q_nope_row, q_nope_head, q_rope_row, q_rope_head, slots_stride, kv_stride;
    float scale;  // of scores, base 2
    int parts, all_rows, rows_per_request, groups_per_request;
};

// Of tiles of 128-byte rows, swizzled: `leading` is from 64 values to the next 64 where a row is not along K.
__device__ __forceinline__ uint64_t tile_at(uint32_t address, uint32_t leading) {
    const uint64_t begin = (address & 0x3ffff) >> 4;
    return begin | (static_cast<uint64_t>(leading >> 4) << 16) | (static_cast<uint64_t>(1024 >> 4) << 32) | (1ull << 62);
}

__device__ __forceinline__ uint32_t part_of(uint32_t slot, uint32_t parts) { return __umulhi(slot * 0x9e3779b1u, parts); }

__device__ __forceinline__ float higher(float a, float b) { return a > b ? a : b; }

__device__ __forceinline__ uint32_t cell_of(uint32_t slot) { return (slot * 0x85ebca6bu) >> (32 - CELL_BITS); }

// Of an entry's row, above the slot.
__device__ __forceinline__ uint32_t bit_of(uint32_t entry) { return 1u << (24 + (entry >> 24 & 7)); }

// Writes the words of this block's slots to `list`, and those of the first two steps to shared memory too, in an order that the
// inputs decide; how many there are.
__device__ __forceinline__ int make_list(const Attend& a, uint32_t shared, int warp, int row, int rows, int part, uint32_t* list) {
    const int thread = threadIdx.x, lane = thread % 32;
    const uint32_t before = (1u << lane) - 1, table = shared + TABLE_AT;
    const uint32_t entries = shared + TOKENS_AT + warp * (ENTRIES / WARPS * 4);
    uint32_t chosen[ROWS][PER_THREAD];
    int end[ROWS];
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        end[j] = j < rows ? a.lens[row + j] : 0;
#pragma unroll
        for (int c = 0; c < PER_THREAD; ++c) {
            const int i = c * THREADS + thread;
            chosen[j][c] = j < rows && i < TOPK ? a.slots[(row + j) * a.slots_stride + i] : EMPTY;
        }
    }
    for (uint32_t i = 4 * thread; i < CELLS; i += 4 * THREADS) store_shared_4(table + 4 * i, EMPTY);
    // The entries of this part, with the number of their row.
    int count = 0;
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
#pragma unroll
        for (int c = 0; c < PER_THREAD; ++c) {
            const uint32_t slot = chosen[j][c];
            const bool here = c * THREADS + thread < end[j] && slot < SLOT && part_of(slot, a.parts) == static_cast<uint32_t>(part);
            const uint32_t all = warp_ballot(here);
            if (here) store_shared(entries + 4 * (count + __popc(all & before)), slot | j << 24);
            count += __popc(all);
        }
    }
    __syncthreads();
    // A row's second mention of a slot is not listed: it finds the bit of its row there.
    constexpr int AT_ONCE = 4;
    for (int first = lane; first < count; first += 32 * AT_ONCE) {
        uint32_t entry[AT_ONCE], old[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            entry[u] = first + 32 * u < count ? load_shared(entries + 4 * (first + 32 * u)) : EMPTY;
            const uint32_t slot = entry[u] & SLOT, word = slot | bit_of(entry[u]);
            old[u] = entry[u] == EMPTY ? EMPTY : swap_shared(table + 4 * cell_of(slot), EMPTY, word);
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const uint32_t slot = entry[u] & SLOT, bit = bit_of(entry[u]);
            uint32_t cell = cell_of(slot);
            while (old[u] != EMPTY && (old[u] & SLOT) != slot) {
                cell = (cell + 1) % CELLS;
                old[u] = swap_shared(table + 4 * cell, EMPTY, slot | bit);
            }
            if (old[u] != EMPTY) {
                old[u] = or_shared(table + 4 * cell, bit);
                if (old[u] & bit) store_shared(entries + 4 * (first + 32 * u), EMPTY);
            }
        }
    }
    __syncthreads();
    // The first row that chose a slot lists it, with the bits of all.
    int listed = 0;
    for (int first = lane; first < (count + 31) / 32 * 32; first += 32 * AT_ONCE) {
        uint32_t entry[AT_ONCE], word[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            entry[u] = first + 32 * u < count ? load_shared(entries + 4 * (first + 32 * u)) : EMPTY;
            word[u] = entry[u] == EMPTY ? 0 : load_shared(table + 4 * cell_of(entry[u] & SLOT));
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            if (entry[u] != EMPTY) {
                const uint32_t slot = entry[u] & SLOT;
                for (uint32_t cell = cell_of(slot); (word[u] & SLOT) != slot;) {
                    cell = (cell + 1) % CELLS;
                    word[u] = load_shared(table + 4 * cell);
                }
                if (word[u] & (bit_of(entry[u]) - 1) & ~SLOT) word[u] = 0;
            }
            if (first + 32 * u < count) store_shared(entries + 4 * (first + 32 * u), word[u]);
            listed += __popc(warp_ballot(word[u] != 0));
        }
    }
    const uint32_t counts = shared + WEIGHTS_AT;
    if (lane == 0) store_shared(counts + 4 * warp, listed);
    __syncthreads();
    int place = 0, all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const int of_warp = load_shared(counts + 4 * w);
        place += w < warp ? of_warp : 0;
        all += of_warp;
    }
#pragma unroll 4
    for (int i = lane; i < (count + 31) / 32 * 32; i += 32) {
        const uint32_t word = i < count ? load_shared(entries + 4 * i) : 0, there = warp_ballot(word != 0);
        const int to = place + __popc(there & before);
        if (word != 0) {
            list[to] = word;
            if (to < 2 * TOKENS) store_shared(shared + HIGHEST_AT + 4 * to, word);
        }
        place += __popc(there);
    }
    return all;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Attend a) {
    SHARED_MEMORY(memory);
    if (a.parts > 1) launch_dependents();  // to the join alone, which waits before all else
    wait_for_inputs();
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
    const int thread = threadIdx.x, warp = warp_uniform(thread / 32), lane = thread % 32, half = warp / 4;
    const int part = blockIdx.x, group = blockIdx.y % a.groups_per_request;
    const int row = blockIdx.y / a.groups_per_request * a.rows_per_request + group * ROWS;
    const int rows = min(ROWS, min(a.rows_per_request - group * ROWS, a.all_rows - row)), lines = rows * HEADS;
    // A thread gathers one 16-byte piece of every 128 bytes of two rows of a panel.
    const int gathered = warp * 4 + lane / 8, piece = lane % 8;
    const uint32_t gathered_at = gathered * 128 + ((piece ^ (gathered & 7)) << 4);
    for (int at = 0; at < LINES; at += 32) {
        const int line = gathered + at, j = line / HEADS, head = line % HEADS;
        const bool there = line < lines;
        const unsigned char* nope = a.q_nope + (there ? (row + j) * a.q_nope_row + head * a.q_nope_head : 0) + 16 * piece;
        const unsigned char* rope = a.q_rope + (there ? (row + j) * a.q_rope_row + head * a.q_rope_head : 0) + 16 * piece;
        const uint32_t to = shared + QUERY_AT + gathered_at + at * 128;
#pragma unroll
        for (int panel = 0; panel < 8; ++panel) copy_16(to + panel * PANEL, nope + panel * 128, there);
        copy_16(to + 8 * PANEL, rope, there);
    }
    uint32_t* list = a.lists + (static_cast<long long>(blockIdx.y) * a.parts + part) * ENTRIES;
    const int listed = make_list(a, shared, warp, row, rows, part, list);
    __syncthreads();  // the list is written, and what it was made from is read

    const auto first_entry_of = [&](int at) { return at < listed ? load_shared(shared + HIGHEST_AT + 4 * at) : 0u; };
    const auto entry_of = [&](int at) { return at < listed ? load_list(list + at) : 0u; };
    const auto gather = [&](int step, uint32_t entry, int at) {
        const bool there = entry != 0;
        const unsigned char* from = a.kv + (entry & SLOT) * a.kv_stride + 16 * piece;
        const uint32_t to = shared + TOKENS_AT + step * PANELS + gathered_at + at * 128;
#pragma unroll
        for (int panel = 0; panel < 9; ++panel) copy_16(to + panel * PANEL, from + panel * 128, there);
        if (piece == 0) store_shared(shared + BITS_AT + 4 * (step * TOKENS + gathered + at), entry >> 24);
    };
    uint32_t first = first_entry_of(gathered), second = first_entry_of(gathered + 32);
    if (listed) {
        gather(0, first, 0);
        gather(0, second, 32);
    }
    first = first_entry_of(TOKENS + gathered), second = first_entry_of(TOKENS + gathered + 32);

    // What a thread has of a tile of products: lines `upper` and `upper` + 8, columns 8 i + `column` and the next one.
    const int upper = warp % 4 * 16 + lane / 4, lower = upper + 8, column = lane % 4 * 2;
    const uint32_t upper_bit = upper < lines ? 1u << (upper / HEADS) : 0, lower_bit = lower < lines ? 1u << (lower / HEADS) : 0;
    const uint32_t highest_at = shared + HIGHEST_AT, weights_at = shared + WEIGHTS_AT;
    const uint64_t query_tile = tile_at(shared + QUERY_AT, 16), weights_tile = tile_at(weights_at, 16);
    float upper_best = -INFINITE, lower_best = -INFINITE, upper_sum = 0, lower_sum = 0;
    float out[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] = 0;

    for (int begin = 0, step = 0; begin < listed; begin += TOKENS, step ^= 1) {
        const uint32_t tokens = shared + TOKENS_AT + step * PANELS;
        wait_for_copies();
        products_wait();  // of the step before, whose tokens and weights may now be written over
        fence_before_products();
        __syncthreads();
        float s[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) s[i] = 0;
        const uint64_t tokens_tile = tile_at(tokens + half * 32 * 128, 16), latent_tile = tile_at(tokens + half * 4 * PANEL, PANEL);
        products_begin();
#pragma unroll
        for (int k = 0; k < 36; ++k) {
            const uint32_t along = k / 4 * PANEL + k % 4 * 32;
            score(s, query_tile + (along >> 4), tokens_tile + (along >> 4), k > 0);
        }
        products_commit();
        if (begin + TOKENS < listed) {
            gather(step ^ 1, first, 0);
            gather(step ^ 1, second, 32);
            first = entry_of(begin + 2 * TOKENS + gathered), second = entry_of(begin + 2 * TOKENS + gathered + 32);
        }
        products_wait();
        float upper_highest = -INFINITE, lower_highest = -INFINITE;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint2 bits = load_shared_2(shared + BITS_AT + 4 * (step * TOKENS + half * 32 + 8 * i + column));
            s[4 * i] = bits.x & upper_bit ? s[4 * i] * a.scale : -INFINITE;
            s[4 * i + 1] = bits.y & upper_bit ? s[4 * i + 1] * a.scale : -INFINITE;
            s[4 * i + 2] = bits.x & lower_bit ? s[4 * i + 2] * a.scale : -INFINITE;
            s[4 * i + 3] = bits.y & lower_bit ? s[4 * i + 3] * a.scale : -INFINITE;
            upper_highest = higher(upper_highest, higher(s[4 * i], s[4 * i + 1]));
            lower_highest = higher(lower_highest, higher(s[4 * i + 2], s[4 * i + 3]));
        }
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            upper_highest = higher(upper_highest, shuffle_xor(upper_highest, lanes));
            lower_highest = higher(lower_highest, shuffle_xor(lower_highest, lanes));
        }
        if (column == 0) {
            store_shared(highest_at + 4 * (half * LINES + upper), __float_as_uint(upper_highest));
            store_shared(highest_at + 4 * (half * LINES + lower), __float_as_uint(lower_highest));
        }
        __syncthreads();
        const float upper_other = __uint_as_float(load_shared(highest_at + 4 * ((1 - half) * LINES + upper)));
        const float lower_other = __uint_as_float(load_shared(highest_at + 4 * ((1 - half) * LINES + lower)));
        const float upper_new = higher(upper_best, higher(upper_highest, upper_other));
        const float lower_new = higher(lower_best, higher(lower_highest, lower_other));
        const float upper_from = upper_new == -INFINITE ? 0 : upper_new, lower_from = lower_new == -INFINITE ? 0 : lower_new;
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
        __syncthreads();
        if (warp_ballot(upper_fade != 1 || lower_fade != 1)) {
#pragma unroll
            for (int i = 0; i < 128; i += 4) {
                out[i] *= upper_fade;
                out[i + 1] *= upper_fade;
                out[i + 2] *= lower_fade;
                out[i + 3] *= lower_fade;
            }
        }
        products_begin();
#pragma unroll
        for (int k = 0; k < TOKENS / 16; ++k) {
            weigh(out, weights_tile + (k * 32 >> 4), latent_tile + (k * 16 * 128 >> 4));
        }
        products_commit();
    }
    products_wait();
    wait_for_copies();  // of the query, where a part has no token

#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        upper_sum += shuffle_xor(upper_sum, lanes);
        lower_sum += shuffle_xor(lower_sum, lanes);
    }
    __syncthreads();
    if (column == 0) {
        store_shared(highest_at + 4 * (half * LINES + upper), __float_as_uint(upper_sum));
        store_shared(highest_at + 4 * (half * LINES + lower), __float_as_uint(lower_sum));
    }
    __syncthreads();
    // In one order, so that both halves divide by the same.
    const auto sum_of = [&](int line) {
        const float low = __uint_as_float(load_shared(highest_at + 4 * line));
        return low + __uint_as_float(load_shared(highest_at + 4 * (LINES + line)));
    };
    upper_sum = sum_of(upper);
    lower_sum = sum_of(lower);
    const float upper_over = upper_sum == 0 ? 0 : 1 / upper_sum, lower_over = lower_sum == 0 ? 0 : 1 / lower_sum;
    const long long first_line = static_cast<long long>(row) * HEADS;
    if (a.parts > 1 && half == 0 && column == 0) {
        const auto lse_of = [](float best, float sum) { return sum == 0 ? -INFINITE : best + log2_fast(sum); };
        if (upper < lines) a.lse[(first_line + upper) * a.parts + part] = lse_of(upper_best, upper_sum);
        if (lower < lines) a.lse[(first_line + lower) * a.parts + part] = lse_of(lower_best, lower_sum);
    }
    // Through shared memory, where tokens lay, so that a line leaves in one piece.
    const uint32_t lines_at = shared + TOKENS_AT;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const uint32_t at = (((half * 32 + i) ^ (upper & 7)) << 4) + column * 2;
        store_shared(lines_at + upper * 2 * LATENT + at, pack_bf16(out[4 * i] * upper_over, out[4 * i + 1] * upper_over));
        store_shared(lines_at + lower * 2 * LATENT + at, pack_bf16(out[4 * i + 2] * lower_over, out[4 * i + 3] * lower_over));
    }
    __syncthreads();
#pragma unroll 8
    for (int i = thread; i < lines * (LATENT / 8); i += THREADS) {
        const int line = i / (LATENT / 8), along = i % (LATENT / 8);
        const uint4 values = load_shared_4(lines_at + line * 2 * LATENT + ((along ^ (line & 7)) << 4));
        *reinterpret_cast<uint4*>(a.out + ((first_line + line) * a.parts + part) * 2 * LATENT + along * 16) = values;
    }
}
