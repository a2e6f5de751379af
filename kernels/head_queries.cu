// MLA's query of few rows made ready for attention, for Hopper: what is not rotated times the head's weight of keys, and RoPE of the
// rest. head_queries.py launches it.

#define LANES 16  // of a head that is turned
#include "rope.cuh"
#include "heads_of_few_rows.cuh"

constexpr int WARPS = 4, THREADS = WARPS * 32, COLUMNS = WARPS * 16, BLOCKS_OF_HEAD = LATENT / COLUMNS;
static_assert(LATENT % COLUMNS == 0);
constexpr uint32_t SHARED_BYTES = 0;

struct Queries {
    const unsigned char* nope;    // bfloat16 [rows, heads, NOPE], strides in bytes below
    const unsigned char* weight;  // bfloat16 [heads, LATENT, NOPE], likewise
    uint32_t* out;                // bfloat16 [rows, heads, LATENT], contiguous
    long long row_bytes, head_bytes, weight_head_bytes, weight_column_bytes;
    int rows, turning;            // blocks that multiply come behind those that turn
    Turned mla;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) head_queries(const __grid_constant__ Queries a) {
    const Place of;
    const int block = static_cast<int>(blockIdx.x) - a.turning;
    if (block < 0) {
        const int of_row = (a.mla.heads + MLA_TOGETHER - 1) / MLA_TOGETHER, warp = blockIdx.x * WARPS + of.warp, row = warp / of_row;
        wait_for_inputs();
        if (row < a.rows) turn_heads(a.mla, row, warp % of_row * MLA_TOGETHER, of.lane);
        return;
    }
    const int head = block / BLOCKS_OF_HEAD, column = block % BLOCKS_OF_HEAD * COLUMNS + of.warp * 16;
    const HeadWeight<NOPE * 2> weight(
        a.weight + head * a.weight_head_bytes + column * a.weight_column_bytes, a.weight_column_bytes, of
    );
    wait_for_inputs();
    const HeadRows<NOPE * 2> rows(a.nope + head * a.head_bytes, a.row_bytes, a.rows, of);
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
        float sums[4];
        weight.multiply(rows.of_tile[tile], sums);
        // A lane and the one of the next column: each has both columns of one row.
        const bool odd = of.row & 1;
        const float upper = shuffle_xor(odd ? sums[0] : sums[1], 4), lower = shuffle_xor(odd ? sums[2] : sums[3], 4);
        const int row = tile * 8 + 2 * of.piece + odd;
        if (row >= a.rows) continue;
        uint32_t* const out = a.out + ((static_cast<long long>(row) * a.mla.heads + head) * LATENT + column + (of.row & 6)) / 2;
        out[0] = odd ? pack_bf16(upper, sums[1]) : pack_bf16(sums[0], upper);
        out[4] = odd ? pack_bf16(lower, sums[3]) : pack_bf16(sums[2], lower);
    }
}
