// Sparse MLA decode for few rows, for Hopper: two kernels, compiled at run time by launch.py, one cubin a tile.
//
// `attend` takes one stretch of one row's slots for one block of heads. A token of the KV cache is 1152 contiguous bytes, so
// one bulk copy gathers it into shared memory, and as many steps are on their way at once as shared memory holds. All warps do
// each phase of a step together:
//   scores   the warps share the tokens, the heads and the 576 values of the dot product; sums over the latter meet in shared
//            memory. The query stays in registers where there is room, since it is read in every step.
//   softmax  a fixed group of threads has each head, and holds its running maximum and sum.
//   values   every warp has all heads and a slice of the latent.
// A row's stretches are joined within a thread-block cluster (CLUSTER > 1), through distributed shared memory, and what the
// clusters leave, or the blocks where there are none, by `join` in a second launch, each in a fixed order.
//
// With EMULATE a host compiler takes this file: what follows in PTX comes from emulation.h then.

#ifdef EMULATE
#include "emulation.h"
#else

typedef unsigned int uint32_t;
typedef unsigned short uint16_t;

#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers known to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

// Orders this thread's own accesses to shared memory before copies that are asked for later.
__device__ __forceinline__ void fence_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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

__device__ __forceinline__ int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

__device__ __forceinline__ uint32_t ballot(bool x) { return __ballot_sync(0xffffffffu, x); }

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address of what has this address here, in another block of the cluster.
__device__ __forceinline__ uint32_t address_in_block(uint32_t address, uint32_t block) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}

__device__ __forceinline__ float load_remote(uint32_t address) {
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ float4 load_remote4(uint32_t address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// Asks for 16 bytes, or zeros where there are none.
__device__ __forceinline__ void copy_piece(uint32_t to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(there ? 16 : 0)
                 : "memory");
}

// Counts as an arrival of this thread once the copies that it asked for in pieces have landed.
__device__ __forceinline__ void arrive_when_copied(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

#if TILE_WGMMA
typedef unsigned long long uint64_t;

// Orders registers and shared memory that this warp group wrote before the products that follow.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_issued() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// 64 x 32 sums of a (64 x 16, columns dense) and b (32 x 16, columns dense), over what they held or, at `first`, over nothing.
__device__ __forceinline__ void score_products(float (&d)[16], uint64_t a, uint64_t b, bool first) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(first ? 0 : 1)
        : "memory");
}

// 64 x 256 sums of a (64 x 16, columns dense) and b (16 x 256, 64 columns dense), over what they held.
__device__ __forceinline__ void value_products(float (&d)[128], uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, 1, 1, 1, 0, 1;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
        : "l"(a), "l"(b)
        : "memory");
}

__device__ __forceinline__ void copies_asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most as many groups of copies are on their way.
template <int GROUPS>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

__device__ __forceinline__ bool all_lanes(bool x) { return __all_sync(0xffffffffu, x); }
#endif
#endif

// The tile, as the compiler is told.
constexpr int HEADS = TILE_HEADS;        // of a block: 16, 32 or 64
constexpr int TOKENS = TILE_TOKENS;      // of a step
constexpr int STAGES = TILE_STAGES;      // steps that are in shared memory or on their way there
constexpr int WARPS_H = TILE_WARPS_H;    // warps that share the heads in scores,
constexpr int WARPS_T = TILE_WARPS_T;    // those that share the tokens,
constexpr int WARPS_D = TILE_WARPS_D;    // and those that share the dot product
constexpr bool QUERY_IN_REGISTERS = TILE_QUERY_IN_REGISTERS;
constexpr int SCORE_PADDING = TILE_SCORE_PADDING;  // floats; 8 leave no bank conflict, 4 a few
constexpr int CLUSTER = TILE_CLUSTER;    // blocks of a row that join through distributed shared memory
constexpr int BLOCKS = TILE_BLOCKS;      // that have to fit an SM
constexpr bool BULK = TILE_BULK;         // a token comes as one bulk copy, or else in pieces of 16 bytes
constexpr int PASSES = TILE_PASSES;      // over the tokens of a warp in scores: more hold fewer sums in registers

constexpr int LATENT = 512, ROPE = 64, DIM = LATENT + ROPE;
constexpr int ROW = DIM * 2;     // bytes of a token
constexpr int PITCH = ROW + 16;  // eight rows start in different banks, so that ldmatrix meets no conflict
constexpr int WARPS = WARPS_H * WARPS_T * WARPS_D, THREADS = 32 * WARPS;
constexpr int D_STEPS = DIM / 16 / WARPS_D;            // of sixteen values of the dot product, of a warp in scores
constexpr int H_TILES = HEADS / 16 / WARPS_H;          // of sixteen heads, likewise
constexpr int T_TILES = TOKENS / 8 / WARPS_T / PASSES;  // of eight tokens, likewise, in a pass
constexpr int CHAINS = H_TILES * T_TILES < 4 ? 2 : 1;  // sums beside each other, where few tiles would wait for each other
constexpr int L_TILES = LATENT / 8 / WARPS;            // of eight latents, of a warp in values
constexpr int ASKED = TOKENS / WARPS;                  // tokens of a step that a warp asks for
constexpr int HEADS_ASKED = HEADS / WARPS;             // heads of the query, likewise
constexpr int HEAD_THREADS = THREADS / HEADS;          // of a head in softmax
constexpr int COLUMNS = TOKENS / HEAD_THREADS;         // tokens of such a thread
constexpr int SCORE_PITCH = TOKENS + SCORE_PADDING;    // floats
constexpr int WEIGHT_PITCH = TOKENS * 2 + 16;          // bytes
constexpr int SUM_PITCH = LATENT + 8;                  // floats, of what a cluster joins

#if !TILE_WGMMA
static_assert(DIM / 16 % WARPS_D == 0 && T_TILES % 2 == 0 && L_TILES % 2 == 0 && H_TILES >= 1, "warps do not divide the tile");
static_assert(HEAD_THREADS <= 32 && COLUMNS >= 2 && COLUMNS % 2 == 0, "no such tile: softmax");
static_assert(ASKED >= 1 && ASKED < 32 && STAGES * ASKED <= 32 && HEADS_ASKED >= 1 && HEADS_ASKED <= 16,
              "no such tile: copies");

// Shared memory, in bytes. A query that went to registers leaves its place to the scores.
__host__ __device__ constexpr int aligned(int bytes) { return (bytes + 127) / 128 * 128; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int SCORE_BYTES = aligned(WARPS_D * HEADS * SCORE_PITCH * 4), QUERY_BYTES = aligned(HEADS * PITCH);
constexpr int AT_QUERY = aligned(STAGES * TOKENS * PITCH);
constexpr int AT_SCORES = QUERY_IN_REGISTERS ? AT_QUERY : AT_QUERY + QUERY_BYTES;
constexpr int AT_WEIGHTS = QUERY_IN_REGISTERS ? AT_QUERY + larger(SCORE_BYTES, QUERY_BYTES) : AT_SCORES + SCORE_BYTES;
constexpr int AT_FADES = AT_WEIGHTS + aligned(HEADS * WEIGHT_PITCH);
constexpr int AT_INVERSES = AT_FADES + HEADS * 4;
constexpr int AT_LSES = AT_INVERSES + HEADS * 4;
constexpr int AT_THERE = AT_LSES + HEADS * 4;
constexpr int AT_BARRIERS = AT_THERE + STAGES * TOKENS * 4;
constexpr int SHARED_BYTES = AT_BARRIERS + 8 * (STAGES + 1);
static_assert(SHARED_BYTES <= 232448, "more shared memory than a block can have");
static_assert(CLUSTER == 1 || HEADS * SUM_PITCH * 4 <= AT_FADES, "no room for what the cluster joins");
#endif

struct Attend {
    const uint16_t* q_nope;   // bfloat16 [rows, heads, LATENT]; strides below, in values
    const uint16_t* q_rope;   // bfloat16 [rows, heads, ROPE]
    const unsigned char* kv;  // bfloat16 [slots, DIM], kv_stride bytes apart
    const int* slots;         // [rows, topk], slots_stride apart; -1 where there is none
    const int* lens;          // [rows], entries of each row to look at
    uint16_t* out;            // bfloat16 [rows, heads, LATENT], written where a row has one part
    float* partial;           // [rows, parts, heads, LATENT], written where it has more; left alone for a part without a token
    float* lse;               // [rows, parts, heads], base 2; -inf for a part without a token
    long long q_nope_row, q_nope_head, q_rope_row, q_rope_head, slots_stride, kv_stride;
    float scale;  // of scores, times log2(e)
    int topk, heads, parts;
    int chunk;  // tokens of a block, a multiple of TOKENS
};

// Joins what the blocks of a cluster hold: each has normalised sums, float [HEADS, SUM_PITCH], and their lse, float [HEADS], and
// takes a slice of the latent of all. `first_of_row` is the row's part's first head.
__device__ __forceinline__ void join_cluster(const Attend& a, uint32_t sums, uint32_t lses, int first_head,
                                             long long first_of_row) {
    constexpr int SLICE = LATENT / CLUSTER;
    const float NONE = __int_as_float(0xff800000);
    const int rank = blockIdx.x % CLUSTER;
    cluster_arrive();
    cluster_wait();
#pragma unroll 2
    for (int piece = threadIdx.x; piece < HEADS * SLICE / 4; piece += THREADS) {
        const int head = piece / (SLICE / 4), latent = rank * SLICE + piece % (SLICE / 4) * 4;
        float lse[CLUSTER], highest = NONE;
        float4 values[CLUSTER];
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) {
            lse[block] = load_remote(address_in_block(lses + head * 4, block));
            values[block] = load_remote4(address_in_block(sums + (head * SUM_PITCH + latent) * 4, block));
        }
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) highest = fmaxf(highest, lse[block]);
        const float finite = highest == NONE ? 0.0f : highest;
        float sum = 0.0f;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) {
            const float weight = exp2_fast(lse[block] - finite);
            sum += weight;
            x.x += weight * values[block].x;
            x.y += weight * values[block].y;
            x.z += weight * values[block].z;
            x.w += weight * values[block].w;
        }
        if (first_head + head >= a.heads) continue;
        const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
        const long long at = (first_of_row + head) * LATENT + latent;
        x = make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
        if (a.parts == 1) {
            *reinterpret_cast<uint2*>(a.out + at) = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
        } else {
            if (latent == 0) a.lse[first_of_row + head] = sum > 0.0f ? highest + log2_fast(sum) : NONE;
            *reinterpret_cast<float4*>(a.partial + at) = x;
        }
    }
    __syncwarp();
    cluster_arrive();  // nobody leaves while another block reads what it holds
    cluster_wait();
}

#if !TILE_WGMMA

__device__ __forceinline__ void zero_row(unsigned char* row, int lane) {
    for (int piece = lane; piece < ROW / 16; piece += 32) reinterpret_cast<uint4*>(row)[piece] = make_uint4(0, 0, 0, 0);
}

// blockIdx: stretch, block of heads, row. A row has parts * CLUSTER stretches.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attend(const __grid_constant__ Attend a) {
    SHARED_MEMORY(memory);
    const float NONE = __int_as_float(0xff800000);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const uint32_t base = shared_address(memory);
    const uint32_t barriers = base + AT_BARRIERS, query_barrier = barriers + 8 * STAGES;
    float* scores = reinterpret_cast<float*>(memory + AT_SCORES);  // [WARPS_D, HEADS, SCORE_PITCH]
    float* fades = reinterpret_cast<float*>(memory + AT_FADES);    // [HEADS], of the sums so far
    float* inverses = reinterpret_cast<float*>(memory + AT_INVERSES);
    float* lses = reinterpret_cast<float*>(memory + AT_LSES);
    int* there = reinterpret_cast<int*>(memory + AT_THERE);  // [STAGES, TOKENS], whether a token is

    if (tid <= STAGES) {
        barrier_init(barriers + 8 * tid, BULK || tid == STAGES ? WARPS : THREADS);
        fence_barrier_init();
    }
    __syncthreads();
    launch_dependents();
    wait_for_inputs();

    const int row = blockIdx.z, first_head = blockIdx.y * HEADS, begin = blockIdx.x * a.chunk;
    const int* slots = a.slots + row * a.slots_stride;
    const int latest = min(begin + a.chunk, a.topk);
    // At first a lane asks for a token of the stage that its place in its warp says, later the first lanes for one each.
    const int token = warp * ASKED + lane % ASKED, lane_stage = lane / ASKED;
    const int first_position = begin + lane_stage * TOKENS + token;
    const int first_slot = lane_stage < STAGES && first_position < latest ? slots[first_position] : -1;
    const int length = a.lens[row];

    // The query comes while the slots do.
    {
        const int h = warp * HEADS_ASKED + lane / 2, head = first_head + h;
        const bool mine = lane < 2 * HEADS_ASKED && head < a.heads, rope = lane % 2;
        const uint32_t copied = ballot(mine);
        for (int other = warp * HEADS_ASKED; other < (warp + 1) * HEADS_ASKED; ++other) {
            if (first_head + other >= a.heads) zero_row(memory + AT_QUERY + other * PITCH, lane);
        }
        __syncwarp();
        if (lane == 0) arrive_expecting(query_barrier, __popc(copied) / 2 * ROW);
        __syncwarp();
        if (mine) {
            const uint16_t* from = rope ? a.q_rope + row * a.q_rope_row + head * a.q_rope_head
                                        : a.q_nope + row * a.q_nope_row + head * a.q_nope_head;
            bulk_copy(base + AT_QUERY + h * PITCH + (rope ? LATENT * 2 : 0), from, rope ? ROPE * 2 : LATENT * 2, query_barrier);
        }
    }

    const int end = min(latest, length);
    const int steps = end > begin ? (end - begin + TOKENS - 1) / TOKENS : 0;

    // Asks for this lane's token of a stage; either all lanes that have one of a stage are asking, or none. Where there is no
    // token the row becomes zeros, because a weight of zero does not silence the NaN that memory may have held.
    auto ask = [&](bool asking, int stage, int slot) {
        const int place = stage * TOKENS + token;
        const bool real = asking && slot >= 0;
        const uint32_t copied = ballot(real);
        uint32_t missing = ballot(asking && !real);
        if (missing) {
            for (; missing; missing &= missing - 1) zero_row(memory + shuffle(place, __ffs(missing) - 1) * PITCH, lane);
            fence_before_copies();
        }
        if (asking) there[place] = real;
        __syncwarp();
        if (asking && lane % ASKED == 0) {
            arrive_expecting(barriers + 8 * stage, __popc(copied >> lane & ((1u << ASKED) - 1)) * ROW);
        }
        __syncwarp();
        if (real) bulk_copy(base + place * PITCH, a.kv + slot * a.kv_stride, ROW, barriers + 8 * stage);
    };
    // The same in pieces, for a stage whose slots the lanes from `first` on hold.
    auto ask_in_pieces = [&](int stage, int slot, int first) {
        constexpr int LANES = 32 / ASKED, PIECES = ROW / 16 / LANES;  // of a token; of a lane
        const int own = shuffle(slot, first + lane / LANES), place = stage * TOKENS + warp * ASKED + lane / LANES;
        const unsigned char* from = a.kv + max(own, 0) * a.kv_stride + lane % LANES * 16;
        const uint32_t to = base + place * PITCH + lane % LANES * 16;
        if (lane % LANES == 0) there[place] = own >= 0;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) copy_piece(to + i * LANES * 16, from + i * LANES * 16, own >= 0);
        arrive_when_copied(barriers + 8 * stage);
    };
    // The slot of this lane's token of a step, if it is one of the lanes that ask in the loop.
    auto look_up = [&](int step) {
        const int position = begin + step * TOKENS + token;
        return lane < ASKED && step < steps && position < end ? slots[position] : -1;
    };

    const int own_slot = first_position < end ? first_slot : -1;
    if constexpr (BULK) {
        ask(lane_stage < min(STAGES, steps), lane_stage, own_slot);
    } else {
        for (int i = 0; i < min(STAGES, steps); ++i) ask_in_pieces(i, own_slot, i * ASKED);
    }
    int following = look_up(STAGES);

    const int warp_h = warp % WARPS_H, warp_t = warp / WARPS_H % WARPS_T, warp_d = warp / (WARPS_H * WARPS_T);
    const int group = lane / 4, pair = 2 * (lane % 4);  // of a fragment: its row, or the column of a second operand; two values
    // Addresses of the eight values that this lane hands to ldmatrix: as a first operand (16 rows, two halves of 16 columns
    // one behind the other), and as a second (two times 8 rows, the halves of the first before those of the second).
    const int first_row = lane % 16, first_half = lane / 16 * 16;
    const int second_row = lane / 16 * 8 + lane % 8, second_half = lane / 8 % 2 * 16;
    const uint32_t query_address =
        base + AT_QUERY + (warp_h * H_TILES * 16 + first_row) * PITCH + first_half + warp_d * D_STEPS * 32;
    const uint32_t key_address =
        base + (warp_t * PASSES * T_TILES * 8 + second_row) * PITCH + second_half + warp_d * D_STEPS * 32;
    // Transposed, rows are tokens: two times 8 tokens of 8 latents before those of the next 8 latents, as `first` has them.
    const uint32_t value_address = base + first_row * PITCH + warp * L_TILES * 16 + first_half;
    const uint32_t weight_address = base + AT_WEIGHTS + first_row * WEIGHT_PITCH + first_half;

    barrier_wait(query_barrier, 0);
    uint32_t query[QUERY_IN_REGISTERS ? H_TILES : 1][QUERY_IN_REGISTERS ? D_STEPS : 1][4];
    if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
        for (int h = 0; h < H_TILES; ++h) {
#pragma unroll
            for (int d = 0; d < D_STEPS; ++d) ldmatrix(query[h][d], query_address + h * 16 * PITCH + d * 32);
        }
        __syncthreads();  // scores take its place
    }

    float sums[HEADS / 16][L_TILES][4];
#pragma unroll
    for (int h = 0; h < HEADS / 16; ++h) {
#pragma unroll
        for (int l = 0; l < L_TILES; ++l) sums[h][l][0] = sums[h][l][1] = sums[h][l][2] = sums[h][l][3] = 0.0f;
    }
    const int my_head = tid / HEAD_THREADS, my_column = tid % HEAD_THREADS * COLUMNS;  // in softmax
    float best = NONE, total = 0.0f;  // of this thread's head; the sum of its columns alone

    int stage = 0, before = STAGES - 1;  // of this step and of the one before
    uint32_t parity = 0;
    for (int step = 0; step < steps; ++step) {
        barrier_wait(barriers + 8 * stage, parity);
        const uint32_t stage_offset = stage * TOKENS * PITCH;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            float products[CHAINS][H_TILES][T_TILES][4];
#pragma unroll
            for (int c = 0; c < CHAINS; ++c) {
#pragma unroll
                for (int h = 0; h < H_TILES; ++h) {
#pragma unroll
                    for (int t = 0; t < T_TILES; ++t) {
                        products[c][h][t][0] = products[c][h][t][1] = products[c][h][t][2] = products[c][h][t][3] = 0.0f;
                    }
                }
            }
#pragma unroll
            for (int d = 0; d < D_STEPS; ++d) {
                uint32_t keys[T_TILES / 2][4];
#pragma unroll
                for (int t = 0; t < T_TILES / 2; ++t) {
                    ldmatrix(keys[t], key_address + stage_offset + (pass * T_TILES * 8 + t * 16) * PITCH + d * 32);
                }
#pragma unroll
                for (int h = 0; h < H_TILES; ++h) {
                    if constexpr (!QUERY_IN_REGISTERS) ldmatrix(query[0][0], query_address + h * 16 * PITCH + d * 32);
                    const uint32_t(&heads)[4] = query[QUERY_IN_REGISTERS ? h : 0][QUERY_IN_REGISTERS ? d : 0];
#pragma unroll
                    for (int t = 0; t < T_TILES; ++t) {
                        mma(products[d % CHAINS][h][t], heads, keys[t / 2][t % 2 * 2], keys[t / 2][t % 2 * 2 + 1]);
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < H_TILES; ++h) {
#pragma unroll
                for (int t = 0; t < T_TILES; ++t) {
                    float* at = scores + ((warp_d * HEADS) + (warp_h * H_TILES + h) * 16 + group) * SCORE_PITCH +
                                ((warp_t * PASSES + pass) * T_TILES + t) * 8 + pair;
                    const float(&p)[4] = products[0][h][t];
                    const float(&q)[4] = products[CHAINS - 1][h][t];
                    const bool two = CHAINS == 2;
                    *reinterpret_cast<float2*>(at) = make_float2(two ? p[0] + q[0] : p[0], two ? p[1] + q[1] : p[1]);
                    *reinterpret_cast<float2*>(at + 8 * SCORE_PITCH) =
                        make_float2(two ? p[2] + q[2] : p[2], two ? p[3] + q[3] : p[3]);
                }
            }
        }
        __syncthreads();  // and every warp is done with the values of the step before

        if (step > 0 && step - 1 + STAGES < steps) {
            if constexpr (BULK) {
                ask(lane < ASKED, before, following);
            } else {
                ask_in_pieces(before, following, 0);
            }
            following = look_up(step + STAGES);
        }

        {
            float x[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; c += 2) {
                x[c] = x[c + 1] = 0.0f;
#pragma unroll
                for (int d = 0; d < WARPS_D; ++d) {
                    const float2 two =
                        *reinterpret_cast<const float2*>(scores + (d * HEADS + my_head) * SCORE_PITCH + my_column + c);
                    x[c] += two.x;
                    x[c + 1] += two.y;
                }
            }
            float higher = best;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                x[c] = there[stage * TOKENS + my_column + c] ? x[c] * a.scale : NONE;
                higher = fmaxf(higher, x[c]);
            }
#pragma unroll
            for (int lanes = 1; lanes < HEAD_THREADS; lanes *= 2) higher = fmaxf(higher, shuffle_xor(higher, lanes));
            const float finite = higher == NONE ? 0.0f : higher;
            const float fade = exp2_fast(best - finite);
            total *= fade;
            uint32_t* weights =
                reinterpret_cast<uint32_t*>(memory + AT_WEIGHTS + my_head * WEIGHT_PITCH + my_column * 2);
#pragma unroll
            for (int c = 0; c < COLUMNS; c += 2) {
                const float one = exp2_fast(x[c] - finite), two = exp2_fast(x[c + 1] - finite);
                total += one + two;
                weights[c / 2] = pack_bf16(one, two);
            }
            if (tid % HEAD_THREADS == 0) fades[my_head] = fade;
            best = higher;
        }
        __syncthreads();

#pragma unroll
        for (int h = 0; h < HEADS / 16; ++h) {
            const float low = fades[h * 16 + group], high = fades[h * 16 + group + 8];
#pragma unroll
            for (int l = 0; l < L_TILES; ++l) {
                sums[h][l][0] *= low;
                sums[h][l][1] *= low;
                sums[h][l][2] *= high;
                sums[h][l][3] *= high;
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS / 16; ++t) {
            uint32_t weights[HEADS / 16][4];
#pragma unroll
            for (int h = 0; h < HEADS / 16; ++h) ldmatrix(weights[h], weight_address + h * 16 * WEIGHT_PITCH + t * 32);
#pragma unroll
            for (int l = 0; l < L_TILES / 2; ++l) {
                uint32_t values[4];
                ldmatrix_transposed(values, value_address + stage_offset + t * 16 * PITCH + l * 32);
#pragma unroll
                for (int h = 0; h < HEADS / 16; ++h) {
                    mma(sums[h][2 * l], weights[h], values[0], values[1]);
                    mma(sums[h][2 * l + 1], weights[h], values[2], values[3]);
                }
            }
        }
        before = stage;
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }

#pragma unroll
    for (int lanes = 1; lanes < HEAD_THREADS; lanes *= 2) total += shuffle_xor(total, lanes);
    if (tid % HEAD_THREADS == 0) {
        inverses[my_head] = total > 0.0f ? 1.0f / total : 0.0f;
        lses[my_head] = total > 0.0f ? best + log2_fast(total) : NONE;
    }
    __syncthreads();  // and every warp is done with the tokens, whose place the cluster takes

    const int part = blockIdx.x / CLUSTER;
    const long long first_of_row = (static_cast<long long>(row) * a.parts + part) * a.heads + first_head;
    const bool alone = a.parts == 1;
    if constexpr (CLUSTER == 1) {
        if (!alone && tid < HEADS && first_head + tid < a.heads) a.lse[first_of_row + tid] = lses[tid];
        if (!alone && steps == 0) return;
    }
    float* joined = reinterpret_cast<float*>(memory);  // [HEADS, SUM_PITCH]
#pragma unroll
    for (int h = 0; h < HEADS / 16; ++h) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = h * 16 + half * 8 + group;
            const float inverse = inverses[head];
            const bool real = first_head + head < a.heads;
#pragma unroll
            for (int l = 0; l < L_TILES; ++l) {
                const int latent = (warp * L_TILES + l) * 8 + pair;
                const float one = sums[h][l][2 * half] * inverse, two = sums[h][l][2 * half + 1] * inverse;
                if constexpr (CLUSTER > 1) {
                    *reinterpret_cast<float2*>(joined + head * SUM_PITCH + latent) = make_float2(one, two);
                } else if (real) {
                    const long long at = (first_of_row + head) * LATENT + latent;
                    if (alone) {
                        *reinterpret_cast<uint32_t*>(a.out + at) = pack_bf16(one, two);
                    } else {
                        *reinterpret_cast<float2*>(a.partial + at) = make_float2(one, two);
                    }
                }
            }
        }
    }
    if constexpr (CLUSTER > 1) {
        join_cluster(a, base, base + AT_LSES, first_head, first_of_row);
    }
}

#else  // TILE_WGMMA

// The same for 64 heads and steps of 64 tokens, with products of warp groups, which read both operands from shared memory: the
// mma.sync above would be bound by ldmatrix. Both of two warp groups have all heads: half the tokens in scores, half the latent
// in values. Shared memory holds the query, two steps of tokens and the weights as tiles of rows of 128 bytes, swizzled, so
// copies are of 16 bytes.
constexpr int GROUP = 128;         // threads
constexpr int SWIZZLED = 64 * 128;  // bytes of a tile: 64 rows of 64 values
constexpr int TILES = DIM / 64;
constexpr int WG_STAGES = 2;
constexpr int AT_WG_QUERY = WG_STAGES * TILES * SWIZZLED;
constexpr int AT_WG_WEIGHTS = AT_WG_QUERY + TILES * SWIZZLED;
constexpr int AT_WG_HIGHEST = AT_WG_WEIGHTS + SWIZZLED;    // float [2, 64], of each warp group's tokens; later their sums
constexpr int AT_WG_LSES = AT_WG_HIGHEST + 2 * 64 * 4;     // float [64]
constexpr int AT_WG_THERE = AT_WG_LSES + 64 * 4;           // int [WG_STAGES, 64]
constexpr int SHARED_BYTES = AT_WG_THERE + WG_STAGES * 64 * 4 + 1024;  // to begin at a multiple of 1024
static_assert(HEADS == 64 && TOKENS == 64 && STAGES == 2 && WARPS == 8 && BLOCKS == 1, "no such tile");
static_assert(SHARED_BYTES <= 232448, "more shared memory than a block can have");
static_assert(HEADS * SUM_PITCH * 4 <= AT_WG_QUERY, "no room for what the cluster joins");
constexpr float SLACK = 8.0f;  // log2 of what weights may exceed 1 by before the sums are scaled down

// What tells the tensor cores where an operand lies: 128-byte swizzle, and two strides in bytes. Columns dense: `stride` is from
// eight rows to the next eight. Rows dense: `stride` is from eight columns to the next eight, `leading` from 64 rows to the next.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t leading, uint32_t stride) {
    return static_cast<uint64_t>(address >> 4 & 0x3fff) | static_cast<uint64_t>(leading >> 4) << 16 |
           static_cast<uint64_t>(stride >> 4) << 32 | 1ull << 62;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attend(const __grid_constant__ Attend a) {
    SHARED_MEMORY(unaligned);
    const float NONE = __int_as_float(0xff800000);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, half = tid / GROUP;
    const uint32_t base = (shared_address(unaligned) + 1023) / 1024 * 1024;
    unsigned char* memory = unaligned + (base - shared_address(unaligned));
    float* highest = reinterpret_cast<float*>(memory + AT_WG_HIGHEST);
    int* there = reinterpret_cast<int*>(memory + AT_WG_THERE);

    launch_dependents();
    wait_for_inputs();

    const int row = blockIdx.z, first_head = blockIdx.y * HEADS, begin = blockIdx.x * a.chunk;
    const int* slots = a.slots + row * a.slots_stride;
    const int latest = min(begin + a.chunk, a.topk);
    // Four lanes copy a row, of the query and of tokens.
    const int copied = warp * 8 + lane / 4, part_of_copied = lane % 4;
    int first_slots[WG_STAGES];
#pragma unroll
    for (int i = 0; i < WG_STAGES; ++i) {
        const int position = begin + i * TOKENS + copied;
        first_slots[i] = position < latest ? slots[position] : -1;
    }
    const int length = a.lens[row];

    // Sixteen bytes of row `copied` of a tile, in their swizzled place.
    auto place = [&](uint32_t first_tile, int piece) {
        return base + first_tile + piece / 8 * SWIZZLED + copied * 128 + ((piece % 8) ^ (copied % 8)) * 16;
    };
    {
        const int head = first_head + copied;
        const bool real = head < a.heads;
        const int its = real ? head : 0;
        const uint16_t* nope = a.q_nope + row * a.q_nope_row + its * a.q_nope_head;
        const uint16_t* rope = a.q_rope + row * a.q_rope_row + its * a.q_rope_head;
#pragma unroll
        for (int i = 0; i < ROW / 16 / 4; ++i) {
            const int piece = i * 4 + part_of_copied;
            const uint16_t* from = i < LATENT / 32 ? nope + piece * 8 : rope + (piece * 8 - LATENT);
            copy_piece(place(AT_WG_QUERY, piece), from, real);
        }
    }

    const int end = min(latest, length);
    const int steps = end > begin ? (end - begin + TOKENS - 1) / TOKENS : 0;
    auto ask = [&](int stage, int slot) {
        const unsigned char* from = a.kv + (slot >= 0 ? slot : 0) * a.kv_stride;
        if (part_of_copied == 0) there[stage * TOKENS + copied] = slot >= 0;
#pragma unroll
        for (int i = 0; i < ROW / 16 / 4; ++i) {
            const int piece = i * 4 + part_of_copied;
            copy_piece(place(stage * TILES * SWIZZLED, piece), from + piece * 16, slot >= 0);
        }
    };
    auto look_up = [&](int step) {
        const int position = begin + step * TOKENS + copied;
        return step < steps && position < end ? slots[position] : -1;
    };
#pragma unroll
    for (int i = 0; i < WG_STAGES; ++i) {
        if (i < steps) ask(i, begin + i * TOKENS + copied < end ? first_slots[i] : -1);
        copies_asked();
    }
    int following = look_up(WG_STAGES);

    const int pair = 2 * (lane % 4);
    const int low_head = warp % 4 * 16 + lane / 4;  // of this thread's two; the other is eight further
    float sums[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) sums[i] = 0.0f;
    float best[2] = {NONE, NONE}, total[2] = {0.0f, 0.0f};  // of both heads; totals of this thread's columns alone
    for (int step = 0; step < steps; ++step) {
        const int stage = step % WG_STAGES;
        if (step == 0) {
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        fence_before_copies();
        __syncthreads();  // and every warp is done with the step before

        float scores[16];
        const uint32_t tokens = base + stage * TILES * SWIZZLED;
        products_begin();
#pragma unroll
        for (int d = 0; d < DIM / 16; ++d) {
            const uint32_t offset = d / 4 * SWIZZLED + d % 4 * 32;
            score_products(scores, operand(base + AT_WG_QUERY + offset, 16, 1024),
                           operand(tokens + offset + half * 32 * 128, 16, 1024), d == 0);
        }
        products_issued();
        if (step > 0 && step + 1 < steps) {
            ask((step + 1) % WG_STAGES, following);
            following = look_up(step + 2);
        }
        copies_asked();
        products_wait();

        float higher[2] = {NONE, NONE};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int column = half * 32 + i / 4 * 8 + pair + i % 2;
            scores[i] = there[stage * TOKENS + column] ? scores[i] * a.scale : NONE;
            higher[i / 2 % 2] = fmaxf(higher[i / 2 % 2], scores[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            higher[i] = fmaxf(higher[i], shuffle_xor(higher[i], 1));
            higher[i] = fmaxf(higher[i], shuffle_xor(higher[i], 2));
            if (lane % 4 == 0) highest[half * 64 + low_head + 8 * i] = higher[i];
        }
        __syncthreads();
        float fade[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            higher[i] = fmaxf(higher[i], highest[(1 - half) * 64 + low_head + 8 * i]);
            // Weights may exceed 1 a little: scaling the sums costs more than they lose.
            const float reference = higher[i] > best[i] + SLACK || best[i] == NONE ? fmaxf(higher[i], best[i]) : best[i];
            fade[i] = best[i] == reference ? 1.0f : exp2_fast(best[i] - reference);
            best[i] = reference;
            total[i] *= fade[i];
        }
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const int which = i / 2 % 2, head = low_head + 8 * which, column = half * 32 + i / 4 * 8 + pair;
            const float finite = best[which] == NONE ? 0.0f : best[which];
            const float one = exp2_fast(scores[i] - finite), two = exp2_fast(scores[i + 1] - finite);
            total[which] += one + two;
            *reinterpret_cast<uint32_t*>(memory + AT_WG_WEIGHTS + head * 128 + ((column / 8) ^ (head % 8)) * 16 + pair * 2) =
                pack_bf16(one, two);
        }
        if (!all_lanes(fade[0] == 1.0f && fade[1] == 1.0f)) {
#pragma unroll
            for (int i = 0; i < 128; ++i) sums[i] *= fade[i / 2 % 2];
        }
        fence_before_copies();
        __syncthreads();

        products_begin();
#pragma unroll
        for (int t = 0; t < TOKENS / 16; ++t) {
            value_products(sums, operand(base + AT_WG_WEIGHTS + t * 32, 16, 1024),
                           operand(tokens + half * (LATENT / 2 / 64) * SWIZZLED + t * 2048, SWIZZLED, 1024));
        }
        products_issued();
        products_wait();
    }
    copies_wait<0>();

    __syncthreads();  // `highest` has been read
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        total[i] += shuffle_xor(total[i], 1);
        total[i] += shuffle_xor(total[i], 2);
        if (lane % 4 == 0) highest[half * 64 + low_head + 8 * i] = total[i];
    }
    __syncthreads();
    const int part = blockIdx.x / CLUSTER;
    const long long first_of_row = (static_cast<long long>(row) * a.parts + part) * a.heads + first_head;
    const bool alone = a.parts == 1;
    float* joined = reinterpret_cast<float*>(memory);  // [HEADS, SUM_PITCH]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int head = low_head + 8 * i;
        const float sum = highest[head] + highest[64 + head];  // in one order, so that both warp groups have the same
        const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f, lse = sum > 0.0f ? best[i] + log2_fast(sum) : NONE;
        const bool real = first_head + head < a.heads;
        if (half == 0 && lane % 4 == 0) {
            if constexpr (CLUSTER > 1) {
                reinterpret_cast<float*>(memory + AT_WG_LSES)[head] = lse;
            } else if (!alone && real) {
                a.lse[first_of_row + head] = lse;
            }
        }
#pragma unroll
        for (int l = 0; l < 32; ++l) {
            const int latent = half * (LATENT / 2) + l * 8 + pair;
            const float one = sums[4 * l + 2 * i] * inverse, two = sums[4 * l + 2 * i + 1] * inverse;
            if constexpr (CLUSTER > 1) {
                *reinterpret_cast<float2*>(joined + head * SUM_PITCH + latent) = make_float2(one, two);
            } else if (real && (alone || steps > 0)) {
                const long long at = (first_of_row + head) * LATENT + latent;
                if (alone) {
                    *reinterpret_cast<uint32_t*>(a.out + at) = pack_bf16(one, two);
                } else {
                    *reinterpret_cast<float2*>(a.partial + at) = make_float2(one, two);
                }
            }
        }
    }
    if constexpr (CLUSTER > 1) join_cluster(a, base, base + AT_WG_LSES, first_head, first_of_row);
}
#endif

struct Join {
    const float* partial;  // [rows, parts, heads, LATENT]; anything in a part without a token
    const float* lse;      // [rows, parts, heads], base 2; -inf for a part without a token
    uint16_t* out;         // bfloat16 [rows, heads, LATENT]
    int heads, parts;      // at most MOST_PARTS
};

constexpr int MOST_PARTS = 128;
constexpr int QUARTER = LATENT / 4;  // of the latent, what a warp joins: four values a lane
constexpr int BATCH = 8;             // parts that a warp reads at once

// blockIdx: quarter (one warp has a quarter of each head's parts' latent; SHARED warps share the parts), head, row. With
// SHARED == 1 a block has four warps and every quarter.
template <int SHARED>
__device__ __forceinline__ void join_parts(const Join& j, float* weights, float4* shared) {
    const float NONE = __int_as_float(0xff800000);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = SHARED == 1 ? 0 : warp, quarter = SHARED == 1 ? warp : blockIdx.x;
    launch_dependents();
    wait_for_inputs();
    const long long row_and_head = static_cast<long long>(blockIdx.z) * j.parts * j.heads + blockIdx.y;
    const float4* partial = reinterpret_cast<const float4*>(j.partial + row_and_head * LATENT + quarter * QUARTER) + lane;
    const long long stride = static_cast<long long>(j.heads) * (LATENT / 4);
    float lse[MOST_PARTS / 32];
#pragma unroll
    for (int i = 0; i < MOST_PARTS / 32; ++i) {
        const int part = i * 32 + lane;
        lse[i] = part < j.parts ? j.lse[row_and_head + static_cast<long long>(part) * j.heads] : NONE;
    }
    float4 values[BATCH];  // asked for beside the sums, not after them
    auto read = [&](int from) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int part = from + i * SHARED;
            values[i] = part < j.parts ? partial[part * stride] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    };
    read(first);
    float best = NONE;
#pragma unroll
    for (int i = 0; i < MOST_PARTS / 32; ++i) best = fmaxf(best, lse[i]);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) best = fmaxf(best, shuffle_xor(best, lanes));
    const float finite = best == NONE ? 0.0f : best;
    float total = 0.0f;
    float* own = weights + warp * MOST_PARTS;
#pragma unroll
    for (int i = 0; i < MOST_PARTS / 32; ++i) {
        const float weight = exp2_fast(lse[i] - finite);
        own[i * 32 + lane] = weight;
        total += weight;
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) total += shuffle_xor(total, lanes);
    __syncwarp();
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int from = first; from < j.parts; from += BATCH * SHARED) {
        if (from != first) read(from);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int part = from + i * SHARED;
            const float weight = part < j.parts ? own[part] : 0.0f;
            if (weight > 0.0f) {  // a part without a token holds anything
                sum.x += weight * values[i].x;
                sum.y += weight * values[i].y;
                sum.z += weight * values[i].z;
                sum.w += weight * values[i].w;
            }
        }
    }
    if constexpr (SHARED > 1) {
        shared[threadIdx.x] = sum;
        __syncthreads();
        if (warp > 0) return;
        for (int other = 1; other < SHARED; ++other) {
            const float4 more = shared[other * 32 + lane];
            sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    uint16_t* out = j.out + (static_cast<long long>(blockIdx.z) * j.heads + blockIdx.y) * LATENT + quarter * QUARTER;
    reinterpret_cast<uint2*>(out)[lane] =
        make_uint2(pack_bf16(sum.x * inverse, sum.y * inverse), pack_bf16(sum.z * inverse, sum.w * inverse));
}

#define JOIN_KERNEL(name, shared_by, warps)                                                     \
    extern "C" __global__ void __launch_bounds__(32 * warps) name(const __grid_constant__ Join j) { \
        SHARED_MEMORY(memory);                                                                  \
        float4* shared = reinterpret_cast<float4*>(memory);                                     \
        join_parts<shared_by>(j, reinterpret_cast<float*>(shared + 32 * warps), shared);        \
    }
JOIN_KERNEL(join1, 1, 4)
JOIN_KERNEL(join4, 4, 4)
JOIN_KERNEL(join8, 8, 8)
