// Products of 33 to 128 rows, whose weights come before their rows do, for Hopper. tile_products.py compiles it at run time.
//
// A block has some columns of one weight and all rows. A warpgroup has 64 rows, as tensor cores take them; of at most 64 rows two
// warpgroups take turns at the steps of 128 bytes of the inner dimension. So a thread has two rows, and their scales in registers.
// Blocks of a cluster have the same columns, and a part of the inner dimension each: they give each other what they have of the
// rows that another one adds up. One thread brings the steps: of the weights as many as there is room for while the kernel ahead
// runs. Sums of 128 products are scaled and added in float32, and those of all parts and warpgroups in their order, so that a sum
// depends on nothing but its inputs. Blocks of the third product have 64 columns and 64 rows, whose steps both warpgroups share, as
// their values take twice the bytes.

#include "product_steps.cuh"

constexpr int LINES = 64, GATES = 64;  // rows of a warpgroup, and columns of a block of the third product
constexpr int TAKERS = 2 * LINES / ROWS;
constexpr int MULTIPLYING = 256, THREADS = MULTIPLYING + 32;
constexpr int GROUPS = INNER / GROUP, STEPS = GROUPS / PARTS;  // of a part, each with a GROUP; of the third product twice as many
constexpr bool ONE_SCALE = GROUP % COLUMNS == 0;               // of a block's columns; else two
static_assert(ROWS == LINES || ROWS == 2 * LINES, "one warpgroup's rows, or those of two");
static_assert(GROUPS % PARTS == 0 && STEPS % TAKERS == 0, "blocks and warpgroups have as many steps each");
static_assert(STAGES % 2 == 0, "a stage is the same warpgroups', or they would not know of every turn");

// Shared memory: what is multiplied, STAGES steps of it at once; sums, in a cluster those that others have of rows that this block
// adds up, whose own come where steps were; barriers.
constexpr uint32_t STAGE = (COLUMNS + ROWS) * 128;
static_assert(COLUMNS >= GATES, "the third product's steps and sums have room");
constexpr int APART = 8;  // values between rows of sums, so that lanes that have a row each write to other banks
constexpr uint32_t SUMS_AT = STAGES * STAGE, SUMS = 2 * LINES * (COLUMNS + APART) * 4;
constexpr uint32_t STEPS_AT = SUMS_AT + SUMS, RECEIVED_AT = STEPS_AT + Turns<STAGES>::BYTES;
static_assert(PARTS == 1 || SUMS <= STAGES * STAGE, "own sums have room");
[[maybe_unused]] constexpr uint32_t SHARED_BYTES = RECEIVED_AT + 8 + 1024;

using OfWeights = ProductSteps<STEPS, COLUMNS, ROWS, STAGES, STAGE, STEPS_AT>;
using OfGates = ProductSteps<2 * STEPS, GATES, LINES, STAGES, STAGE, STEPS_AT>;

// Of a thread that multiplies: its sums are of rows `line` and 8 further of its warpgroup's, columns 8 i + `column` and the next
// one. Rows of its warp begin with `of_warp`.
struct Lines {
    int warpgroup, lane, of_warp, line, column;

    __device__ __forceinline__ Lines()
        : warpgroup(warp_uniform(threadIdx.x / 128)), lane(threadIdx.x % 32), of_warp(warp_uniform(threadIdx.x / 32) % 4 * 16),
          line(of_warp + lane / 4), column(lane % 4 * 2) {}
};

// Scales of two steps of a warp's rows: a lane has one row of 16, and one of the steps.
struct Scales {
    float row, low, high;  // of the weight, of columns before and behind the first whose number is a multiple of GROUP
};

// Of a warpgroup: its rows begin with `first`, and its steps, TAKERS apart, with `taker`.
struct WeightSteps {
    const Products& a;
    const OfWeights& of;
    const Weight& weight;
    int column, part;
    Lines lines;
    int first, taker;

    __device__ __forceinline__ WeightSteps(const Products& a, const OfWeights& of, const Weight& weight, int column, int part)
        : a(a), of(of), weight(weight), column(column), part(part), first(lines.warpgroup / TAKERS * LINES),
          taker(lines.warpgroup % TAKERS) {}

    // Those of a step and this warpgroup's next one.
    __device__ __forceinline__ Scales load_scales(uint32_t step) const {
        const int row = first + lines.of_warp + lines.lane % 16;
        step += lines.lane / 16 * TAKERS;
        if (step >= STEPS || row >= a.rows) return {};
        const int group = part * STEPS + of.number(step), low = column / GROUP, high = min(low + 1, (weight.columns - 1) / GROUP);
        const float of_row = a.x_scales[row * a.row_stride + group * a.group_stride];
        return {of_row, weight.scales[low * GROUPS + group], ONE_SCALE ? 0 : weight.scales[high * GROUPS + group]};
    }

    // `second` of the two steps whose scales these are.
    __device__ __forceinline__ void add(
        float (&sums)[COLUMNS / 2], const float (&found)[COLUMNS / 2], const Scales& scales, int second
    ) const {
        const auto of_lane = [&](float scale, int further) {
            return __uint_as_float(shuffle_from(__float_as_uint(scale), second * 16 + lines.lane / 4 + further));
        };
        const float low = scales.row * scales.low, high = scales.row * scales.high;
        const float upper_low = of_lane(low, 0), lower_low = of_lane(low, 8);
        const float upper_high = ONE_SCALE ? 0 : of_lane(high, 0), lower_high = ONE_SCALE ? 0 : of_lane(high, 8);
        const int lows = (GROUP - column % GROUP) / 8;  // times eight columns with the first scale
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; ++i) {
            const bool is_low = ONE_SCALE || i < lows;
            const float upper = is_low ? upper_low : upper_high, lower = is_low ? lower_low : lower_high;
            sums[4 * i] += found[4 * i] * upper;
            sums[4 * i + 1] += found[4 * i + 1] * upper;
            sums[4 * i + 2] += found[4 * i + 2] * lower;
            sums[4 * i + 3] += found[4 * i + 3] * lower;
        }
    }

    // Scales of the next two steps come meanwhile.
    __device__ __forceinline__ void multiply(float (&sums)[COLUMNS / 2]) const {
        wait_for_inputs();
        Scales next = load_scales(taker);
#pragma unroll 1
        for (uint32_t begin = taker; begin < STEPS; begin += 2 * TAKERS) {
            const Scales scales = next;
            next = load_scales(begin + 2 * TAKERS);
#pragma unroll
            for (int second = 0; second < 2; ++second) {
                const uint32_t step = begin + second * TAKERS;
                if (STEPS / TAKERS % 2 && step >= STEPS) break;
                float found[COLUMNS / 2];
                of.multiply(step, of.inputs(step, first), of.weights(step, 0), [&](uint64_t rows, uint64_t columns, int k) {
                    multiply_fp8(found, rows, columns, k > 0);
                });
                add(sums, found, scales, second);
            }
        }
    }
};

__device__ __forceinline__ void multiply_gates(const OfGates& of, float (&sums)[GATES / 2]) {
#pragma unroll 1
    for (uint32_t step = Lines().warpgroup; step < 2 * STEPS; step += 2) {
        of.multiply(step, of.inputs(step, 0), of.weights(step, 0), [&](uint64_t rows, uint64_t columns, int) {
            score(sums, rows, columns, true);
        });
    }
}

// Sums of `columns` and `rows` of a block, of which `takers` warpgroups have a part each. Every block of a cluster adds up as many
// rows, in turns of 8; what another block has of these lies together.
template <int columns, int rows, int takers> struct Sums {
    static constexpr uint32_t OF_ROW = (columns + APART) * 4, OF_TAKER = rows / PARTS * OF_ROW, OF_BLOCK = takers * OF_TAKER;
    uint32_t shared;

    // Of a row that the block of number row / 8 % PARTS adds up, relative to what lies together.
    __device__ __forceinline__ static uint32_t place(int taker, int row) {
        return taker * OF_TAKER + (row / (8 * PARTS) * 8 + row % 8) * OF_ROW;
    }
    // What this block has of rows that one adds up: in a cluster where steps were, as others write to what lies behind.
    __device__ __forceinline__ uint32_t own(int adds) const { return shared + (PARTS == 1 ? SUMS_AT : 0) + adds * OF_BLOCK; }
    __device__ __forceinline__ uint32_t received(int from) const { return shared + SUMS_AT + from * OF_BLOCK; }

    // What this thread has; its warpgroup's rows begin with `first`. Then this block has what others have of its share.
    __device__ __forceinline__ void give(const float (&sums)[columns / 2], int taker, int first, int part) const {
        const Lines lines;
        if (PARTS > 1) meet<1, MULTIPLYING>();  // until then others multiply what lies there
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            const int row = first + lines.line + lower * 8;
            const uint32_t at = own(row / 8 % PARTS) + place(taker, row) + lines.column * 4;
#pragma unroll
            for (int i = 0; i < columns / 8; ++i) {
                const float* const two = sums + 4 * i + 2 * lower;
                store_shared_2(at + i * 32, {__float_as_uint(two[0]), __float_as_uint(two[1])});
            }
        }
        if (PARTS > 1) fence_before_products();  // copies of shared memory are ordered as they are
        meet<1, MULTIPLYING>();
        if (PARTS == 1) return;
        if (threadIdx.x < PARTS && static_cast<int>(threadIdx.x) != part) {
            copy_shared_to(threadIdx.x, received(part), own(threadIdx.x), OF_BLOCK, shared + RECEIVED_AT);
        }
        wait_for_turn(shared + RECEIVED_AT, 0);
    }

    // Adds up this block's share of rows, and writes it: rows from `first` on, columns from `column` on.
    template <bool float32>
    __device__ __forceinline__ void write(const Weight& weight, int part, int column, int first, int rows_there) const {
        constexpr int FOURS = columns / 4, OWN = rows / PARTS * FOURS, SOURCES = PARTS * takers;
        constexpr int TOGETHER = SOURCES < 4 ? 4 / SOURCES : 1;
#pragma unroll 1
        for (int begin = threadIdx.x; begin < OWN; begin += TOGETHER * MULTIPLYING) {
            uint4 found[TOGETHER][SOURCES];
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j) {
                const int i = begin + j * MULTIPLYING, at = (i < OWN ? i : begin) / FOURS * OF_ROW + i % FOURS * 16;
#pragma unroll
                for (int source = 0; source < SOURCES; ++source) {
                    const int from = source / takers;
                    found[j][source] = load_shared_4((from == part ? own(part) : received(from)) + source % takers * OF_TAKER + at);
                }
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j) {
                const int i = begin + j * MULTIPLYING, line = i / FOURS, to = column + i % FOURS * 4;
                const int row = (line / 8 * PARTS + part) * 8 + line % 8;
                if (i >= OWN || row >= rows_there || to >= weight.columns) continue;
                float sums[4] = {};
#pragma unroll
                for (int source = 0; source < SOURCES; ++source) {
                    sums[0] += __uint_as_float(found[j][source].x);
                    sums[1] += __uint_as_float(found[j][source].y);
                    sums[2] += __uint_as_float(found[j][source].z);
                    sums[3] += __uint_as_float(found[j][source].w);
                }
                const long long place = (first + row) * static_cast<long long>(weight.columns) + to;
                if (float32) {
                    *reinterpret_cast<uint4*>(static_cast<float*>(weight.out) + place) = {
                        __float_as_uint(sums[0]), __float_as_uint(sums[1]), __float_as_uint(sums[2]), __float_as_uint(sums[3])};
                } else {
                    *reinterpret_cast<uint2*>(static_cast<unsigned short*>(weight.out) + place) = {
                        pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3])};
                }
            }
        }
    }
};
using SumsOfWeights = Sums<COLUMNS, ROWS, TAKERS>;
using SumsOfGates = Sums<GATES, LINES, 2>;
static_assert(PARTS * SumsOfWeights::OF_BLOCK <= SUMS && PARTS * SumsOfGates::OF_BLOCK <= SUMS, "sums have room");

extern "C" __global__ void CLUSTER_OF(PARTS) __launch_bounds__(THREADS, 1) row_products(const __grid_constant__ Products a) {
    SHARED_MEMORY(memory);
    const uint32_t shared = (shared_address(memory) + 1023) & ~1023u;
    const int part = blockIdx.x % PARTS, block = blockIdx.x / PARTS;
    const int of_first = block - a.of_gates.blocks, of_second = of_first - a.of_first.blocks;
    const bool gates = of_first < 0, second = of_second >= 0;
    const OfWeights of{shared, part * STEPS * GROUP, block % STEPS};
    const OfGates of_gates{shared, 2 * part * STEPS * GROUP, block % (2 * STEPS)};
    const int column = gates ? block / (ROWS / LINES) * GATES : (second ? of_second : of_first) * COLUMNS;
    const int first = gates ? block % (ROWS / LINES) * LINES : 0, rows = a.rows - first;
    const Weight& weight = gates ? a.of_gates : second ? a.of_second : a.of_first;
    const TensorMap& weights = gates ? a.gates : second ? a.second : a.first;
    if (threadIdx.x == MULTIPLYING) {
        of.turns().start(1, gates ? 4 : 8 / TAKERS);
        start_barrier(shared + RECEIVED_AT, 1);
        const uint32_t others_give = (PARTS - 1) * (gates ? SumsOfGates::OF_BLOCK : SumsOfWeights::OF_BLOCK);
        if (PARTS > 1) arrive_before_bytes(shared + RECEIVED_AT, others_give);
        fence_before_products();  // copies come to barriers, too
    }
    // Whoever brings asks between: the others would wait for what comes.
    arrive_in_cluster();
    if (threadIdx.x == MULTIPLYING) {
        if (gates) of_gates.bring_weights(weights, column);
        else of.bring_weights(weights, column);
    }
    wait_for_cluster();
    if (a.before_ours) let_others_begin();
    if (threadIdx.x >= MULTIPLYING) {
        if (threadIdx.x == MULTIPLYING) {
            if (gates) of_gates.bring_inputs(weights, column, a.hidden, first);
            else of.bring_inputs(weights, column, a.x, 0);
        }
    } else if (gates) {
        float sums[GATES / 2];
#pragma unroll
        for (int i = 0; i < GATES / 2; ++i) sums[i] = 0;
        multiply_gates(of_gates, sums);
        const SumsOfGates all{shared};
        all.give(sums, Lines().warpgroup, 0, part);
        all.write<!GATES_BF16>(weight, part, column, first, rows);
    } else {
        const WeightSteps steps(a, of, weight, column, part);
        float sums[COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0;
        steps.multiply(sums);
        const SumsOfWeights all{shared};
        all.give(sums, steps.taker, steps.first, part);
        all.write<false>(weight, part, column, 0, rows);
    }
    if (PARTS > 1) meet_cluster();  // until then others have copies of what this block has
}
