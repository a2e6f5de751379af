// How the tokens of attend.h come into shared memory, and where everything lies there.

#pragma once

#include "tile.h"

constexpr int D_STEPS = DIM / 16 / WARPS_D;            // of sixteen values of the dot product, of a warp in scores
constexpr int H_TILES = HEADS / 16;                    // of sixteen heads, of every warp
constexpr int T_TILES = TOKENS / 8 / WARPS_T;          // of eight tokens, of a warp in scores
constexpr int CHAINS = H_TILES * T_TILES < 4 ? 2 : 1;  // sums beside each other, where few tiles would wait for each other
constexpr int L_TILES = LATENT / 8 / WARPS;            // of eight latents, of a warp in values
constexpr int ASKED = TOKENS / WARPS;                  // tokens of a step that a warp asks for
constexpr int HEADS_ASKED = HEADS / WARPS;             // heads of the query, likewise
constexpr int HEAD_THREADS = THREADS / HEADS;          // of a head in softmax
constexpr int COLUMNS = TOKENS / HEAD_THREADS;         // tokens of such a thread
constexpr int SCORE_PITCH = TOKENS + 8;                // floats; no bank conflict
constexpr int WEIGHT_PITCH = TOKENS * 2 + 16;          // bytes

static_assert(DIM / 16 % WARPS_D == 0 && T_TILES % 2 == 0 && L_TILES % 2 == 0, "warps do not divide the tile");
static_assert(HEAD_THREADS <= 32 && COLUMNS >= 2 && COLUMNS % 2 == 0, "no such tile: softmax");
static_assert(ASKED >= 1 && ASKED < 32 && STAGES * ASKED <= 32 && HEADS_ASKED >= 1 && HEADS_ASKED <= 16,
              "no such tile: copies");

// Shared memory, in bytes. The query goes on to registers and leaves its place to the scores.
__host__ __device__ constexpr int aligned(int bytes) { return (bytes + 127) / 128 * 128; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int SCORE_BYTES = aligned(WARPS_D * HEADS * SCORE_PITCH * 4), QUERY_BYTES = aligned(HEADS * PITCH);
constexpr int AT_QUERY = aligned(STAGES * TOKENS * PITCH);
constexpr int AT_SCORES = AT_QUERY;
constexpr int AT_WEIGHTS = AT_SCORES + larger(SCORE_BYTES, QUERY_BYTES);
constexpr int AT_FADES = AT_WEIGHTS + aligned(HEADS * WEIGHT_PITCH);
constexpr int AT_INVERSES = AT_FADES + HEADS * 4;
constexpr int AT_LSES = AT_INVERSES + HEADS * 4;
constexpr int AT_THERE = AT_LSES + HEADS * 4;
constexpr int AT_BARRIERS = AT_THERE + STAGES * TOKENS * 4;
constexpr int SHARED_BYTES = AT_BARRIERS + 8 * (STAGES + 1);
static_assert(SHARED_BYTES <= 232448, "more shared memory than a block can have");
static_assert(CLUSTER == 1 || HEADS * SUM_PITCH * 4 <= AT_FADES, "no room for what the cluster joins");

__device__ __forceinline__ void zero_row(unsigned char* row, int lane) {
    for (int piece = lane; piece < ROW / 16; piece += 32) reinterpret_cast<uint4*>(row)[piece] = make_uint4(0, 0, 0, 0);
}

// A lane asks for one of two pieces of a head of its warp.
__device__ __forceinline__ void ask_query(const Attend& a, unsigned char* memory, uint32_t base, uint32_t query_barrier, int row,
                                          int first_head, int warp, int lane) {
    const int h = warp * HEADS_ASKED + lane / 2, head = first_head + h;
    const bool mine = lane < 2 * HEADS_ASKED && head < a.heads, rope = lane % 2;
    const uint32_t copied = ballot(mine);
    for (int other = warp * HEADS_ASKED; other < (warp + 1) * HEADS_ASKED; ++other) {
        if (first_head + other >= a.heads) zero_row(memory + AT_QUERY + other * PITCH, lane);
    }
    __syncwarp();
    if (lane == 0) arrive_expecting(query_barrier, __popc(copied) / 2 * ROW);
    __syncwarp();
    if (mine) {
        const uint16_t* from = rope ? a.q_rope + row * a.q_rope_row + head * a.q_rope_head
                                    : a.q_nope + row * a.q_nope_row + head * a.q_nope_head;
        bulk_copy(base + AT_QUERY + h * PITCH + (rope ? LATENT * 2 : 0), from, rope ? ROPE * 2 : LATENT * 2, query_barrier);
    }
}

// What a thread knows of the copies of its block.
struct Copies {
    const Attend& a;
    unsigned char* memory;
    uint32_t base, barriers;  // shared addresses
    const int* slots;         // of this row
    int warp, lane;
    int token;  // of a step, that this lane asks for
    int begin, end, steps;

    __device__ __forceinline__ int* there() const { return reinterpret_cast<int*>(memory + AT_THERE); }

    // Asks for this lane's token of a stage; either all lanes that have one of a stage are asking, or none. Where there is no
    // token the row becomes zeros, because a weight of zero does not silence the NaN that memory may have held.
    __device__ __forceinline__ void ask(bool asking, int stage, int slot) const {
        const int place = stage * TOKENS + token;
        const bool real = asking && slot >= 0;
        const uint32_t copied = ballot(real);
        uint32_t missing = ballot(asking && !real);
        if (missing) {
            for (; missing; missing &= missing - 1) zero_row(memory + shuffle(place, __ffs(missing) - 1) * PITCH, lane);
            fence_before_copies();
        }
        if (asking) there()[place] = real;
        __syncwarp();
        if (asking && lane % ASKED == 0) {
            arrive_expecting(barriers + 8 * stage, __popc(copied >> lane & ((1u << ASKED) - 1)) * ROW);
        }
        __syncwarp();
        if (real) bulk_copy(base + place * PITCH, a.kv + slot * a.kv_stride, ROW, barriers + 8 * stage);
    }

    // The same in pieces, for a stage whose slots the lanes from `first` on hold.
    __device__ __forceinline__ void ask_in_pieces(int stage, int slot, int first) const {
        constexpr int LANES = 32 / ASKED, PIECES = ROW / 16 / LANES;  // of a token; of a lane
        const int own = shuffle(slot, first + lane / LANES), place = stage * TOKENS + warp * ASKED + lane / LANES;
        const unsigned char* from = a.kv + max(own, 0) * a.kv_stride + lane % LANES * 16;
        const uint32_t to = base + place * PITCH + lane % LANES * 16;
        if (lane % LANES == 0) there()[place] = own >= 0;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) copy_piece(to + i * LANES * 16, from + i * LANES * 16, own >= 0);
        arrive_when_copied(barriers + 8 * stage);
    }

    // The slot of this lane's token of a step, if it is one of the lanes that ask in the loop.
    __device__ __forceinline__ int look_up(int step) const {
        const int position = begin + step * TOKENS + token;
        return lane < ASKED && step < steps && position < end ? slots[position] : -1;
    }
};
