"""The kernel that writes the metadata of every step and row of a forward, or of a whole draft round.

No program waits for another one, nor for what another thread has stored: each is a chain of a few loads. Of a step,
`SCHEDULE_PARTS` programs write the DeepGEMM schedule, one the plan of the top-k kernel where it is wanted, one the lengths of
rows and one those of requests. `num_requests * splits` programs copy page tables, `splits` of them taking turns at pieces of
one request's. A program past the end of its request stops at once, so the grid depends on no value that only the GPU
knows and one long request is spread over as many programs as a short one.

Grid, known on the host: [splits, step_lines + num_requests]. The first lines are the programs of steps, as many lines as those
fill; then a line is a request. So no program has to divide by a run-time number before its first load.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend.kernels.lengths import write_cu_seqlens_q, write_request_lengths, write_row_lengths
from nsa_backend.kernels.page_tables import copy_page_tables
from nsa_backend.kernels.schedule import write_schedule
from nsa_backend.kernels.topk_plan import write_topk_plan

# What changes from batch to batch; a special value (1, or a multiple of 16) must not compile the kernel again. Inputs lie
# anywhere: those of two-batch overlap's second half begin at any request.
UNSPECIALIZED = [
    "seq_lens_ptr", "req_pool_indices_ptr", "extend_lens_ptr",
    "cache_seqlens_stride", "cu_seqlens_k_stride", "seqlens_expanded_stride", "nsa_cache_seqlens_stride",
    "nsa_cu_seqlens_k_stride", "topk_plan_stride", "page_table_1_stride", "real_page_table_stride",
    "num_requests", "num_rows", "row_offset", "cache_offset", "table_offset", "max_len", "step_lines",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def metadata_kernel(
    seq_lens_ptr,  # int32 | int64 [num_requests]
    req_pool_indices_ptr,  # int32 | int64 [num_requests]
    req_to_token_ptr,  # int32 [pool, req_to_token_stride]
    extend_lens_ptr,  # int32 | int64 [num_requests], read where rows are ragged
    cache_seqlens_ptr,  # int32 [num_steps, cache_seqlens_stride]
    cu_seqlens_k_ptr,  # int32 [num_steps, cu_seqlens_k_stride]
    seqlens_expanded_ptr,  # int32 [num_steps, seqlens_expanded_stride]
    nsa_cache_seqlens_ptr,  # int32 [num_steps, nsa_cache_seqlens_stride]
    nsa_cu_seqlens_k_ptr,  # int32 [num_steps, nsa_cu_seqlens_k_stride]
    schedule_ptr,  # int32 [num_steps, NUM_SMS + 1, 2], not written where NUM_SMS is 0
    topk_plan_ptr,  # int32 [num_steps, topk_plan_stride], not written where NUM_PLANS is 0 or rows too many
    page_table_1_ptr,  # int32 [num_requests, page_table_1_stride], not written where WIDE is False
    real_page_table_ptr,  # int32 [num_rows, real_page_table_stride]
    cu_seqlens_q_ptr,  # int32 [num_requests + 1], written where rows are ragged
    token_to_batch_idx_ptr,  # int32 [num_rows], written where rows are ragged
    req_to_token_stride,
    cache_seqlens_stride,
    cu_seqlens_k_stride,
    seqlens_expanded_stride,
    nsa_cache_seqlens_stride,
    nsa_cu_seqlens_k_stride,
    topk_plan_stride,
    page_table_1_stride,
    real_page_table_stride,
    num_requests,
    num_rows,
    row_offset,
    cache_offset,
    table_offset,
    max_len,
    index_topk,
    step_lines,  # lines of the grid before the requests'
    NUM_STEPS: tl.constexpr,
    NUM_PLANS: tl.constexpr,
    ROWS_PER_REQUEST: tl.constexpr,
    NEXT_N: tl.constexpr,
    WIDE: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    CAPS: tl.constexpr,
    MAX_PLANNED_ROWS: tl.constexpr,
    NUM_SMS: tl.constexpr,
    SM_BLOCK: tl.constexpr,
    SCHEDULE_PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    SURPLUS_LAST: tl.constexpr,
):
    split, splits, line = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    program = line * splits + split
    if line >= step_lines:
        if WIDE:
            # What `MetadataBuffers.allocate` keeps of the stride: rows of page_table_1 begin at 16 bytes.
            page_table_1_stride = tl.multiple_of(page_table_1_stride, 4)
        copy_page_tables(
            line - step_lines,
            split,
            splits,
            seq_lens_ptr,
            req_pool_indices_ptr,
            req_to_token_ptr,
            req_to_token_stride,
            extend_lens_ptr,
            page_table_1_ptr,
            page_table_1_stride,
            real_page_table_ptr,
            real_page_table_stride,
            num_requests,
            num_rows,
            table_offset,
            max_len,
            ROWS_PER_REQUEST=ROWS_PER_REQUEST,
            WIDE=WIDE,
            PAGE=PAGE,
            ROW_BLOCK=ROW_BLOCK,
            COLUMN_BLOCK=COLUMN_BLOCK,
            PIECE=PIECE,
        )
    elif program < NUM_STEPS * SCHEDULE_PARTS:
        if NUM_SMS > 0:  # where there is no schedule its arithmetic would divide by 0, which no compiler takes
            step = program // SCHEDULE_PARTS
            write_schedule(
                seq_lens_ptr,
                extend_lens_ptr,
                schedule_ptr + step * (2 * (NUM_SMS + 1)),
                program % SCHEDULE_PARTS,
                num_requests,
                num_rows,
                row_offset + step + NEXT_N - 1,
                max_len,
                ROWS_PER_REQUEST=ROWS_PER_REQUEST // NEXT_N,
                NEXT_N=NEXT_N,
                SPLIT_KV=SPLIT_KV,
                NUM_SMS=NUM_SMS,
                SM_BLOCK=SM_BLOCK,
                SURPLUS_LAST=SURPLUS_LAST,
                BLOCK=ROW_BLOCK,
            )
    elif program < NUM_STEPS * SCHEDULE_PARTS + NUM_PLANS:
        if NUM_PLANS > 0:
            tl.static_assert(ROWS_PER_REQUEST > 0)  # no release has both ragged rows and a plan
            step = program - NUM_STEPS * SCHEDULE_PARTS
            if num_rows <= MAX_PLANNED_ROWS:
                write_topk_plan(
                    seq_lens_ptr,
                    topk_plan_ptr + step * topk_plan_stride,
                    num_requests,
                    num_rows,
                    row_offset + step,
                    max_len,
                    ROWS_PER_REQUEST=ROWS_PER_REQUEST,
                    THRESHOLDS=THRESHOLDS,
                    CAPS=CAPS,
                    BLOCK=ROW_BLOCK,
                )
    elif program < NUM_STEPS * (SCHEDULE_PARTS + 1) + NUM_PLANS:
        step = program - NUM_STEPS * SCHEDULE_PARTS - NUM_PLANS
        write_row_lengths(
            seq_lens_ptr,
            extend_lens_ptr,
            seqlens_expanded_ptr + step * seqlens_expanded_stride,
            nsa_cache_seqlens_ptr + step * nsa_cache_seqlens_stride,
            nsa_cu_seqlens_k_ptr + step * nsa_cu_seqlens_k_stride,
            token_to_batch_idx_ptr,
            num_requests,
            num_rows,
            row_offset + step,
            max_len,
            index_topk,
            ROWS_PER_REQUEST=ROWS_PER_REQUEST,
            BLOCK=ROW_BLOCK,
        )
    elif program < NUM_STEPS * (SCHEDULE_PARTS + 2) + NUM_PLANS:
        step = program - NUM_STEPS * (SCHEDULE_PARTS + 1) - NUM_PLANS
        write_request_lengths(
            seq_lens_ptr,
            cache_seqlens_ptr + step * cache_seqlens_stride,
            cu_seqlens_k_ptr + step * cu_seqlens_k_stride,
            num_requests,
            cache_offset + step,
            max_len,
            BLOCK=ROW_BLOCK,
        )
        if ROWS_PER_REQUEST == 0:
            write_cu_seqlens_q(extend_lens_ptr, cu_seqlens_q_ptr, num_requests, num_rows, BLOCK=ROW_BLOCK)
