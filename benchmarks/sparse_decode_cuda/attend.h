// One stretch of one row's slots for one block of 16 or 32 heads, with products of warps.
//
// All warps do each phase of a step together:
//   scores   the warps share the tokens and the 576 values of the dot product; sums over the latter meet in shared memory.
//            The query stays in registers, since it is read in every step.
//   softmax  a fixed group of threads has each head, and holds its running maximum and sum.
//   values   every warp has all heads and a slice of the latent.

#pragma once

#include "cluster.h"
#include "copies.h"

// blockIdx: stretch, block of heads, row. A row has parts * CLUSTER stretches.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attend(const __grid_constant__ Attend a) {
    SHARED_MEMORY(memory);
    const float NONE = __int_as_float(0xff800000);
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const uint32_t base = shared_address(memory);
    const uint32_t barriers = base + AT_BARRIERS, query_barrier = barriers + 8 * STAGES;
    float* scores = reinterpret_cast<float*>(memory + AT_SCORES);  // [WARPS_D, HEADS, SCORE_PITCH]
    float* fades = reinterpret_cast<float*>(memory + AT_FADES);    // [HEADS], of the sums so far
    float* inverses = reinterpret_cast<float*>(memory + AT_INVERSES);
    float* lses = reinterpret_cast<float*>(memory + AT_LSES);
    int* there = reinterpret_cast<int*>(memory + AT_THERE);  // [STAGES, TOKENS], whether a token is

    if (tid <= STAGES) {
        barrier_init(barriers + 8 * tid, BULK || tid == STAGES ? WARPS : THREADS);
        fence_barrier_init();
    }
    __syncthreads();
    launch_dependents();
    wait_for_inputs();

    const int row = blockIdx.z, first_head = blockIdx.y * HEADS, begin = blockIdx.x * a.chunk;
    const int* slots = a.slots + row * a.slots_stride;
    const int latest = min(begin + a.chunk, a.topk);
    // At first a lane asks for a token of the stage that its place in its warp says, later the first lanes for one each.
    const int token = warp * ASKED + lane % ASKED, lane_stage = lane / ASKED;
    const int first_position = begin + lane_stage * TOKENS + token;
    const int first_slot = lane_stage < STAGES && first_position < latest ? slots[first_position] : -1;
    const int length = a.lens[row];

    ask_query(a, memory, base, query_barrier, row, first_head, warp, lane);  // comes while the slots do
    const int end = min(latest, length);
    const int steps = end > begin ? (end - begin + TOKENS - 1) / TOKENS : 0;
    const Copies copies{a, memory, base, barriers, slots, warp, lane, token, begin, end, steps};

    const int own_slot = first_position < end ? first_slot : -1;
    if constexpr (BULK) {
        copies.ask(lane_stage < min(STAGES, steps), lane_stage, own_slot);
    } else {
        for (int i = 0; i < min(STAGES, steps); ++i) copies.ask_in_pieces(i, own_slot, i * ASKED);
    }
    int following = copies.look_up(STAGES);

    const int warp_t = warp % WARPS_T, warp_d = warp / WARPS_T;
    const int group = lane / 4, pair = 2 * (lane % 4);  // of a fragment: its row, or the column of a second operand; two values
    // Addresses of the eight values that this lane hands to ldmatrix: as a first operand (16 rows, two halves of 16 columns
    // one behind the other), and as a second (two times 8 rows, the halves of the first before those of the second).
    const int first_row = lane % 16, first_half = lane / 16 * 16;
    const int second_row = lane / 16 * 8 + lane % 8, second_half = lane / 8 % 2 * 16;
    const uint32_t query_address = base + AT_QUERY + first_row * PITCH + first_half + warp_d * D_STEPS * 32;
    const uint32_t key_address =
        base + (warp_t * T_TILES * 8 + second_row) * PITCH + second_half + warp_d * D_STEPS * 32;
    // Transposed, rows are tokens: two times 8 tokens of 8 latents before those of the next 8 latents, as `first` has them.
    const uint32_t value_address = base + first_row * PITCH + warp * L_TILES * 16 + first_half;
    const uint32_t weight_address = base + AT_WEIGHTS + first_row * WEIGHT_PITCH + first_half;

    barrier_wait(query_barrier, 0);
    uint32_t query[H_TILES][D_STEPS][4];
#pragma unroll
    for (int h = 0; h < H_TILES; ++h) {
#pragma unroll
        for (int d = 0; d < D_STEPS; ++d) ldmatrix(query[h][d], query_address + h * 16 * PITCH + d * 32);
    }
    __syncthreads();  // scores take its place

    float sums[HEADS / 16][L_TILES][4] = {};
    const int my_head = tid / HEAD_THREADS, my_column = tid % HEAD_THREADS * COLUMNS;  // in softmax
    float best = NONE, total = 0.0f;  // of this thread's head; the sum of its columns alone

    int stage = 0, before = STAGES - 1;  // of this step and of the one before
    uint32_t parity = 0;
    for (int step = 0; step < steps; ++step) {
        barrier_wait(barriers + 8 * stage, parity);
        const uint32_t stage_offset = stage * TOKENS * PITCH;
        float products[CHAINS][H_TILES][T_TILES][4] = {};
#pragma unroll
        for (int d = 0; d < D_STEPS; ++d) {
            uint32_t keys[T_TILES / 2][4];
#pragma unroll
            for (int t = 0; t < T_TILES / 2; ++t) {
                ldmatrix(keys[t], key_address + stage_offset + t * 16 * PITCH + d * 32);
            }
#pragma unroll
            for (int h = 0; h < H_TILES; ++h) {
#pragma unroll
                for (int t = 0; t < T_TILES; ++t) {
                    mma(products[d % CHAINS][h][t], query[h][d], keys[t / 2][t % 2 * 2], keys[t / 2][t % 2 * 2 + 1]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < H_TILES; ++h) {
#pragma unroll
            for (int t = 0; t < T_TILES; ++t) {
                float* at = scores + (warp_d * HEADS + h * 16 + group) * SCORE_PITCH +
                            (warp_t * T_TILES + t) * 8 + pair;
                const float(&p)[4] = products[0][h][t];
                const float(&q)[4] = products[CHAINS - 1][h][t];
                const bool two = CHAINS == 2;
                *reinterpret_cast<float2*>(at) = make_float2(two ? p[0] + q[0] : p[0], two ? p[1] + q[1] : p[1]);
                *reinterpret_cast<float2*>(at + 8 * SCORE_PITCH) =
                    make_float2(two ? p[2] + q[2] : p[2], two ? p[3] + q[3] : p[3]);
            }
        }
        __syncthreads();  // and every warp is done with the values of the step before

        if (step > 0 && step - 1 + STAGES < steps) {
            if constexpr (BULK) {
                copies.ask(lane < ASKED, before, following);
            } else {
                copies.ask_in_pieces(before, following, 0);
            }
            following = copies.look_up(step + STAGES);
        }

        {
            float x[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; c += 2) {
                x[c] = x[c + 1] = 0.0f;
#pragma unroll
                for (int d = 0; d < WARPS_D; ++d) {
                    const float2 two =
                        *reinterpret_cast<const float2*>(scores + (d * HEADS + my_head) * SCORE_PITCH + my_column + c);
                    x[c] += two.x;
                    x[c + 1] += two.y;
                }
            }
            float higher = best;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                x[c] = there[stage * TOKENS + my_column + c] ? x[c] * a.scale : NONE;
                higher = fmaxf(higher, x[c]);
            }
#pragma unroll
            for (int lanes = 1; lanes < HEAD_THREADS; lanes *= 2) higher = fmaxf(higher, shuffle_xor(higher, lanes));
            const float finite = higher == NONE ? 0.0f : higher;
            const float fade = exp2_fast(best - finite);
            total *= fade;
            uint32_t* weights =
                reinterpret_cast<uint32_t*>(memory + AT_WEIGHTS + my_head * WEIGHT_PITCH + my_column * 2);
#pragma unroll
            for (int c = 0; c < COLUMNS; c += 2) {
                const float one = exp2_fast(x[c] - finite), two = exp2_fast(x[c + 1] - finite);
                total += one + two;
                weights[c / 2] = pack_bf16(one, two);
            }
            if (tid % HEAD_THREADS == 0) fades[my_head] = fade;
            best = higher;
        }
        __syncthreads();

#pragma unroll
        for (int h = 0; h < HEADS / 16; ++h) {
            const float low = fades[h * 16 + group], high = fades[h * 16 + group + 8];
#pragma unroll
            for (int l = 0; l < L_TILES; ++l) {
                sums[h][l][0] *= low;
                sums[h][l][1] *= low;
                sums[h][l][2] *= high;
                sums[h][l][3] *= high;
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS / 16; ++t) {
            uint32_t weights[HEADS / 16][4];
#pragma unroll
            for (int h = 0; h < HEADS / 16; ++h) ldmatrix(weights[h], weight_address + h * 16 * WEIGHT_PITCH + t * 32);
#pragma unroll
            for (int l = 0; l < L_TILES / 2; ++l) {
                uint32_t values[4];
                ldmatrix_transposed(values, value_address + stage_offset + t * 16 * PITCH + l * 32);
#pragma unroll
                for (int h = 0; h < HEADS / 16; ++h) {
                    mma(sums[h][2 * l], weights[h], values[0], values[1]);
                    mma(sums[h][2 * l + 1], weights[h], values[2], values[3]);
                }
            }
        }
        before = stage;
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }

#pragma unroll
    for (int lanes = 1; lanes < HEAD_THREADS; lanes *= 2) total += shuffle_xor(total, lanes);
    if (tid % HEAD_THREADS == 0) {
        inverses[my_head] = total > 0.0f ? 1.0f / total : 0.0f;
        lses[my_head] = total > 0.0f ? best + log2_fast(total) : NONE;
    }
    __syncthreads();  // and every warp is done with the tokens, whose place the cluster takes

    const int part = blockIdx.x / CLUSTER;
    const long long first_of_row = (static_cast<long long>(row) * a.parts + part) * a.heads + first_head;
    const bool alone = a.parts == 1;
    if constexpr (CLUSTER == 1) {
        if (!alone && tid < HEADS && first_head + tid < a.heads) a.lse[first_of_row + tid] = lses[tid];
        if (!alone && steps == 0) return;
    }
    float* joined = reinterpret_cast<float*>(memory);  // [HEADS, SUM_PITCH]
#pragma unroll
    for (int h = 0; h < HEADS / 16; ++h) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = h * 16 + half * 8 + group;
            const float inverse = inverses[head];
            const bool real = first_head + head < a.heads;
#pragma unroll
            for (int l = 0; l < L_TILES; ++l) {
                const int latent = (warp * L_TILES + l) * 8 + pair;
                const float one = sums[h][l][2 * half] * inverse, two = sums[h][l][2 * half + 1] * inverse;
                if constexpr (CLUSTER > 1) {
                    *reinterpret_cast<float2*>(joined + head * SUM_PITCH + latent) = make_float2(one, two);
                } else if (real) {
                    const long long at = (first_of_row + head) * LATENT + latent;
                    if (alone) {
                        *reinterpret_cast<uint32_t*>(a.out + at) = pack_bf16(one, two);
                    } else {
                        *reinterpret_cast<float2*>(a.partial + at) = make_float2(one, two);
                    }
                }
            }
        }
    }
    if constexpr (CLUSTER > 1) {
        join_cluster(a, base, base + AT_LSES, first_head, first_of_row);
    }
}
