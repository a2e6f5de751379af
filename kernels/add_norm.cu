// What stands between two halves of a layer, for Hopper: the residual's sum, its RMS norm, and the norm quantised. add_norm.py
// launches it. A block has a row, and a thread EACH times eight of its values.

#include "eights.cuh"

constexpr int PIECES = WIDTH / EIGHTS;  // of a row
constexpr int WARPS = (PIECES + 32 * EACH - 1) / (32 * EACH), THREADS = WARPS * 32;
static_assert(WIDTH % GROUP == 0 && WARPS <= 32, "groups are whole, and a warp adds up what warps have");
constexpr uint32_t SHARED_BYTES = WARPS * 4;

struct AddNorm {
    uint4* x;             // bfloat16 [rows, WIDTH]; becomes the norm
    uint4* residual;      // bfloat16 [rows, WIDTH]; becomes the sum
    const uint4* weight;  // bfloat16 [WIDTH]
    uint2* values;        // e4m3 [rows, WIDTH]; written where QUANTISED
    float* scales;        // [rows, WIDTH / GROUP], strides below; likewise
    long long row_stride, group_stride;
    float eps;
    int before_ours;      // whether the next kernel waits for this one
};

extern "C" __global__ void __launch_bounds__(THREADS) add_norm(const __grid_constant__ AddNorm a) {
    SHARED_MEMORY(memory);
    const uint32_t sums = shared_address(memory);
    if (a.before_ours) let_others_begin();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long row = blockIdx.x;
    const auto piece = [](int i) { return static_cast<int>(threadIdx.x) + i * THREADS; };
    const auto load = [&](const uint4* from, int i) { return piece(i) < PIECES ? from[piece(i)] : uint4{0, 0, 0, 0}; };
    uint4 weight[EACH], of_x[EACH], of_residual[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) weight[i] = load(a.weight, i);  // nobody's to write
    wait_for_inputs();
    uint4 *const x_row = a.x + row * PIECES, *const residual_row = a.residual + row * PIECES;
#pragma unroll
    for (int i = 0; i < EACH; ++i) of_x[i] = load(x_row, i), of_residual[i] = load(residual_row, i);
    float sums_of[EACH][EIGHTS], squares = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        Eight x(of_x[i]);
        const Eight residual(of_residual[i]);
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j) {
            sums_of[i][j] = x.x[j] += residual.x[j];
            squares = fmaf(x.x[j], x.x[j], squares);
        }
        if (piece(i) < PIECES) residual_row[piece(i)] = x.packed();
    }
    squares = sum_of_lanes<true>(squares);
    if (lane == 0) store_shared(sums + warp * 4, __float_as_uint(squares));
    meet<1, THREADS>();
    const float rstd = rsqrt_fast(sum_of_lanes<true>(lane < WARPS ? load_shared_float(sums + lane * 4) : 0) / WIDTH + a.eps);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        Eight x(weight[i]);
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j) x.x[j] = sums_of[i][j] * rstd * x.x[j];
        const uint4 normed = x.packed();
        if (piece(i) < PIECES) x_row[piece(i)] = normed;
#if QUANTISED
        Eight rounded(normed);
        const Scale scale = scale_of<POWERS>(largest_of_group(rounded));
        rounded *= scale.inverse;
        if (piece(i) >= PIECES) continue;
        a.values[row * PIECES + piece(i)] = rounded.in_fp8();
        if (piece(i) % LANES_OF_GROUP == 0) a.scales[row * a.row_stride + piece(i) / LANES_OF_GROUP * a.group_stride] = scale.scale;
#endif
    }
}
