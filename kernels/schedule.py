"""Device function for DeepGEMM's paged-MQA schedule of one draft step: the row, and the split in it, where each SM starts.

The rule is DeepGEMM's: with P the inclusive prefix sum of ceil(len / SPLIT_KV), T its last value and r = T % num_sms,
SM m starts at segment g = m * (T // num_sms) + e, which lies in row q = #{P <= g}, split g - P[q - 1]. The r SMs that get one
segment more are the first ones in release 0.1.0, e = min(m, r), by deep_gemm/include/deep_gemm/scheduler/paged_mqa_logits.cuh.
From 0.1.5 on they are the last ones, e = max(0, m - (num_sms - r)), by sm90_paged_mqa_logits.cuh beside it: an SM without work
then starts at row 0, whose length its kernel reads, and no longer past the last row.

Where its logits take NEXT_N rows of a request together, a row of the schedule is such a group, with the length of its last row.

Programs write SM_BLOCK entries each and read the lengths for themselves. What they search are sums of requests, of whose rows
each is then asked in turn; only ragged rows are searched one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend.kernels.lengths import clip_length, lengths_of_rows
from nsa_backend.kernels.prefix_sums import NO_END, count_ends_up_to


@triton.jit
def _segments_of_row(seq_len, offset, max_len, SPLIT_KV: tl.constexpr):
    return tl.cdiv(clip_length(seq_len + offset, max_len), SPLIT_KV)


@triton.jit
def _segments_of_entries(
    seq_lens_ptr,  # int32 | int64 [num_requests]
    extend_lens_ptr,  # int32 | int64 [num_requests], read where rows are ragged
    entry,  # int32 [BLOCK]
    num_requests,
    num_rows,
    offset,
    max_len,
    ROWS_PER_REQUEST: tl.constexpr,
    NEXT_N: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Segments of each entry: all rows of a request, or one row where rows are ragged; 0 past the last one."""
    if ROWS_PER_REQUEST == 0:
        length, _ = lengths_of_rows(
            seq_lens_ptr, extend_lens_ptr, entry, num_requests, num_rows, offset, max_len,
            ROWS_PER_REQUEST=ROWS_PER_REQUEST, BLOCK=BLOCK,
        )  # fmt: skip
        return tl.cdiv(length, SPLIT_KV)
    else:
        mask = entry < num_requests
        seq_len = tl.load(seq_lens_ptr + entry, mask=mask, other=0).to(tl.int32)
        segments = _segments_of_row(seq_len, offset, max_len, SPLIT_KV)
        for j in tl.static_range(1, ROWS_PER_REQUEST):
            segments += _segments_of_row(seq_len, offset + j * NEXT_N, max_len, SPLIT_KV)
        return tl.where(mask, segments, 0)


@triton.jit
def write_schedule(
    seq_lens_ptr,  # int32 | int64 [num_requests]
    extend_lens_ptr,  # int32 | int64 [num_requests], read where rows are ragged
    schedule_ptr,  # int32 [NUM_SMS + 1, 2]
    part,
    num_requests,
    num_rows,
    offset,
    max_len,
    ROWS_PER_REQUEST: tl.constexpr,
    NEXT_N: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    NUM_SMS: tl.constexpr,
    SM_BLOCK: tl.constexpr,
    SURPLUS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where the SMs from part * SM_BLOCK on start: a search among the requests, and then among the few rows of one."""
    entries = num_rows if ROWS_PER_REQUEST == 0 else num_requests
    total = 0
    for start in range(0, entries, BLOCK):
        segments = _segments_of_entries(
            seq_lens_ptr, extend_lens_ptr, start + tl.arange(0, BLOCK), num_requests, num_rows, offset, max_len,
            ROWS_PER_REQUEST=ROWS_PER_REQUEST, NEXT_N=NEXT_N, SPLIT_KV=SPLIT_KV, BLOCK=BLOCK,
        )  # fmt: skip
        total += tl.sum(segments, 0)
    sm = part * SM_BLOCK + tl.arange(0, SM_BLOCK)
    surplus = total % NUM_SMS
    extra = tl.maximum(sm - (NUM_SMS - surplus), 0) if SURPLUS_LAST else tl.minimum(sm, surplus)
    first = sm * (total // NUM_SMS) + extra
    entries_before = tl.zeros_like(sm)
    segments_before = tl.zeros_like(sm)
    carry = 0
    for start in range(0, entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        segments = _segments_of_entries(
            seq_lens_ptr, extend_lens_ptr, entry, num_requests, num_rows, offset, max_len,
            ROWS_PER_REQUEST=ROWS_PER_REQUEST, NEXT_N=NEXT_N, SPLIT_KV=SPLIT_KV, BLOCK=BLOCK,
        )  # fmt: skip
        # The last SM, which has no work, starts at the total: it must not pass entries that do not exist.
        ends = tl.where(entry < entries, carry + tl.cumsum(segments, 0), NO_END)
        passed, last = count_ends_up_to(ends, first, BLOCK=BLOCK)
        entries_before += passed
        segments_before = tl.where(passed > 0, last, segments_before)
        carry += tl.sum(segments, 0)
    row = entries_before
    split = first - segments_before
    if ROWS_PER_REQUEST > 1:
        row *= ROWS_PER_REQUEST
        seq_len = tl.load(seq_lens_ptr + entries_before, mask=entries_before < num_requests, other=0).to(tl.int32)
        # Rows of a request never get shorter: a split that lies in one of them lies in no later one.
        for j in tl.static_range(ROWS_PER_REQUEST - 1):
            segments_of_row = _segments_of_row(seq_len, offset + j * NEXT_N, max_len, SPLIT_KV)
            later = split >= segments_of_row
            row += later.to(tl.int32)
            split -= tl.where(later, segments_of_row, 0)
    wanted = sm <= NUM_SMS
    tl.store(schedule_ptr + 2 * sm, row, mask=wanted)
    tl.store(schedule_ptr + 2 * sm + 1, split, mask=wanted)
