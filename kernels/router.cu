// The router of a layer's experts for Hopper: products of few rows, and which experts each row chooses, in one launch. router.py
// compiles it at run time.
//
// A block has 16 experts and a part of the hidden dimension; all weights are in registers before the rows are there. Sums of parts
// meet in memory, and the last blocks of the grid, one for each row, wait for all others, add up and choose: by then every block
// runs or has ended, so that none waits for one that has no place.

#include "activations.cuh"
#include "few_rows.cuh"

constexpr int COLUMNS = 16, THREADS = WARPS * 32;
constexpr int BLOCKS = EXPERTS / COLUMNS * PARTS;
constexpr int BYTES = HIDDEN * 2, OF_PART = BYTES / PARTS, CHUNKS = OF_PART / CHUNK / WARPS;
static_assert(HIDDEN % (PARTS * WARPS * CHUNK / 2) == 0, "a warp has whole chunks");
static_assert(EXPERTS == 256 && (BLOCKS & (BLOCKS - 1)) == 0, "a lane has eight experts, and counts of launches may overflow");
constexpr int OF_LANE = EXPERTS / 32, LANES_OF_GROUP = 32 / EXPERT_GROUPS, EACH = CHOSEN + WITH_SHARED;
constexpr int PITCH = COLUMNS + 4;  // of a row's sums, so that lanes that have two rows each write to 32 banks
constexpr uint32_t OF_TILE = PITCH * 8 * 4;  // sums of eight rows
static_assert(ROW_TILES * 8 <= BLOCKS, "a block chooses for one row");
[[maybe_unused]] constexpr uint32_t SHARED_BYTES = 16 + WARPS * ROW_TILES * OF_TILE;

struct Router {
    const unsigned char* hidden;  // bfloat16 [rows, HIDDEN]
    const unsigned char* weight;  // bfloat16 [EXPERTS, HIDDEN]
    const float* bias;            // [EXPERTS]
    float* sums;                  // [PARTS, rows, EXPERTS]
    float* logits;                // [rows, EXPERTS]
    float* shares;                // [rows, EACH]
    int* chosen;                  // [rows, EACH]
    uint32_t* arrived;            // blocks of all launches so far
    float factor, of_shared;
    int rows, unused;
};

// As whole numbers of the same order; those that are none come last of all.
__device__ __forceinline__ uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x == x ? x : -1e30f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// Of a lane's eight keys, those of the groups that a row does not keep are minus infinity.
__device__ __forceinline__ void keep_groups(float (&keys)[OF_LANE], int lane) {
    const float none = __uint_as_float(0xff800000);  // minus infinity
    float most = keys[0], next = none;               // two largest of the group
#pragma unroll
    for (int i = 1; i < OF_LANE; ++i) {
        next = fmaxf(next, fminf(most, keys[i]));
        most = fmaxf(most, keys[i]);
    }
#pragma unroll
    for (int apart = 1; apart < LANES_OF_GROUP; apart *= 2) {
        const float other = shuffle_xor(most, apart), other_next = shuffle_xor(next, apart);
        next = fmaxf(fminf(most, other), fmaxf(next, other_next));
        most = fmaxf(most, other);
    }
    const uint32_t mine = ordered(most + next);
    int before = 0;  // groups that are kept first
#pragma unroll
    for (int group = 0; group < EXPERT_GROUPS; ++group) {
        const uint32_t of_group = shuffle_from(mine, group * LANES_OF_GROUP);
        before += of_group > mine || (of_group == mine && group < lane / LANES_OF_GROUP);
    }
    if (before < GROUPS_KEPT) return;
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) keys[i] = none;
}

// A lane's logits of a row, whose sums are there.
__device__ __forceinline__ void add_up(const Router& a, int row, int lane, float (&logits)[OF_LANE]) {
    uint4 parts[PARTS][2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const float* from = a.sums + (static_cast<long long>(part) * a.rows + row) * EXPERTS + lane * OF_LANE;
        parts[part][0] = load_written(from);
        parts[part][1] = load_written(from + 4);
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            logits[half * 4] += __uint_as_float(parts[part][half].x);
            logits[half * 4 + 1] += __uint_as_float(parts[part][half].y);
            logits[half * 4 + 2] += __uint_as_float(parts[part][half].z);
            logits[half * 4 + 3] += __uint_as_float(parts[part][half].w);
        }
    }
}

// For one row by one warp, whose lanes have eight experts each.
__device__ __forceinline__ void choose(const Router& a, int row, int lane, const float (&logits)[OF_LANE]) {
    const int first = lane * OF_LANE;
    float scores[OF_LANE], keys[OF_LANE];
    uint32_t left[OF_LANE];  // 0 once it is chosen
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
        a.logits[static_cast<long long>(row) * EXPERTS + first + i] = logits[i];
        scores[i] = opened(1, logits[i]);
        keys[i] = scores[i] + a.bias[first + i];
    }
    if (EXPERT_GROUPS > 1) keep_groups(keys, lane);
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) left[i] = ordered(keys[i]);

    float sum = 0, share = 0;
    int expert = EXPERTS;  // that of the shared one
#pragma unroll
    for (int choice = 0; choice < CHOSEN; ++choice) {
        uint32_t best = left[0];
#pragma unroll
        for (int i = 1; i < OF_LANE; ++i) best = max(best, left[i]);
        const uint32_t best_of_all = warp_most(best);
        const int winner = __ffs(warp_ballot(best == best_of_all)) - 1;
        int place = 0;
        float score = 0;
#pragma unroll
        for (int i = OF_LANE - 1; i >= 0; --i) {
            const bool here = left[i] == best;
            place = here ? i : place;
            score = here ? scores[i] : score;
        }
#pragma unroll
        for (int i = 0; i < OF_LANE; ++i) left[i] = lane == winner && place == i ? 0 : left[i];
        score = __uint_as_float(shuffle_from(__float_as_uint(score), winner));
        place = winner * OF_LANE + static_cast<int>(shuffle_from(place, winner));
        sum += score;
        share = lane == choice ? score : share;
        expert = lane == choice ? place : expert;
    }
    if (lane >= EACH) return;
    share = lane < CHOSEN ? share / (sum > 0 ? sum : 1) * a.factor : a.of_shared;
    a.shares[row * EACH + lane] = share;
    a.chosen[row * EACH + lane] = expert;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) router(const __grid_constant__ Router a) {
    SHARED_MEMORY(memory);
    const uint32_t shared = (shared_address(memory) + 15) & ~15u;
    const Place of;
    const int block = blockIdx.x, part = block % PARTS, column = block / PARTS * COLUMNS;
    const long long begin = part * OF_PART + of.warp * (CHUNKS * CHUNK) + of.piece * 16;  // bytes
    uint4 upper[CHUNKS], lower[CHUNKS];
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const unsigned char* from = a.weight + static_cast<long long>(column + of.row) * BYTES + begin + chunk * CHUNK;
        upper[chunk] = load_early(from);
        lower[chunk] = load_early(from + 8 * BYTES);
    }
    wait_for_inputs();
    let_others_begin();  // as SGLang's does, so that whoever comes next waits for what is written here
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
        const int row = tile * 8 + of.row;
        uint4 x[CHUNKS];
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            x[chunk] = {0, 0, 0, 0};
            if (row < a.rows) x[chunk] = *reinterpret_cast<const uint4*>(a.hidden + row * static_cast<long long>(BYTES) + begin + chunk * CHUNK);
        }
        float sums[4] = {};
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            multiply_few_bf16(sums, upper[chunk].x, lower[chunk].x, upper[chunk].y, lower[chunk].y, x[chunk].x, x[chunk].y);
            multiply_few_bf16(sums, upper[chunk].z, lower[chunk].z, upper[chunk].w, lower[chunk].w, x[chunk].z, x[chunk].w);
        }
        const uint32_t at = shared + (of.warp * ROW_TILES + tile) * OF_TILE + (2 * of.piece * PITCH + of.row) * 4;
        store_shared(at, __float_as_uint(sums[0]));
        store_shared(at + PITCH * 4, __float_as_uint(sums[1]));
        store_shared(at + 8 * 4, __float_as_uint(sums[2]));
        store_shared(at + (PITCH + 8) * 4, __float_as_uint(sums[3]));
    }
    meet<1, THREADS>();
    for (int i = threadIdx.x; i < a.rows * COLUMNS; i += THREADS) {
        const int row = i / COLUMNS, of_row = i % COLUMNS;
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += load_shared_float(shared + warp * ROW_TILES * OF_TILE + (row * PITCH + of_row) * 4);
        a.sums[(static_cast<long long>(part) * a.rows + row) * EXPERTS + column + of_row] = sum;
    }
    meet<1, THREADS>();
    if (of.warp) return;
    uint32_t before = of.lane ? 0 : add_to_counter(a.arrived, 1);
    const int row = block - (BLOCKS - a.rows);
    if (row < 0) return;
    before = shuffle_from(before, 0);
    const uint32_t all = before / BLOCKS * BLOCKS + BLOCKS;
    while (static_cast<int>(load_counter(a.arrived) - all) < 0) {}
    sync_warp();
    float logits[OF_LANE] = {};
    add_up(a, row, of.lane, logits);
    choose(a, row, of.lane, logits);
}
