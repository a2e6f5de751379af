// What stands between two halves of a layer, for Hopper: the residual's sum, its RMS norm, and the norm quantised. add_norm.py
// launches it. A block has a row, and a thread eight of its values.

#include "eights.cuh"

constexpr int PIECES = WIDTH / EIGHTS;  // of a row
constexpr int WARPS = (PIECES + 31) / 32, THREADS = WARPS * 32;
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

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) x += shuffle_xor(x, apart);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS) add_norm(const __grid_constant__ AddNorm a) {
    SHARED_MEMORY(memory);
    const uint32_t sums = shared_address(memory);
    if (a.before_ours) let_others_begin();
    const int piece = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool there = piece < PIECES;
    const long long row = blockIdx.x, at = row * PIECES + piece;
    const uint4 none = {0, 0, 0, 0};
    const Eight weight(there ? a.weight[piece] : none);  // nobody's to write
    wait_for_inputs();
    const uint4 packed = there ? a.x[at] : none, of_residual = there ? a.residual[at] : none;
    Eight x(packed);
    const Eight residual(of_residual);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
        x.x[i] += residual.x[i];
        squares = fmaf(x.x[i], x.x[i], squares);
    }
    if (there) a.residual[at] = x.packed();
    squares = sum_of_warp(squares);
    if (lane == 0) store_shared(sums + warp * 4, __float_as_uint(squares));
    meet<1, THREADS>();
    const float rstd = rsqrt_fast(sum_of_warp(lane < WARPS ? load_shared_float(sums + lane * 4) : 0) / WIDTH + a.eps);
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) x.x[i] = x.x[i] * rstd * weight.x[i];
    const uint4 normed = x.packed();
    if (there) a.x[at] = normed;
#if QUANTISED
    Eight rounded(normed);
    const Scale scale = scale_of<POWERS>(largest_of_group(rounded));
    rounded *= scale.inverse;
    if (!there) return;
    a.values[at] = rounded.in_fp8();
    if (piece % LANES_OF_GROUP == 0) a.scales[row * a.row_stride + piece / LANES_OF_GROUP * a.group_stride] = scale.scale;
#endif
}
