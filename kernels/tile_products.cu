// Products of more than a few rows, up to 128, whose weights come before their rows do, for Hopper. tile_products.py compiles it at
// run time.
//
// A warpgroup has 64 columns of one weight, as tensor cores take them, and every TAKERS-th step of 128 bytes of the inner dimension;
// a block has warpgroups of one or two times 64 columns, which share their rows. Blocks of a cluster have the same columns, and a
// part of the inner dimension each. One thread brings the steps: of the weights as many as there is room for while the kernel ahead
// runs. Sums of 128 products are scaled and added in float32, and those of all warpgroups in their order, so that a sum depends on
// nothing but its inputs. Blocks of other columns begin at other steps: of the same rows at the same time, L2 gives less.
// Two products are of block-FP8 weights. A third is of bfloat16 weights and of rows before they were quantised; its blocks have 32
// columns, whose steps all warpgroups share, as their values take twice the bytes.

#include "tiles.cuh"
#include "turns.cuh"

constexpr int GROUP = 128;               // values that share a scale: 128 bytes
constexpr int COLUMNS = 64, GATES = 32;  // of a warpgroup
constexpr int WARPGROUPS = WIDE * TAKERS;
constexpr int MULTIPLYING = WARPGROUPS * 128, THREADS = MULTIPLYING + 32;
constexpr int GROUPS = INNER / GROUP, STEPS = GROUPS / PARTS;  // of a part, each with a GROUP; of the third product twice as many
static_assert(GROUPS % PARTS == 0 && STEPS <= 32, "a lane has a step's scale");
static_assert(STEPS % TAKERS == 0 && 2 * STEPS % WARPGROUPS == 0, "warpgroups have as many steps each");
static_assert(STAGES % WARPGROUPS == 0, "a stage is one warpgroup's, or it would not know of every turn");

// Shared memory: what is multiplied, STAGES steps of it at once; scales of rows; and barriers. Sums come where steps were.
constexpr uint32_t WEIGHTS = COLUMNS * 128, ROWS_AT = WIDE * WEIGHTS, STAGE = ROWS_AT + ROWS * 128;
constexpr uint32_t SCALES_AT = STAGES * STAGE, STEPS_AT = SCALES_AT + STEPS * ROWS * 4;
constexpr int PITCH = COLUMNS + 4;  // of a row's sums, so that lanes that have two rows each write to 32 banks
constexpr uint32_t OF_WARPGROUP = ROWS * PITCH * 4;
static_assert(WARPGROUPS * OF_WARPGROUP <= STAGES * STAGE, "sums have room");
[[maybe_unused]] constexpr uint32_t SHARED_BYTES = STEPS_AT + Turns<STAGES>::BYTES + 1024;

struct Weight {
    const float* scales;  // [columns / GROUP, GROUPS]; of the third product null
    void* out;            // bfloat16 [rows, columns]; of the third product float32, or bfloat16 where GATES_BF16
    int columns, blocks;
};

struct Products {
    TensorMap first, second;  // e4m3 [columns, INNER] in boxes of a block's columns
    TensorMap gates;          // bfloat16 [columns, INNER] in boxes of GATES
    TensorMap x;              // e4m3 [rows, INNER] in boxes of ROWS
    TensorMap hidden;         // bfloat16 [rows, INNER], likewise
    Weight of_first, of_second, of_gates;
    const float* x_scales;  // [rows, GROUPS], strides below
    long long row_stride, group_stride;
    int rows;
    int before_ours;  // whether the next kernel waits for this one
    int unused[6];
};

// Of a block: `count` steps of its part, which lie one behind the other from `begin` on in a row's bytes; it begins with `first`.
template <int count> struct Steps {
    uint32_t shared;
    int begin, first;

    __device__ __forceinline__ Turns<STAGES> turns() const { return {shared + STEPS_AT}; }
    __device__ __forceinline__ void start(int takers) const { turns().start(1, MULTIPLYING / 32 / takers); }
    // Which step of the part is the `step`th.
    __device__ __forceinline__ int number(uint32_t step) const {
        const int number = first + static_cast<int>(step);
        return number < count ? number : number - count;
    }
    __device__ __forceinline__ uint32_t at(uint32_t step) const { return shared + turns().place(step) * STAGE; }

    // Products of the `step`th, for a warpgroup whose columns lie at `columns` of a stage.
    template <class Multiply> __device__ __forceinline__ void multiply(uint32_t step, uint32_t columns, Multiply product) const {
        const uint64_t of_columns = tile_at(at(step) + columns, 16), of_rows = tile_at(at(step) + ROWS_AT, 16);
        turns().wait_for(step);
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i) product(of_columns + 2 * i, of_rows + 2 * i, i);
        products_commit();
        products_wait<0>();
        if (threadIdx.x % 32 == 0) arrive(turns().emptied(step));
    }

    // What one thread does: weights from `column` on, `box` columns, and rows.
    template <int box> __device__ __forceinline__ void bring(const TensorMap& weights, int column, const TensorMap& rows) const {
        const auto bring_weights = [&](uint32_t step) {
            arrive_before_bytes(turns().filled(step), (box + ROWS) * 128);
            copy_tile(at(step), weights, begin + number(step) * 128, column, turns().filled(step));
        };
        const auto bring_rows = [&](uint32_t step) {
            copy_tile(at(step) + ROWS_AT, rows, begin + number(step) * 128, 0, turns().filled(step));
        };
        constexpr uint32_t early = count < STAGES ? count : STAGES;
        for (uint32_t step = 0; step < early; ++step) bring_weights(step);
        wait_for_inputs();
        for (uint32_t step = 0; step < early; ++step) bring_rows(step);
        for (uint32_t step = early; step < count; ++step) {
            turns().wait_for_room(step);
            bring_weights(step);
            bring_rows(step);
        }
    }
};

// Of a thread that multiplies: its sums are of columns `upper` and 8 further, rows 8 i + `row` and the next one.
struct Lines {
    int warpgroup, lane, upper, row;

    __device__ __forceinline__ Lines()
        : warpgroup(warp_uniform(threadIdx.x / 128)), lane(threadIdx.x % 32), upper(threadIdx.x / 32 % 4 * 16 + lane / 4), row(lane % 4 * 2) {}
};

__device__ __forceinline__ void multiply_fp8_steps(
    const Products& a, const Steps<STEPS>& of, const Weight& weight, int column, int part, float (&sums)[ROWS / 2]
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
        of.multiply(step, own * WEIGHTS, [&](uint64_t columns, uint64_t rows, int k) { multiply_fp8(found, columns, rows, k > 0); });
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

__device__ __forceinline__ void multiply_gates_steps(const Steps<2 * STEPS>& of, float (&sums)[ROWS / 2]) {
#pragma unroll 1
    for (uint32_t i = 0, step = Lines().warpgroup; i < 2 * STEPS / WARPGROUPS; ++i, step += WARPGROUPS) {
        of.multiply(step, 0, [&](uint64_t columns, uint64_t rows, int) { score(sums, columns, rows, true); });
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
    const Steps<STEPS> of{shared, part * STEPS * GROUP, block % STEPS};
    const Steps<2 * STEPS> of_gates{shared, 2 * part * STEPS * GROUP, block % (2 * STEPS)};
    if (threadIdx.x == 0) of.start(gates ? WARPGROUPS : TAKERS);
    meet_cluster();
    if (a.before_ours) let_others_begin();
    if (threadIdx.x >= MULTIPLYING) {
        if (threadIdx.x == MULTIPLYING) {
            if (gates) of_gates.bring<GATES>(a.gates, column, a.hidden);
            else of.bring<WIDE * COLUMNS>(second ? a.second : a.first, column, a.x);
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
