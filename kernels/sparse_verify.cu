// Sparse MLA for several rows of one request, for Hopper, on a bfloat16 or FP8 KV cache: compiled at run time by
// sparse_verify.py.
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

__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Orders this thread's accesses to shared memory before those of tensor cores that come after the next barrier.
__device__ __forceinline__ void fence_before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Sixteen bytes, or zeros where they are not there.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Waits for `threads` of the block; each of a few `number`s is for other ones.
template <int number, int threads> __device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(number), "n"(threads) : "memory");
}

__device__ __forceinline__ void start_barrier(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Once what this thread has copied until now has landed.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Until all have arrived for the `turn`th time.
__device__ __forceinline__ void wait_for_turn(uint32_t barrier, uint32_t turn) {
    asm volatile(
        "{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra wait;\n}" ::"r"(barrier),
        "r"(turn & 1)
        : "memory");
}

template <int registers> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers> __device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

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

__device__ __forceinline__ void store_shared_4(uint32_t address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ uint32_t load_shared_half(uint32_t address) {
    unsigned short x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void store_shared_half(uint32_t address, uint32_t x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<unsigned short>(x)) : "memory");
}

// Without a branch, which would take longer than the store.
__device__ __forceinline__ void store_shared_half_if(bool stored, uint32_t address, uint32_t x) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.shared.u16 [%0], %1;\n}" ::"r"(address),
                 "h"(static_cast<unsigned short>(x)), "r"(static_cast<int>(stored))
                 : "memory");
}

__device__ __forceinline__ void store_shared_byte_if(bool stored, uint32_t address, uint32_t x) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.shared.u8 [%0], %1;\n}" ::"r"(address), "r"(x),
                 "r"(static_cast<int>(stored))
                 : "memory");
}

// What was there, 16 bits; `x` is stored where that is `expected`.
__device__ __forceinline__ uint32_t swap_shared_half(uint32_t address, uint32_t expected, uint32_t x) {
    unsigned short old;
    asm volatile("atom.shared.cas.b16 %0, [%1], %2, %3;"
                 : "=h"(old)
                 : "r"(address), "h"(static_cast<unsigned short>(expected)), "h"(static_cast<unsigned short>(x))
                 : "memory");
    return old;
}

// What this block wrote is there for whoever sees the counter.
__device__ __forceinline__ uint32_t add_to_counter(uint32_t* counter, uint32_t x) {
    uint32_t old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(x) : "memory");
    return old;
}

__device__ __forceinline__ uint32_t load_counter(const uint32_t* counter) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
    return x;
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

// Two products in bfloat16.
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
    uint32_t x;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}

// Two products in bfloat16, each added to and rounded once.
__device__ __forceinline__ uint32_t multiply_add_bf16(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t x;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
    return x;
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

// Of the lane that is `lanes` before; of this one where there is none.
__device__ __forceinline__ uint32_t shuffle_up(uint32_t x, int lanes) { return __shfl_up_sync(0xffffffffu, x, lanes); }

__device__ __forceinline__ uint32_t shuffle_from(uint32_t x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ __forceinline__ uint32_t warp_ballot(bool x) { return __ballot_sync(0xffffffffu, x); }

__device__ __forceinline__ void sync_warp() { __syncwarp(); }

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
// Registers of each: all that the launch gives 384 threads of 168.
constexpr int ATTENDING_REGISTERS = 184, GATHERING_REGISTERS = 136;
static_assert(PER_THREAD <= 32, "a thread has a bit for every entry of a row that it looks at");
static_assert(ROWS * HEADS <= LINES && ROWS <= 8, "the rows of a group do not fit a tile, or their bits a byte");

// Shared memory. A panel is 64 rows of 64 values, 128 bytes a row, whose 16-byte pieces are swizzled as tensor cores want them.
constexpr uint32_t PANEL = LINES * 128;
constexpr uint32_t PANELS = 9 * PANEL;  // 512 values of the latent and 64 of RoPE
constexpr uint32_t QUERY_AT = 0;
constexpr uint32_t TOKENS_AT = PANELS;  // two steps
constexpr uint32_t WEIGHTS_AT = 3 * PANELS;
constexpr uint32_t BITS_AT = WEIGHTS_AT + PANEL;           // of the tokens of two steps: rows that chose them
constexpr uint32_t HIGHEST_AT = BITS_AT + 2 * TOKENS * 4;  // of a line, by warpgroup; before, the list's first two steps
constexpr uint32_t COUNTS_AT = HIGHEST_AT + 2 * LINES * 4;  // slots listed, by warp
constexpr uint32_t AHEAD_AT = COUNTS_AT + WARPS * 4;        // tokens of the first step, by warp
constexpr uint32_t FILLED_AT = AHEAD_AT + WARPS * 4;        // barriers of two steps: their tokens are there
constexpr uint32_t EMPTIED_AT = FILLED_AT + 2 * 8;          // and are weighed
constexpr uint32_t SHARED_BYTES = EMPTIED_AT + 2 * 8;
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

constexpr uint32_t SLOT = 0xffffff;  // of a word; the rows' bits are above it
constexpr uint32_t EMPTY = 0xffffffff;
constexpr uint32_t NONE = 0xffff;  // of an entry's number

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

// Of tiles of 128-byte rows, swizzled: `leading` is from 64 values to the next 64 where a row is not along K.
__device__ __forceinline__ uint64_t tile_at(uint32_t address, uint32_t leading) {
    const uint64_t begin = (address & 0x3ffff) >> 4;
    return begin | (static_cast<uint64_t>(leading >> 4) << 16) | (static_cast<uint64_t>(1024 >> 4) << 32) | (1ull << 62);
}

__device__ __forceinline__ uint32_t part_of(uint32_t slot, uint32_t parts) { return __umulhi(slot * 0x9e3779b1u, parts); }

__device__ __forceinline__ float higher(float a, float b) { return a > b ? a : b; }

// Of the highest score, in base 2, and the sum of all over it.
__device__ __forceinline__ float lse_of(float best, float sum) { return sum == 0 ? -INFINITE : best + log2_fast(sum); }

__device__ __forceinline__ uint32_t cell_of(uint32_t slot) { return __umulhi(slot * 0x85ebca6bu, CELLS); }

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

// A number of 16 bits for every row, two in a word.
struct ByRow {
    uint32_t words[ROWS / 2 + 1];

    __device__ __forceinline__ int operator[](int j) const {  // `j` is a constant
        return words[j / 2] >> j % 2 * 16 & 0xffff;
    }
    __device__ __forceinline__ void set(int j, uint32_t x) { words[j / 2] |= x << j % 2 * 16; }  // was 0; likewise
};

// How many the lanes before this one have.
__device__ __forceinline__ uint32_t of_lanes_before(uint32_t x, int lane) {
    uint32_t sum = x;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const uint32_t others = shuffle_up(sum, lanes);
        sum += lane >= lanes ? others : 0;
    }
    return sum - x;
}

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

__device__ __forceinline__ void meet_attending() { meet<1, ATTENDING>(); }

__device__ __forceinline__ void meet_all() { meet<2, THREADS>(); }

constexpr int OF_PASS = GATHERING / 8;  // rows that are gathered at once: eight threads have one
constexpr int PASSES = TOKENS / OF_PASS;
constexpr int BEFORE_LIST = AHEAD ? 1 : 0;  // steps

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

    // An entry of the first row, which is one of those that a warp of the list has written; 0 where there is none.
    __device__ __forceinline__ uint32_t word_ahead(int pass) const {
        const int token = row + pass * OF_PASS, warp = token % 32 / 4, i = token / 32 * 4 + token % 4;
        if (i >= static_cast<int>(load_shared(shared + AHEAD_AT + 4 * warp))) return 0;
        return load_shared(shared + ENTRIES_AT + 4 * (warp * (ENTRIES / WARPS) + i)) | 1u << 24;
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

constexpr int PIECES = LATENT / 8;  // of a line, 16 bytes each

__device__ __forceinline__ int steps_of(int listed) { return BEFORE_LIST + (listed + TOKENS - 1) / TOKENS; }

// What the third warpgroup does: the query, and every step's tokens once those of two steps before are weighed.
__device__ __forceinline__ void gather_part(const Attend& a, uint32_t shared, int row, int rows, const uint32_t* list) {
    const Gathering gather(a, shared);
    gather.query(row, rows * HEADS);
    meet_all();  // entries of the first row are there
    if (AHEAD) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) gather.copy(0, pass, gather.word_ahead(pass));
#if FP8
        gather.dequantise(0);
#endif
    }
    meet_all();  // and the list
    int listed = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) listed += load_shared(shared + COUNTS_AT + 4 * w) & 0xffff;
    // Words of the list are asked for a step early. Those in shared memory are read before others write there.
    uint32_t words[PASSES], later[PASSES];
    const auto place_of = [&](int step, int pass) { return (step - BEFORE_LIST) * TOKENS + gather.row + pass * OF_PASS; };
    const auto kept = [&](int place) { return place < listed ? load_shared(shared + HIGHEST_AT + 4 * place) : 0u; };
    const auto word_of = [&](int place) { return place < listed ? load_list(list + place) : 0u; };
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        words[pass] = kept(place_of(BEFORE_LIST, pass));
        later[pass] = AHEAD ? 0 : kept(place_of(1, pass));
    }
    if (AHEAD) {
        gather.filled(0);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) later[pass] = word_of(place_of(2, pass));
    }
    const int steps = steps_of(listed);
    for (int step = BEFORE_LIST; step < steps; ++step) {
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
        for (int p = 0; p < a.parts; ++p) best = higher(best, __uint_as_float(load_shared(of_line + 4 * p)));
        const float from_best = best == -INFINITE ? 0 : best;
        for (int p = 0; p < a.parts; ++p) total += exp2_fast(__uint_as_float(load_shared(of_line + 4 * p)) - from_best);
        weight = total == 0 ? 0 : exp2_fast(__uint_as_float(load_shared(shared + WEIGHTS_AT + 4 * thread)) - from_best) / total;
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
            const float of_part = __uint_as_float(load_shared(shared + WEIGHTS_AT + 4 * (line * a.parts + p)));
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
    const int thread = threadIdx.x, warp = warp_uniform(thread / 32), lane = thread % 32, half = warp / 4;
    const int part = blockIdx.x, lines = rows * HEADS;
    const int listed = make_list(a, shared, warp, rows, part, list, chosen_of(a, row, rows));
    meet_all();  // the list is written, and what it was made from is read

    // What a thread has of a tile of products: lines `upper` and `upper` + 8, columns 8 i + `column` and the next one.
    const int upper = warp % 4 * 16 + lane / 4, lower = upper + 8, column = lane % 4 * 2;
    const uint32_t upper_bit = upper < lines ? 1u << (upper / HEADS) : 0, lower_bit = lower < lines ? 1u << (lower / HEADS) : 0;
    const uint32_t highest_at = shared + HIGHEST_AT, weights_at = shared + WEIGHTS_AT;
    const uint64_t query_tile = tile_at(shared + QUERY_AT, 16), weights_tile = tile_at(weights_at, 16);
    float upper_best = -INFINITE, lower_best = -INFINITE, upper_sum = 0, lower_sum = 0;
    float out[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] = 0;

    const int steps = steps_of(listed);
    for (int step = 0; step < steps; ++step) {
        const uint32_t tokens = shared + TOKENS_AT + step % 2 * PANELS;
        products_wait();  // of the step before, whose tokens may now be written over
        if (step > 0 && lane == 0) arrive(shared + EMPTIED_AT + (step - 1) % 2 * 8);
        wait_for_turn(shared + FILLED_AT + step % 2 * 8, step / 2);
        fence_before_products();
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
        products_wait();
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
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            upper_highest = higher(upper_highest, shuffle_xor(upper_highest, lanes));
            lower_highest = higher(lower_highest, shuffle_xor(lower_highest, lanes));
        }
        if (column == 0) {
            store_shared(highest_at + 4 * (half * LINES + upper), __float_as_uint(upper_highest));
            store_shared(highest_at + 4 * (half * LINES + lower), __float_as_uint(lower_highest));
        }
        meet_attending();
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
        meet_attending();
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

#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        upper_sum += shuffle_xor(upper_sum, lanes);
        lower_sum += shuffle_xor(lower_sum, lanes);
    }
    meet_attending();
    if (column == 0) {
        store_shared(highest_at + 4 * (half * LINES + upper), __float_as_uint(upper_sum));
        store_shared(highest_at + 4 * (half * LINES + lower), __float_as_uint(lower_sum));
    }
    meet_attending();
    // In one order, so that both halves divide by the same.
    const auto sum_of = [&](int line) {
        const float low = __uint_as_float(load_shared(highest_at + 4 * line));
        return low + __uint_as_float(load_shared(highest_at + 4 * (LINES + line)));
    };
    upper_sum = sum_of(upper);
    lower_sum = sum_of(lower);
    const float upper_over = upper_sum == 0 ? 0 : 1 / upper_sum, lower_over = lower_sum == 0 ? 0 : 1 / lower_sum;
    const long long first_line = static_cast<long long>(row) * HEADS;
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
    if (a.parts > 1) join(a, shared, part, lines, first_line);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Attend a) {
    SHARED_MEMORY(memory);
    wait_for_inputs();
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
    const int group = blockIdx.y % a.groups_per_request;
    const int row = blockIdx.y / a.groups_per_request * a.rows_per_request + group * ROWS;
    const int rows = min(ROWS, min(a.rows_per_request - group * ROWS, a.all_rows - row));
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
