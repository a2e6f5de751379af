"""The launcher of the metadata kernel: one launch for every step and row of a forward, or of a whole draft round."""

from __future__ import annotations

import torch

from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.checks import check_device, check_pool, check_vector
from nsa_backend.kernels.metadata_kernel import metadata_kernel
from nsa_backend.kernels.plan import PAGE_SIZE, SCHEDULE_SPLIT_KV, MetadataPlan
from nsa_backend.kernels.topk_plan import CAPS, MAX_ROWS, THRESHOLDS

# With page_table_1 (SGLang 0.5.12), the variant that loses least over all modes and shapes in
# benchmarks/results/metadata_tuning_0_5_12_h200.json; without, two warps, whose median is below one warp's in 14 of 16 cells of
# benchmarks/results/metadata_0_5_23_h200.json, launch_again, and sizes that no other variant beats in every cell of one warp.
ROW_BLOCK = 128
COLUMN_BLOCK, NUM_WARPS = 4096, 4
PAGED_COLUMN_BLOCK, PAGED_NUM_WARPS = 16384, 2  # 256 page entries, four loads of a thread under way at once
PAGED_PIECE = 128  # page entries of one store of a warp
SM_BLOCK = 32  # entries of the schedule in a program, one a thread of a warp
TARGET_TABLE_PROGRAMS = 2048


def write_metadata(
    plan: MetadataPlan,
    buffers: MetadataBuffers,
    inputs: BatchInputs,
    *,
    req_to_token: torch.Tensor,
    index_topk: int,
    surplus_last: bool = False,
) -> None:
    """Write every field of `plan` into `buffers` with one launch on the current stream; allocates and synchronises nothing.

    Args:
        plan: the mode and its shape; `buffers` must have room for it.
        buffers: where to write. Only the first `plan.num_requests` requests and `plan.num_rows` rows are touched.
        inputs: what to read; `extend_lens` for a ragged plan only.
        req_to_token: int32 [pool, width], rows contiguous; KV slot of every token.
        index_topk: tokens the sparse attention keeps.
        surplus_last: whether the schedule gives the segments that do not divide evenly to the last SMs, as DeepGEMM does from
            0.1.5 on, or to the first.

    Raises:
        ValueError: a tensor has another shape, dtype, device or layout, or `buffers` is too small.
    """
    check_arguments(plan, buffers, inputs, req_to_token)
    wide = buffers.page_table_1 is not None
    planned = buffers.topk_plan is not None
    num_plans = plan.num_steps if planned else 0
    column_block, num_warps = (COLUMN_BLOCK, NUM_WARPS) if wide else (PAGED_COLUMN_BLOCK, PAGED_NUM_WARPS)
    column_blocks = blocks(buffers.table_width, column_block)
    splits = max(1, min(column_blocks, blocks(TARGET_TABLE_PROGRAMS, max(plan.num_requests, 1))))
    num_sms = 0 if buffers.schedule is None else buffers.schedule.shape[1] - 1
    schedule_parts = blocks(num_sms + 1, SM_BLOCK) if num_sms else 0
    of_steps = plan.num_steps * (schedule_parts + 2) + num_plans
    step_lines = blocks(of_steps, splits)
    metadata_kernel[(splits, step_lines + plan.num_requests)](
        inputs.seq_lens,
        inputs.req_pool_indices,
        req_to_token,
        inputs.seq_lens if inputs.extend_lens is None else inputs.extend_lens,
        buffers.cache_seqlens,
        buffers.cu_seqlens_k,
        buffers.seqlens_expanded,
        buffers.nsa_cache_seqlens,
        buffers.nsa_cu_seqlens_k,
        buffers.cache_seqlens if buffers.schedule is None else buffers.schedule,
        buffers.topk_plan if planned else buffers.cache_seqlens,
        buffers.page_table_1 if wide else buffers.real_page_table,
        buffers.real_page_table,
        buffers.cu_seqlens_q,
        buffers.token_to_batch_idx,
        req_to_token.stride(0),
        buffers.cache_seqlens.stride(0),
        buffers.cu_seqlens_k.stride(0),
        buffers.seqlens_expanded.stride(0),
        buffers.nsa_cache_seqlens.stride(0),
        buffers.nsa_cu_seqlens_k.stride(0),
        buffers.topk_plan.stride(0) if planned else 0,
        buffers.page_table_1.stride(0) if wide else 0,
        buffers.real_page_table.stride(0),
        plan.num_requests,
        plan.num_rows,
        plan.row_offset,
        plan.cache_offset,
        plan.table_offset,
        min(req_to_token.shape[1], buffers.table_width),
        index_topk,
        step_lines,
        NUM_STEPS=plan.num_steps,
        NUM_PLANS=num_plans,
        ROWS_PER_REQUEST=plan.rows_per_request,
        NEXT_N=plan.next_n,
        WIDE=wide,
        THRESHOLDS=THRESHOLDS,
        CAPS=CAPS,
        MAX_PLANNED_ROWS=MAX_ROWS,
        NUM_SMS=num_sms,
        SM_BLOCK=SM_BLOCK,
        SCHEDULE_PARTS=schedule_parts,
        PAGE=PAGE_SIZE,
        SPLIT_KV=SCHEDULE_SPLIT_KV,
        ROW_BLOCK=ROW_BLOCK,
        COLUMN_BLOCK=column_block,
        PIECE=column_block // PAGE_SIZE if wide else PAGED_PIECE,
        SURPLUS_LAST=surplus_last,
        num_warps=num_warps,
    )


def check_arguments(plan: MetadataPlan, buffers: MetadataBuffers, inputs: BatchInputs, req_to_token: torch.Tensor) -> None:
    """Refuse what the kernel would read or write out of bounds; raises ValueError with the consequence."""
    if plan.ragged and inputs.extend_lens is None:
        raise ValueError("a ragged plan needs extend_lens: without them the rows of a request are unknown")
    for name in ("seq_lens", "req_pool_indices", *(("extend_lens",) if plan.ragged else ())):
        check_vector(name, getattr(inputs, name), plan.num_requests)
        check_device(name, getattr(inputs, name), "the metadata", buffers.real_page_table.device)
    check_pool(req_to_token)
    check_device("req_to_token", req_to_token, "the metadata", buffers.real_page_table.device)
    _check_room(plan, buffers)


def _check_room(plan: MetadataPlan, buffers: MetadataBuffers) -> None:
    steps, requests = buffers.cache_seqlens.shape
    rows = buffers.nsa_cache_seqlens.shape[1]
    if plan.num_steps > steps or plan.num_requests > requests or plan.num_rows > rows:
        raise ValueError(
            f"the buffers hold {steps} steps of {requests} requests and {rows} rows, the plan wants {plan.num_steps} steps of "
            f"{plan.num_requests} requests and {plan.num_rows} rows: the kernel would write past their end"
        )
    if not plan.ragged and plan.num_rows != plan.num_requests * plan.rows_per_request:
        raise ValueError(
            f"{plan.num_requests} requests of {plan.rows_per_request} rows are not {plan.num_rows} rows: "
            "some rows would keep the lengths of an earlier batch"
        )
    if plan.rows_per_request % plan.next_n:
        raise ValueError(
            f"{plan.rows_per_request} rows of a request are no groups of {plan.next_n}: the logits would mix requests"
        )
    rows_are_requests = buffers.seqlens_expanded is buffers.cache_seqlens
    if rows_are_requests == plan.expanded:
        raise ValueError(
            f"the plan has {plan.rows_per_request or 'ragged'} rows a request, the buffers were allocated for "
            f"{'one' if rows_are_requests else 'several'}: row lengths would be lost or overwrite request lengths"
        )
