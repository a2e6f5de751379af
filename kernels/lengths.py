"""Device functions of one draft step: lengths of requests and of rows, and their prefix sums.

Each is the work of programs of its own, which read the batch's lengths again: that costs a hit in the L2 cache, where reading
what another thread has written costs a barrier and a way through memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend.kernels.prefix_sums import NO_END, count_ends_up_to


@triton.jit
def clip_length(length, max_len):
    """A length that memory can be read by: at least 1, as padding has, and at most what tables hold."""
    return tl.minimum(tl.maximum(length, 1), max_len)


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
        length = tl.where(mask, clip_length(length, max_len), 0)
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
def lengths_of_rows(
    seq_lens_ptr,  # int32 | int64 [num_requests]
    extend_lens_ptr,  # int32 | int64 [num_requests], read where rows are ragged
    row,  # int32 [BLOCK]
    num_requests,
    num_rows,
    offset,
    max_len,
    ROWS_PER_REQUEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The length of each row, 0 past the last one, and its request."""
    mask = row < num_rows
    if ROWS_PER_REQUEST == 0:
        passed_requests = tl.zeros_like(row)
        row_begin = tl.zeros_like(row)
        carry = 0
        for start in range(0, num_requests, BLOCK):
            r = start + tl.arange(0, BLOCK)
            extend = tl.load(extend_lens_ptr + r, mask=r < num_requests, other=0).to(tl.int32)
            ends = tl.where(r < num_requests, carry + tl.cumsum(extend, 0), NO_END)
            passed, last = count_ends_up_to(ends, row, BLOCK=BLOCK)
            passed_requests += passed
            row_begin = tl.where(passed > 0, last, row_begin)
            carry += tl.sum(extend, 0)
        request = tl.minimum(passed_requests, num_requests - 1)
        row_end = row_begin + tl.load(extend_lens_ptr + request, mask=mask, other=0).to(tl.int32)
        seq_len = tl.load(seq_lens_ptr + request, mask=mask, other=0).to(tl.int32)
        length = tl.where(passed_requests < num_requests, seq_len + 1 + row - row_end, 1)
    else:
        request = row // ROWS_PER_REQUEST
        seq_len = tl.load(seq_lens_ptr + request, mask=mask, other=0).to(tl.int32)
        length = seq_len + offset + row % ROWS_PER_REQUEST
    return tl.where(mask, clip_length(length, max_len), 0), request


@triton.jit
def write_row_lengths(
    seq_lens_ptr,  # int32 | int64 [num_requests]
    extend_lens_ptr,  # int32 | int64 [num_requests], read where rows are ragged
    seqlens_expanded_ptr,  # int32 [num_rows], written where rows are not requests
    nsa_cache_seqlens_ptr,  # int32 [num_rows]
    nsa_cu_seqlens_k_ptr,  # int32 [num_rows + 1]
    token_to_batch_idx_ptr,  # int32 [num_rows], written where rows are ragged
    num_requests,
    num_rows,
    offset,
    max_len,
    index_topk,
    ROWS_PER_REQUEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    carry = 0
    tl.store(nsa_cu_seqlens_k_ptr, 0)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < num_rows
        length, request = lengths_of_rows(
            seq_lens_ptr, extend_lens_ptr, row, num_requests, num_rows, offset, max_len,
            ROWS_PER_REQUEST=ROWS_PER_REQUEST, BLOCK=BLOCK,
        )  # fmt: skip
        clipped = tl.minimum(length, index_topk)
        if ROWS_PER_REQUEST == 0:
            tl.store(token_to_batch_idx_ptr + row, request, mask=mask)
        if ROWS_PER_REQUEST != 1:
            tl.store(seqlens_expanded_ptr + row, length, mask=mask)
        tl.store(nsa_cache_seqlens_ptr + row, clipped, mask=mask)
        tl.store(nsa_cu_seqlens_k_ptr + 1 + row, carry + tl.cumsum(clipped, 0), mask=mask)
        carry += tl.sum(clipped, 0)
