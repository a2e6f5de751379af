"""Device functions of one draft step: lengths, prefix sums, ragged rows and DeepGEMM's paged-MQA schedule.

The schedule rule is DeepGEMM's: with P the inclusive prefix sum of ceil(len / SPLIT_KV), T its last value and r = T % num_sms,
SM m starts at segment g = m * (T // num_sms) + e, which lies in row q = #{P <= g}, split g - P[q - 1]. The r SMs that get one
segment more are the first ones in release 0.1.0, e = min(m, r), by deep_gemm/include/deep_gemm/scheduler/paged_mqa_logits.cuh.
From 0.1.5 on they are the last ones, e = max(0, m - (num_sms - r)), by sm90_paged_mqa_logits.cuh beside it: an SM without work
then starts at row 0, whose length its kernel reads, and no longer past the last row.
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
def write_cu_seqlens_q(
    extend_lens_ptr,  # int32 | int64 [num_requests]
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


@triton.jit
def _count_ends_up_to(
    ends_ptr,  # int32 [count], not decreasing, written by this program before a barrier
    value,  # int32 [BLOCK]
    count,
    search_steps,  # bits of count
):
    """For each value, how many ends are <= value, and the last of them (0 where there is none): a binary search."""
    low = tl.zeros_like(value)
    high = tl.zeros_like(value) + count
    last = tl.zeros_like(value)
    for _ in range(0, search_steps):
        middle = (low + high) // 2
        open_range = low < high
        end = tl.load(ends_ptr + middle, mask=open_range, other=0)
        passed = open_range & (end <= value)
        high = tl.where(open_range & (end > value), middle, high)
        low = tl.where(passed, middle + 1, low)
        last = tl.where(passed, end, last)
    return low, last


@triton.jit
def write_row_lengths(
    seq_lens_ptr,  # int32 | int64 [num_requests]
    extend_lens_ptr,  # int32 | int64 [num_requests], read where rows are ragged
    cu_seqlens_q_ptr,  # int32 [num_requests + 1], read where rows are ragged
    seqlens_expanded_ptr,  # int32 [num_rows]
    nsa_cache_seqlens_ptr,  # int32 [num_rows]
    nsa_cu_seqlens_k_ptr,  # int32 [num_rows + 1]
    segment_ends_ptr,  # int32 [num_rows], inclusive prefix sum of ceil(len / SPLIT_KV)
    token_to_batch_idx_ptr,  # int32 [num_rows], written where rows are ragged
    num_requests,
    num_rows,
    offset,
    max_len,
    index_topk,
    request_search_steps,
    ROWS_PER_REQUEST: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the schedule's segments of all rows together."""
    # One scan for two sums: clipped lengths in the low 32 bits, segments in the high ones. Neither reaches 2**31.
    carry = tl.full([], 0, tl.int64)
    tl.store(nsa_cu_seqlens_k_ptr, 0)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < num_rows
        if ROWS_PER_REQUEST == 0:
            request, row_begin = _count_ends_up_to(cu_seqlens_q_ptr + 1, row, num_requests, request_search_steps)
            request = tl.minimum(request, num_requests - 1)
            row_end = row_begin + tl.load(extend_lens_ptr + request, mask=mask, other=0).to(tl.int32)
            seq_len = tl.load(seq_lens_ptr + request, mask=mask, other=0).to(tl.int32)
            length = tl.where(row < row_end, seq_len + 1 + row - row_end, 1)
            tl.store(token_to_batch_idx_ptr + row, request, mask=mask)
        else:
            seq_len = tl.load(seq_lens_ptr + row // ROWS_PER_REQUEST, mask=mask, other=0).to(tl.int32)
            length = seq_len + offset + row % ROWS_PER_REQUEST
        length = tl.where(mask, tl.minimum(tl.maximum(length, 1), max_len), 0)
        clipped = tl.minimum(length, index_topk)
        packed = clipped.to(tl.int64) + (((length + SPLIT_KV - 1) // SPLIT_KV).to(tl.int64) << 32)
        sums = carry + tl.cumsum(packed, 0)
        if ROWS_PER_REQUEST != 1:
            tl.store(seqlens_expanded_ptr + row, length, mask=mask)
        tl.store(nsa_cache_seqlens_ptr + row, clipped, mask=mask)
        tl.store(nsa_cu_seqlens_k_ptr + 1 + row, sums.to(tl.int32), mask=mask)
        tl.store(segment_ends_ptr + row, (sums >> 32).to(tl.int32), mask=mask)
        carry += tl.sum(packed, 0)
    return (carry >> 32).to(tl.int32)


@triton.jit
def write_schedule(
    segment_ends_ptr,  # int32 [num_rows], written by this program before a barrier
    schedule_ptr,  # int32 [NUM_SMS + 1, 2]
    num_rows,
    segments,
    row_search_steps,
    NUM_SMS: tl.constexpr,
    SM_BLOCK: tl.constexpr,
    SURPLUS_LAST: tl.constexpr,
):
    sm = tl.arange(0, SM_BLOCK)
    surplus = segments % NUM_SMS
    extra = tl.maximum(sm - (NUM_SMS - surplus), 0) if SURPLUS_LAST else tl.minimum(sm, surplus)
    first = sm * (segments // NUM_SMS) + extra
    row, before = _count_ends_up_to(segment_ends_ptr, first, num_rows, row_search_steps)
    wanted = sm <= NUM_SMS
    tl.store(schedule_ptr + 2 * sm, row, mask=wanted)
    tl.store(schedule_ptr + 2 * sm + 1, first - before, mask=wanted)
