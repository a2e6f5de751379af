"""Device functions of one draft step: lengths, prefix sums, ragged rows and DeepGEMM's paged-MQA schedule.

The schedule rule is DeepGEMM's (deep_gemm/include/deep_gemm/scheduler/paged_mqa_logits.cuh): with P the inclusive prefix sum
of ceil(len / SPLIT_KV) and T its last value, SM m starts at segment g = m * (T // num_sms) + min(m, T % num_sms), which lies
in row q = #{P <= g}, split g - P[q - 1].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_request_lengths(
    seq_lens_ptr,  # int32 | int64 [num_requests]
    cache_seqlens_ptr,  # int32 [num_requests]
    cu_seqlens_k_ptr,  # int32 [num_requests + 1]
    num_requests,
    offset,
    max_len,
    BLOCK: tl.constexpr,
):
    carry = 0
    tl.store(cu_seqlens_k_ptr, 0)
    for start in range(0, num_requests, BLOCK):
        r = start + tl.arange(0, BLOCK)
        mask = r < num_requests
        length = tl.load(seq_lens_ptr + r, mask=mask, other=0).to(tl.int32) + offset
        length = tl.where(mask, tl.minimum(tl.maximum(length, 1), max_len), 0)
        tl.store(cache_seqlens_ptr + r, length, mask=mask)
        tl.store(cu_seqlens_k_ptr + 1 + r, carry + tl.cumsum(length, 0), mask=mask)
        carry += tl.sum(length, 0)


@triton.jit
def _find_ragged_rows(
    row,  # int32 [BLOCK]
    extend_lens_ptr,  # int32 | int64 [num_requests]
    num_requests,
    BLOCK: tl.constexpr,
):
    """Request of each packed row, and the end of that request's rows; `num_requests` for a row past the last one."""
    request = tl.zeros_like(row)
    row_begin = tl.zeros_like(row)
    carry = 0
    for start in range(0, num_requests, BLOCK):
        r = start + tl.arange(0, BLOCK)
        mask = r < num_requests
        extend = tl.load(extend_lens_ptr + r, mask=mask, other=0).to(tl.int32)
        ends = carry + tl.cumsum(extend, 0)
        before = (ends[None, :] <= row[:, None]) & mask[None, :]
        request += tl.sum(before.to(tl.int32), 1)
        row_begin = tl.maximum(row_begin, tl.max(tl.where(before, ends[None, :], 0), 1))
        carry += tl.sum(extend, 0)
    inside = request < num_requests
    own = tl.load(extend_lens_ptr + request, mask=inside, other=0).to(tl.int32)
    return request, row_begin + own


@triton.jit
def write_row_lengths(
    seq_lens_ptr,
    extend_lens_ptr,
    seqlens_expanded_ptr,  # int32 [num_rows]
    nsa_cache_seqlens_ptr,  # int32 [num_rows]
    nsa_cu_seqlens_k_ptr,  # int32 [num_rows + 1]
    token_to_batch_idx_ptr,  # int32 [num_rows], written where rows are ragged
    num_requests,
    num_rows,
    offset,
    max_len,
    index_topk,
    ROWS_PER_REQUEST: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the schedule's segments of all rows together."""
    segments = 0
    carry = 0
    tl.store(nsa_cu_seqlens_k_ptr, 0)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < num_rows
        if ROWS_PER_REQUEST == 0:
            request, row_end = _find_ragged_rows(row, extend_lens_ptr, num_requests, BLOCK)
            inside = mask & (request < num_requests)
            seq_len = tl.load(seq_lens_ptr + request, mask=inside, other=0).to(tl.int32)
            length = tl.where(inside, seq_len + 1 + row - row_end, 1)
            tl.store(token_to_batch_idx_ptr + row, tl.minimum(request, num_requests - 1), mask=mask)
        else:
            seq_len = tl.load(seq_lens_ptr + row // ROWS_PER_REQUEST, mask=mask, other=0).to(tl.int32)
            length = seq_len + offset + row % ROWS_PER_REQUEST
        length = tl.where(mask, tl.minimum(tl.maximum(length, 1), max_len), 0)
        clipped = tl.minimum(length, index_topk)
        if ROWS_PER_REQUEST != 1:
            tl.store(seqlens_expanded_ptr + row, length, mask=mask)
        tl.store(nsa_cache_seqlens_ptr + row, clipped, mask=mask)
        tl.store(nsa_cu_seqlens_k_ptr + 1 + row, carry + tl.cumsum(clipped, 0), mask=mask)
        carry += tl.sum(clipped, 0)
        segments += tl.sum((length + SPLIT_KV - 1) // SPLIT_KV, 0)
    return segments


@triton.jit
def write_schedule(
    lens_ptr,  # int32 [num_rows], written by this program before
    schedule_ptr,  # int32 [NUM_SMS + 1, 2]
    num_rows,
    segments,
    NUM_SMS: tl.constexpr,
    SM_BLOCK: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sm = tl.arange(0, SM_BLOCK)
    first = sm * (segments // NUM_SMS) + tl.minimum(sm, segments % NUM_SMS)
    query = tl.zeros_like(sm)
    before = tl.zeros_like(sm)
    carry = 0
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < num_rows
        splits = (tl.load(lens_ptr + row, mask=mask, other=0) + SPLIT_KV - 1) // SPLIT_KV
        ends = carry + tl.cumsum(splits, 0)
        passed = (ends[None, :] <= first[:, None]) & mask[None, :]
        query += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, ends[None, :], 0), 1))
        carry += tl.sum(splits, 0)
    wanted = sm <= NUM_SMS
    tl.store(schedule_ptr + 2 * sm, query, mask=wanted)
    tl.store(schedule_ptr + 2 * sm + 1, first - before, mask=wanted)


@triton.jit
def write_cu_seqlens_q(
    extend_lens_ptr,
    cu_seqlens_q_ptr,  # int32 [num_requests + 1]; the last request owns the rows past the sum
    num_requests,
    num_rows,
    BLOCK: tl.constexpr,
):
    carry = 0
    tl.store(cu_seqlens_q_ptr, 0)
    for start in range(0, num_requests, BLOCK):
        r = start + tl.arange(0, BLOCK)
        mask = r < num_requests
        extend = tl.load(extend_lens_ptr + r, mask=mask, other=0).to(tl.int32)
        ends = tl.where(r == num_requests - 1, num_rows, carry + tl.cumsum(extend, 0))
        tl.store(cu_seqlens_q_ptr + 1 + r, ends, mask=mask)
        carry += tl.sum(extend, 0)
