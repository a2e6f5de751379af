// attend.h's work for 64 heads and steps of 64 tokens, with products of warp groups, which read both operands from shared memory:
// mma.sync would be bound by ldmatrix. Both of two warp groups have all heads: half the tokens in scores, half the latent
// in values. Shared memory holds the query, two steps of tokens and the weights as tiles of rows of 128 bytes, swizzled, so
// copies are of 16 bytes.

#pragma once

#include "cluster.h"
#ifndef EMULATE
#include "ptx_wgmma.h"
#endif

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
