// Values of attended latents, quantised for o_proj, of few rows, for Hopper. head_values.py launches it.
//
// A cluster has the 128 values of a head that share scales, 16 a block, and a warp a part of the latent. Blocks tell one another
// the largest values of their rows.

#include "heads_of_few_rows.cuh"
#include "eights.cuh"

constexpr int COLUMNS = 16, WARPS = 4, THREADS = WARPS * 32, BLOCKS = GROUP / COLUMNS;
constexpr int OF_WARP = LATENT * 2 / WARPS;  // bytes of a row or a column
constexpr int PITCH = COLUMNS + 4;           // of a row's sums, so that lanes that have two rows each write to 32 banks
constexpr uint32_t OF_SUMS = ROWS * PITCH * 4, LARGEST_AT = WARPS * OF_SUMS;
[[maybe_unused]] constexpr uint32_t SHARED_BYTES = LARGEST_AT + BLOCKS * ROWS * 4 + 16;

struct Values {
    const unsigned char* attended;  // bfloat16 [rows, heads, LATENT], strides in bytes below
    const unsigned char* weight;    // bfloat16 [heads, columns, LATENT], likewise
    unsigned char* out;             // e4m3 [rows, heads * WIDTH], contiguous
    float* scales;                  // [rows, heads * WIDTH / GROUP], strides below
    long long row_bytes, head_bytes, weight_head_bytes, weight_column_bytes, out_row, scales_row, scales_group;
    int rows;
    int before_ours;                // whether the next kernel waits for this one
};

extern "C" __global__ void CLUSTER_OF(BLOCKS) __launch_bounds__(THREADS, 1) head_values(const __grid_constant__ Values a) {
    SHARED_MEMORY(memory);
    const uint32_t shared = (shared_address(memory) + 15) & ~15u;
    if (a.before_ours) let_others_begin();
    arrive_in_cluster();  // whoever is told something is there
    const Place of;
    constexpr int OF_HEAD = WIDTH / COLUMNS;
    const int head = blockIdx.x / OF_HEAD, group = blockIdx.x / BLOCKS, rank = cluster_rank();
    const HeadWeight<OF_WARP> weight(
        a.weight + head * a.weight_head_bytes + blockIdx.x % OF_HEAD * COLUMNS * a.weight_column_bytes + of.warp * OF_WARP,
        a.weight_column_bytes, of
    );
    wait_for_inputs();
    const HeadRows<OF_WARP> rows(a.attended + head * a.head_bytes + of.warp * OF_WARP, a.row_bytes, a.rows, of);
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
        float sums[4];
        weight.multiply(rows.of_tile[tile], sums);
        const uint32_t at = shared + of.warp * OF_SUMS + ((tile * 8 + 2 * of.piece) * PITCH + of.row) * 4;
        store_shared(at, __float_as_uint(sums[0]));
        store_shared(at + PITCH * 4, __float_as_uint(sums[1]));
        store_shared(at + 8 * 4, __float_as_uint(sums[2]));
        store_shared(at + (PITCH + 8) * 4, __float_as_uint(sums[3]));
    }
    meet<1, THREADS>();
    const int column = threadIdx.x % COLUMNS, first = threadIdx.x / COLUMNS;
    float values[ROW_TILES];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
        const uint32_t at = shared + ((tile * 8 + first) * PITCH + column) * 4;
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += load_shared_float(at + warp * OF_SUMS);
        values[tile] = rounded(sum, 0).x;
        const float largest = largest_of<COLUMNS>(fabsf(values[tile]));
        if (tile == 0) wait_for_cluster();
        if (column < BLOCKS) store_shared_of(shared + LARGEST_AT + (rank * ROWS + tile * 8 + first) * 4, __float_as_uint(largest), column);
    }
    meet_cluster();
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
        const int row = tile * 8 + first;
        if (row >= a.rows) break;
        float largest = 0;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) largest = fmaxf(largest, load_shared_float(shared + LARGEST_AT + (block * ROWS + row) * 4));
        const Scale scale = scale_of<POWERS>(largest);
        a.out[row * a.out_row + blockIdx.x * COLUMNS + column] = static_cast<unsigned char>(pack_fp8(values[tile] * scale.inverse, 0));
        if (rank == 0 && column == 0) a.scales[row * a.scales_row + group * a.scales_group] = scale.scale;
    }
}
