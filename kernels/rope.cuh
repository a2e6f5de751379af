// RoPE of the part of MLA's query that is rotated, and of an indexer's: a head has LANES lanes of a warp.

#pragma once

#include "activations.cuh"

constexpr int ROPE = 64;
constexpr int MLA_LANES = LANES < ROPE / 8 ? LANES : ROPE / 8;  // of a head that has the values alone that are turned
constexpr int TURNED = ROPE / 8 / MLA_LANES;                    // eights of a lane that RoPE turns
constexpr int MLA_TOGETHER = 32 / MLA_LANES;                    // heads of a warp
static_assert(LANES == 4 || LANES == 16);

struct Turned {
    const unsigned char* from;   // bfloat16 [rows, heads, ROPE], `row_bytes` and `head_bytes` apart
    const float* cos_sin;        // [positions, ROPE], cosines first
    const long long* positions;  // [rows]
    uint4* out;                  // bfloat16 [rows, heads, ROPE], contiguous
    long long row_bytes, head_bytes;
    int heads;
};

__device__ __forceinline__ void unpack(uint32_t pair, float& low, float& high) {
    const float2 both = unpack_bf16(pair);
    low = both.x, high = both.y;
}

template <int eights, int lanes> __device__ __forceinline__ void load(const unsigned char* head, int lane, float (&x)[eights * 8]) {
#pragma unroll
    for (int i = 0; i < eights; ++i) {
        const uint4 eight = reinterpret_cast<const uint4*>(head)[i * lanes + lane];
        unpack(eight.x, x[8 * i], x[8 * i + 1]);
        unpack(eight.y, x[8 * i + 2], x[8 * i + 3]);
        unpack(eight.z, x[8 * i + 4], x[8 * i + 5]);
        unpack(eight.w, x[8 * i + 6], x[8 * i + 7]);
    }
}

__device__ __forceinline__ void load_4(const float* from, float* to) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    to[0] = __uint_as_float(four.x), to[1] = __uint_as_float(four.y);
    to[2] = __uint_as_float(four.z), to[3] = __uint_as_float(four.w);
}

// RoPE of a lane's values, in halves or neighbours. With four lanes both of a pair are its own: of two eights, or in one. With more
// it has one eight, whose partners in halves another lane has.
template <bool halves> struct Angles {
    static constexpr bool APART = halves && TURNED == 1;
    static constexpr int OF_EIGHT = halves ? 8 : 4, NUMBER = halves ? 8 : 4 * TURNED;
    float cos[NUMBER], sin[NUMBER];

    __device__ __forceinline__ Angles(const float* cos_sin, long long position, int lane) {
        const float* const cosines = cos_sin + position * ROPE + OF_EIGHT * (APART ? lane % 4 : lane % MLA_LANES);
#pragma unroll
        for (int i = 0; i < NUMBER / 4; ++i) {
            const int further = halves ? 4 * i : i * OF_EIGHT * MLA_LANES;
            load_4(cosines + further, cos + 4 * i);
            load_4(cosines + further + ROPE / 2, sin + 4 * i);
        }
    }

    // Rounded, unless SGLang's kernel goes on with it.
    template <bool round, int values> __device__ __forceinline__ void turn(int lane, float (&x)[values]) const {
        if (APART) {
            float others[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) others[i] = shuffle_xor(x[i], 4);
            if (lane >= MLA_LANES) return;
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = fmaf(cos[i], x[i], (lane < 4 ? -sin[i] : sin[i]) * others[i]);
        } else {
            if (lane >= MLA_LANES) return;
#pragma unroll
            for (int i = 0; i < NUMBER; ++i) {
                float& low = x[halves ? i : 2 * i];
                float& high = x[halves ? 8 + i : 2 * i + 1];
                const float first = fmaf(cos[i], low, -sin[i] * high);
                high = round ? fmaf(cos[i], high, sin[i] * low) : fmaf(sin[i], low, cos[i] * high);
                low = first;
            }
        }
#pragma unroll
        for (int i = 0; i < 8 * TURNED; i += 2) {
            if (round) unpack(pack_bf16(x[i], x[i + 1]), x[i], x[i + 1]);
        }
    }
};

// Some heads of a row by a warp, from the `first` on; lanes that have none do the last one once more.
__device__ __forceinline__ void turn_heads(const Turned& of, int row, int first, int in_warp) {
    const int head = min(first + in_warp / MLA_LANES, of.heads - 1), lane = in_warp % MLA_LANES;
    const long long position = of.positions[row];
    float x[TURNED * 8];
    load<TURNED, MLA_LANES>(of.from + row * of.row_bytes + head * of.head_bytes, lane, x);
    const Angles<NEOX> angles(of.cos_sin, position, lane);
    angles.template turn<true>(lane, x);
    uint4* const out = of.out + (static_cast<long long>(row) * of.heads + head) * (ROPE / 8);
#pragma unroll
    for (int i = 0; i < TURNED; ++i) {
        const float* const eight = x + 8 * i;
        out[i * MLA_LANES + lane] = {
            pack_bf16(eight[0], eight[1]), pack_bf16(eight[2], eight[3]), pack_bf16(eight[4], eight[5]), pack_bf16(eight[6], eight[7])
        };
    }
}
