// The tile, as the compiler is told, the shape of the model, and what a call is given.

#pragma once

constexpr int HEADS = TILE_HEADS;        // of a block: 16, 32 or 64
constexpr int TOKENS = TILE_TOKENS;      // of a step
constexpr int STAGES = TILE_STAGES;      // steps that are in shared memory or on their way there
constexpr int WARPS_T = TILE_WARPS_T;    // warps that share the tokens in scores,
constexpr int WARPS_D = TILE_WARPS_D;    // and those that share the 576 values of the dot product
constexpr int CLUSTER = TILE_CLUSTER;    // blocks of a row that join through distributed shared memory
constexpr int BLOCKS = TILE_BLOCKS;      // that have to fit an SM
constexpr bool BULK = TILE_BULK;         // a token comes as one bulk copy, or else in pieces of 16 bytes

constexpr int LATENT = 512, ROPE = 64, DIM = LATENT + ROPE;
constexpr int ROW = DIM * 2;     // bytes of a token
constexpr int PITCH = ROW + 16;  // eight rows start in different banks, so that ldmatrix meets no conflict
constexpr int WARPS = WARPS_T * WARPS_D, THREADS = 32 * WARPS;
constexpr int SUM_PITCH = LATENT + 8;  // floats, of what a cluster joins

struct Attend {
    const uint16_t* q_nope;   // bfloat16 [rows, heads, LATENT]; strides below, in values
    const uint16_t* q_rope;   // bfloat16 [rows, heads, ROPE]
    const unsigned char* kv;  // bfloat16 [slots, DIM], kv_stride bytes apart
    const int* slots;         // [rows, topk], slots_stride apart; -1 where there is none
    const int* lens;          // [rows], entries of each row to look at
    uint16_t* out;            // bfloat16 [rows, heads, LATENT], written where a row has one part
    float* partial;           // [rows, parts, heads, LATENT], written where it has more; left alone for a part without a token
    float* lse;               // [rows, parts, heads], base 2; -inf for a part without a token
    long long q_nope_row, q_nope_head, q_rope_row, q_rope_head, slots_stride, kv_stride;
    float scale;  // of scores, times log2(e)
    int topk, heads, parts;
    int chunk;  // tokens of a block, a multiple of TOKENS
};
