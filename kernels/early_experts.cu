// Experts of few tokens in two launches, for Hopper: block FP8, from hidden states to the sum of what a token's experts give.
// early_experts.py compiles it at run time, once for each launch.
//
// A row of either product is one choice of a token. Its weights go through registers, some chunks at once, and meet one row of
// values, which every block quantises for itself. Sums of 128 products are scaled and added in float32. The second launch asks for
// its weights while the first one runs.

#include "activations.cuh"
#include "few_rows.cuh"

constexpr int GROUPS = HIDDEN / GROUP, GROUPS_OF_WIDTH = WIDTH / GROUP;
constexpr int EACH = CHOSEN + WITH_SHARED;  // rows of a token, the shared expert last

struct Weights {
    const unsigned char* first;   // e4m3 [experts, 2 * WIDTH, HIDDEN], gate above up
    const float* first_scales;    // [experts, 2 * WIDTH / GROUP, HIDDEN / GROUP]
    const unsigned char* second;  // e4m3 [experts, HIDDEN, WIDTH]
    const float* second_scales;   // [experts, HIDDEN / GROUP, WIDTH / GROUP]
};

struct Experts {
    Weights chosen_ones, shared_one;
    const unsigned short* x;  // bfloat16 [tokens, HIDDEN]
    const int* chosen;        // [tokens, CHOSEN], -1 where there is none
    const float* shares;      // [tokens, CHOSEN]
    unsigned short* inner;    // bfloat16 [tokens, EACH, WIDTH]: silu(gate) * up; nothing where there is none
    unsigned short* out;      // bfloat16 [tokens, HIDDEN]
    float factor;             // of the sum without the shared expert
    int unused;
};

__device__ __forceinline__ uint2 load_2(const unsigned short* from) { return *reinterpret_cast<const uint2*>(from); }

// Four values of a group in e4m3, those of this lane, and the group's scale.
struct Quantised {
    uint32_t values;
    float scale;
};

__device__ __forceinline__ Quantised quantised_group(uint2 values, bool powers) {
    const float2 near = unpack_bf16(values.x), far = unpack_bf16(values.y);
    float largest = fmaxf(fmaxf(fmaxf(fmaxf(1e-10f, fabsf(near.x)), fabsf(near.y)), fabsf(far.x)), fabsf(far.y));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, shuffle_xor(largest, lanes));
    Scale scale = exact_scale(largest);
    if (powers) {
        const uint32_t exponent = exponent_above(scale.scale);
        scale = {__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23)};
    }
    const uint32_t low = pack_fp8(near.x * scale.inverse, near.y * scale.inverse);
    return {low | pack_fp8(far.x * scale.inverse, far.y * scale.inverse) << 16, scale.scale};
}

// The first launch: a block has eight values of gate and those of up that belong to them.
constexpr int VALUES = 8, WARPS = 8, OF_WARP = GROUPS / WARPS, CHUNKS = OF_WARP * OF_GROUP, AHEAD = CHUNKS < 4 ? CHUNKS : 4;
static_assert(GROUPS % WARPS == 0, "a warp has whole groups");
constexpr uint32_t SUMS_AT = HIDDEN * 2;  // behind values in float16
// The second one: a block has some values of a token's sum, a warp those of one choice.
constexpr int COLUMNS = 32, TILES = COLUMNS / 16, CHUNKS_OF_WIDTH = GROUPS_OF_WIDTH * OF_GROUP;
constexpr uint32_t GIVEN_AT = EACH * WIDTH * 2;
[[maybe_unused]] constexpr uint32_t SHARED_BYTES =
    16 + (SUMS_AT + WARPS * 2 * VALUES * 4 > GIVEN_AT + EACH * COLUMNS * 4 ? SUMS_AT + WARPS * 2 * VALUES * 4 : GIVEN_AT + EACH * COLUMNS * 4);

// Four values of a group, those of this lane, in float16 at `at`; the group's scale.
__device__ __forceinline__ float quantise_group(uint2 values, bool powers, uint32_t at) {
    const Quantised group = quantised_group(values, powers);
    store_shared_2(at, unpack_fp8(group.values));
    return group.scale;
}

// Of the one row that there is, values of a chunk in float16, of which a lane has 16; the other lanes' rows are zeros.
struct Row {
    uint4 low, high;

    __device__ __forceinline__ Row(const Place& of, uint32_t at) : low{0, 0, 0, 0}, high{0, 0, 0, 0} {
        if (of.row) return;
        low = load_shared_4(at + of.piece * 32);
        high = load_shared_4(at + of.piece * 32 + 16);
    }
};

// Of 16 values of two columns each and of the row.
__device__ __forceinline__ void add_products(float (&sums)[4], const uint4& upper, const uint4& lower, const Row& x) {
    add_products(sums, upper.x, lower.x, uint2{x.low.x, x.low.y});
    add_products(sums, upper.y, lower.y, uint2{x.low.z, x.low.w});
    add_products(sums, upper.z, lower.z, uint2{x.high.x, x.high.y});
    add_products(sums, upper.w, lower.w, uint2{x.high.z, x.high.w});
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_SM) gate_up(const __grid_constant__ Experts a) {
    SHARED_MEMORY(memory);
    const uint32_t shared = (shared_address(memory) + 15) & ~15u;
    wait_for_inputs();
    let_others_begin();  // which then find the choices written
    const Place of;
    const int token = blockIdx.y / EACH, of_token = blockIdx.y % EACH, begin = of.warp * OF_WARP, value = blockIdx.x * VALUES;
    const bool is_shared = WITH_SHARED && of_token == CHOSEN;
    const long long expert = is_shared ? 0 : a.chosen[token * CHOSEN + of_token];
    if (expert < 0) return;
    uint2 rows[OF_WARP];
#pragma unroll
    for (int group = 0; group < OF_WARP; ++group) rows[group] = load_2(a.x + token * HIDDEN + (begin + group) * GROUP + of.lane * 4);
    const Weights& weights = is_shared ? a.shared_one : a.chosen_ones;
    const unsigned char* gates = weights.first + (expert * 2 * WIDTH + value + of.row) * HIDDEN + begin * GROUP + of.piece * 16;
    const float* scales = weights.first_scales + (expert * 2 * GROUPS_OF_WIDTH + value / GROUP) * GROUPS + begin + min(of.lane, OF_WARP - 1);
    const uint32_t gate_scales = __float_as_uint(*scales), up_scales = __float_as_uint(scales[GROUPS_OF_WIDTH * GROUPS]);  // of a group each
    uint4 upper[AHEAD], lower[AHEAD];
    const auto load = [&](int chunk) {
        upper[chunk % AHEAD] = load_once(gates + chunk * CHUNK);
        lower[chunk % AHEAD] = load_once(gates + WIDTH * HIDDEN + chunk * CHUNK);
    };
#pragma unroll
    for (int chunk = 0; chunk < AHEAD; ++chunk) load(chunk);
    float of_rows[OF_WARP];
#pragma unroll
    for (int group = 0; group < OF_WARP; ++group) {
        of_rows[group] = quantise_group(rows[group], POWERS && is_shared, shared + (begin + group) * GROUP * 2 + of.lane * 8);
    }
    sync_warp();
    float gate = 0, up = 0;
#pragma unroll
    for (int group = 0; group < OF_WARP; ++group) {
        float found[4] = {};
#pragma unroll
        for (int part = 0; part < OF_GROUP; ++part) {
            const int chunk = group * OF_GROUP + part;
            const Row x(of, shared + (begin * GROUP + chunk * CHUNK) * 2);
            add_products(found, upper[chunk % AHEAD], lower[chunk % AHEAD], x);
            if (chunk + AHEAD < CHUNKS) load(chunk + AHEAD);
        }
        gate += found[0] * (of_rows[group] * __uint_as_float(shuffle_from(gate_scales, group)));
        up += found[2] * (of_rows[group] * __uint_as_float(shuffle_from(up_scales, group)));
    }
    if (of.piece == 0) {
        const uint32_t at = shared + SUMS_AT + (of.warp * 2 * VALUES + of.row) * 4;
        store_shared(at, __float_as_uint(gate));
        store_shared(at + VALUES * 4, __float_as_uint(up));
    }
    meet<1, THREADS>();
    if (threadIdx.x >= VALUES) return;
    gate = up = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const uint32_t at = shared + SUMS_AT + (warp * 2 * VALUES + threadIdx.x) * 4;
        gate += load_shared_float(at);
        up += load_shared_float(at + VALUES * 4);
    }
    const float2 both = rounded(gate, up);
    a.inner[blockIdx.y * static_cast<long long>(WIDTH) + value + threadIdx.x] = static_cast<unsigned short>(pack_bf16(opened(both.x) * both.y, 0));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_SM) down(const __grid_constant__ Experts a) {
    SHARED_MEMORY(memory);
    const uint32_t shared = (shared_address(memory) + 15) & ~15u;
    const Place of;  // whose warp is one choice
    const int token = blockIdx.y, column = blockIdx.x * COLUMNS;
    const bool is_shared = WITH_SHARED && of.warp == CHOSEN;
    const long long expert = is_shared ? 0 : a.chosen[token * CHOSEN + of.warp];
    const bool there = expert >= 0;
    const Weights& weights = is_shared ? a.shared_one : a.chosen_ones;
    uint4 values[CHUNKS_OF_WIDTH][TILES][2];
    float of_weights[GROUPS_OF_WIDTH], share = 1;
    if (there) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS_OF_WIDTH; ++chunk) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const long long row = expert * HIDDEN + column + tile * 16 + half * 8 + of.row;
                    values[chunk][tile][half] = load_once(weights.second + row * WIDTH + chunk * CHUNK + of.piece * 16);
                }
            }
        }
#pragma unroll
        for (int group = 0; group < GROUPS_OF_WIDTH; ++group) {
            of_weights[group] = weights.second_scales[(expert * GROUPS + column / GROUP) * GROUPS_OF_WIDTH + group];
        }
        if (!is_shared) share = a.shares[token * CHOSEN + of.warp];
    }
    wait_for_inputs();
    let_others_begin();  // a norm or a sum of ranks, which waits before it reads
    float sums[TILES][4] = {};
    if (there) {
        const unsigned short* inner = a.inner + (token * EACH + of.warp) * static_cast<long long>(WIDTH) + of.lane * 4;
        const uint32_t rows = shared + of.warp * WIDTH * 2;
        uint2 own[GROUPS_OF_WIDTH];
#pragma unroll
        for (int group = 0; group < GROUPS_OF_WIDTH; ++group) own[group] = load_2(inner + group * GROUP);
        float of_rows[GROUPS_OF_WIDTH];
#pragma unroll
        for (int group = 0; group < GROUPS_OF_WIDTH; ++group) {
            of_rows[group] = quantise_group(own[group], POWERS && is_shared, rows + group * GROUP * 2 + of.lane * 8);
        }
        sync_warp();
#pragma unroll
        for (int group = 0; group < GROUPS_OF_WIDTH; ++group) {
            float found[TILES][4] = {};
#pragma unroll
            for (int part = 0; part < OF_GROUP; ++part) {
                const int chunk = group * OF_GROUP + part;
                const Row x(of, rows + chunk * CHUNK * 2);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) add_products(found[tile], values[chunk][tile][0], values[chunk][tile][1], x);
            }
            const float scale = of_rows[group] * of_weights[group];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                sums[tile][0] += found[tile][0] * scale;
                sums[tile][2] += found[tile][2] * scale;
            }
        }
    }
    if (of.piece == 0) {
        const uint32_t at = shared + GIVEN_AT + (of.warp * COLUMNS + of.row) * 4;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const float2 given = rounded(sums[tile][0] * share, sums[tile][2] * share);
            store_shared(at + tile * 16 * 4, __float_as_uint(given.x));
            store_shared(at + (tile * 16 + 8) * 4, __float_as_uint(given.y));
        }
    }
    meet<1, THREADS>();
    if (threadIdx.x >= COLUMNS) return;
    float sum = 0;
#pragma unroll
    for (int choice = 0; choice < CHOSEN; ++choice) sum += load_shared_float(shared + GIVEN_AT + (choice * COLUMNS + threadIdx.x) * 4);
    sum *= a.factor;
    if (WITH_SHARED) sum = rounded(sum, 0).x + load_shared_float(shared + GIVEN_AT + (CHOSEN * COLUMNS + threadIdx.x) * 4);
    a.out[token * static_cast<long long>(HIDDEN) + column + threadIdx.x] = static_cast<unsigned short>(pack_bf16(sum, 0));
}
