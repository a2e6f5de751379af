// How the blocks of a cluster join their results, through distributed shared memory.

#pragma once

#include "tile.h"

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
