// Products of more than a few rows, up to 32, whose weights come before their rows do, for Hopper. tile_products.py compiles it at
// run time.
//
// A warpgroup has 64 columns of one weight, as tensor cores take them, and every TAKERS-th step of 128 bytes of the inner dimension;
// a block has warpgroups of one or two times 64 columns, which share their rows. Blocks of a cluster have the same columns, and a
// part of the inner dimension each. One thread brings the steps: of the weights as many as there is room for while the kernel ahead
// runs. Sums of 128 products are scaled and added in float32, and those of all warpgroups in their order, so that a sum depends on
// nothing but its inputs. Blocks of the third product have 32 columns, whose steps all warpgroups share, as their values take twice
// the bytes; tensor cores multiply what lies behind them, too, and nobody takes that.

#include "product_steps.cuh"

constexpr int COLUMNS = 64, GATES = 32;  // of a warpgroup
constexpr int WARPGROUPS = WIDE * TAKERS;
constexpr int MULTIPLYING = WARPGROUPS * 128, THREADS = MULTIPLYING + 32;
constexpr int GROUPS = INNER / GROUP, STEPS = GROUPS / PARTS;  // of a part, each with a GROUP; of the third product twice as many
static_assert(GROUPS % PARTS == 0 && STEPS <= 32, "a lane has a step's scale");
static_assert(STEPS % TAKERS == 0 && 2 * STEPS % WARPGROUPS == 0, "warpgroups have as many steps each");
static_assert(STAGES % WARPGROUPS == 0, "a stage is one warpgroup's, or it would not know of every turn");

// Shared memory: what is multiplied, STAGES steps of it at once; scales of rows; and barriers. Sums come where steps were.
constexpr uint32_t STAGE = (WIDE * COLUMNS + ROWS) * 128;
constexpr uint32_t SCALES_AT = STAGES * STAGE, STEPS_AT = SCALES_AT + STEPS * ROWS * 4;
constexpr int PITCH = COLUMNS + 4;  // of a row's sums, so that lanes that have two rows each write to 32 banks
constexpr uint32_t OF_WARPGROUP = ROWS * PITCH * 4;
static_assert(WARPGROUPS * OF_WARPGROUP <= STAGES * STAGE, "sums have room");
[[maybe_unused]] constexpr uint32_t SHARED_BYTES = STEPS_AT + Turns<STAGES>::BYTES + 1024;

using OfWeights = ProductSteps<STEPS, WIDE * COLUMNS, ROWS, STAGES, STAGE, STEPS_AT>;
using OfGates = ProductSteps<2 * STEPS, GATES, ROWS, STAGES, STAGE, STEPS_AT>;

// Of a thread that multiplies: its sums are of columns `upper` and 8 further, rows 8 i + `row` and the next one.
struct Lines {
    int warpgroup, lane, upper, row;

    __device__ __forceinline__ Lines()
        : warpgroup(warp_uniform(threadIdx.x / 128)), lane(threadIdx.x % 32), upper(threadIdx.x / 32 % 4 * 16 + lane / 4), row(lane % 4 * 2) {}
};

__device__ __forceinline__ void multiply_fp8_steps(
    const Products& a, const OfWeights& of, const Weight& weight, int column, int part, float (&sums)[ROWS / 2]
) {
    const Lines lines;
    const int own = lines.warpgroup % WIDE, first = column + own * COLUMNS;
    uint32_t of_weights = 0;  // the scale of the step of this lane's number
    if (lines.lane < STEPS && first < weight.columns) of_weights = __float_as_uint(weight.scales[first / GROUP * GROUPS + part * STEPS + lines.lane]);
    wait_for_inputs();
#pragma unroll 2
    for (int i = threadIdx.x; i < a.rows * STEPS; i += MULTIPLYING) {
        const int row = i / STEPS, step = i % STEPS;
        copy_4(of.shared + SCALES_AT + (step * ROWS + row) * 4, a.x_scales + row * a.row_stride + (part * STEPS + step) * a.group_stride, true);
    }
    wait_for_copies();
    meet<1, MULTIPLYING>();
#pragma unroll 1
    for (uint32_t i = 0, step = lines.warpgroup / WIDE; i < STEPS / TAKERS; ++i, step += TAKERS) {
        float found[ROWS / 2];
        of.multiply(step, of.weights(step, own * COLUMNS), of.inputs(step, 0), [&](uint64_t columns, uint64_t rows, int k) {
            multiply_fp8(found, columns, rows, k > 0);
        });
        const float of_weight = __uint_as_float(shuffle_from(of_weights, of.number(step)));
        const uint32_t scales_at = of.shared + SCALES_AT + (of.number(step) * ROWS + lines.row) * 4;
#pragma unroll
        for (int row = 0; row < ROWS / 8; ++row) {
            const uint2 scales = load_shared_2(scales_at + row * 32);
            const float even = __uint_as_float(scales.x) * of_weight, odd = __uint_as_float(scales.y) * of_weight;
            sums[4 * row] += found[4 * row] * even;
            sums[4 * row + 1] += found[4 * row + 1] * odd;
            sums[4 * row + 2] += found[4 * row + 2] * even;
            sums[4 * row + 3] += found[4 * row + 3] * odd;
        }
    }
}

__device__ __forceinline__ void multiply_gates_steps(const OfGates& of, float (&sums)[ROWS / 2]) {
#pragma unroll 1
    for (uint32_t i = 0, step = Lines().warpgroup; i < 2 * STEPS / WARPGROUPS; ++i, step += WARPGROUPS) {
        of.multiply(step, of.weights(step, 0), of.inputs(step, 0), [&](uint64_t columns, uint64_t rows, int) { score(sums, columns, rows, true); });
    }
}

// Adds up what `takers` warpgroups of each of the cluster's blocks have of columns from `column` on, `each` a warpgroup.
template <int each, int takers, bool float32>
__device__ __forceinline__ void write(const Products& a, const Weight& weight, int column, int part, uint32_t shared) {
    constexpr int OWN = WARPGROUPS / takers, PAIRS = each / 2 * OWN, ALL = PARTS * takers, TOGETHER = ALL < 8 ? 8 / ALL : 1;
    const auto place_of = [&](int i) { return i % PAIRS / (each / 2) * OF_WARPGROUP + (i / PAIRS * PITCH + i % (each / 2) * 2) * 4; };
#pragma unroll 1
    for (int begin = part * MULTIPLYING + threadIdx.x; begin < a.rows * PAIRS; begin += TOGETHER * PARTS * MULTIPLYING) {
        uint2 found[TOGETHER][ALL];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
            const int i = begin + j * PARTS * MULTIPLYING;
            const uint32_t at = shared + place_of(i < a.rows * PAIRS ? i : begin);
#pragma unroll
            for (int of = 0; of < ALL; ++of) {
                const uint32_t of_taker = at + of % takers * OWN * OF_WARPGROUP;
                found[j][of] = PARTS > 1 ? load_shared_2_of(of_taker, of / takers) : load_shared_2(of_taker);
            }
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
            const int i = begin + j * PARTS * MULTIPLYING, to = column + i % PAIRS * 2;
            if (i >= a.rows * PAIRS || to >= weight.columns) continue;
            float low = 0, high = 0;
#pragma unroll
            for (int of = 0; of < ALL; ++of) {
                low += __uint_as_float(found[j][of].x);
                high += __uint_as_float(found[j][of].y);
            }
            const long long place = i / PAIRS * static_cast<long long>(weight.columns) + to;
            if (float32) *reinterpret_cast<uint2*>(static_cast<float*>(weight.out) + place) = {__float_as_uint(low), __float_as_uint(high)};
            else *reinterpret_cast<uint32_t*>(static_cast<unsigned short*>(weight.out) + place) = pack_bf16(low, high);
        }
    }
}

extern "C" __global__ void CLUSTER_OF(PARTS) __launch_bounds__(THREADS, 1) tile_products(const __grid_constant__ Products a) {
    SHARED_MEMORY(memory);
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
    // The third product's blocks take longest, and come first.
    const int part = blockIdx.x % PARTS, block = blockIdx.x / PARTS, of_first = block - a.of_gates.blocks, of_second = of_first - a.of_first.blocks;
    const bool gates = of_first < 0, second = of_second >= 0;
    const int column = gates ? block * GATES : (second ? of_second : of_first) * WIDE * COLUMNS;
    const OfWeights of{shared, part * STEPS * GROUP, block % STEPS};
    const OfGates of_gates{shared, 2 * part * STEPS * GROUP, block % (2 * STEPS)};
    if (threadIdx.x == 0) of.turns().start(1, MULTIPLYING / 32 / (gates ? WARPGROUPS : TAKERS));
    meet_cluster();
    if (a.before_ours) let_others_begin();
    if (threadIdx.x >= MULTIPLYING) {
        if (threadIdx.x == MULTIPLYING) {
            const TensorMap& weights = gates ? a.gates : second ? a.second : a.first;
            if (gates) of_gates.bring_weights(weights, column), of_gates.bring_inputs(weights, column, a.hidden, 0);
            else of.bring_weights(weights, column), of.bring_inputs(weights, column, a.x, 0);
        }
    } else {
        const Lines lines;
        float sums[ROWS / 2];
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) sums[i] = 0;
        if (gates) multiply_gates_steps(of_gates, sums);
        else multiply_fp8_steps(a, of, second ? a.of_second : a.of_first, column, part, sums);
        meet<1, MULTIPLYING>();  // until then others multiply what lies where sums come
        const uint32_t at = shared + lines.warpgroup * OF_WARPGROUP + (lines.row * PITCH + lines.upper) * 4;
#pragma unroll
        for (int i = 0; i < ROWS / 8; ++i) {
            const uint32_t to = at + i * 8 * PITCH * 4;
            store_shared(to, __float_as_uint(sums[4 * i]));
            store_shared(to + PITCH * 4, __float_as_uint(sums[4 * i + 1]));
            store_shared(to + 32, __float_as_uint(sums[4 * i + 2]));
            store_shared(to + PITCH * 4 + 32, __float_as_uint(sums[4 * i + 3]));
        }
    }
    meet_cluster();
    if (threadIdx.x < MULTIPLYING) {
        if (gates) write<GATES, WARPGROUPS, !GATES_BF16>(a, a.of_gates, column, part, shared);
        else write<COLUMNS, TAKERS, false>(a, second ? a.of_second : a.of_first, column, part, shared);
    }
    if (PARTS > 1) meet_cluster();  // until then another block may read from this one
}
