// The second launch: joins the parts of every row and head in a fixed order, weighted by their lse.

#pragma once

#include "tile.h"

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
