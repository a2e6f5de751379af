"""Device function for the plan of SGLang's top-k v2 kernel: which long rows a pool of thread-block clusters takes.

The kernel selects short rows with one block each. Rows longer than a threshold go to clusters of eight blocks, which read the
work list: int32 [rows + 1, 2], (threshold, listed rows) and then (row, length) of every listed row. Whatever the threshold, the
result is right as long as the list holds exactly the rows beyond it; the threshold decides how fast it is. The rule is that of
`topk_plan_cluster` in SGLang 0.5.23 (kernels/jit/csrc/deepseek_v4/topk_v2.cuh), tuned there on an H200: the lowest of
`THRESHOLDS` from which on no threshold is exceeded by more rows than its cap.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend.kernels.lengths import lengths_of_rows

THRESHOLDS = (65_536, 98_304, 131_072, 196_608, 262_144, 393_216)
CAPS = (30, 45, 60, 80, 112, 128)
"""Most rows that may exceed the threshold beside it."""

MAX_ROWS = 512
"""Of more rows none goes to the pool, and the plan is not read."""


@triton.jit
def write_topk_plan(
    seq_lens_ptr,  # int32 | int64 [num_requests]
    topk_plan_ptr,  # int32 [num_rows + 1, 2]; what lies past the listed rows keeps its values
    num_requests,
    num_rows,  # MAX_ROWS at most
    offset,
    max_len,
    ROWS_PER_REQUEST: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    CAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Rows beyond each threshold in ten bits, which hold MAX_ROWS: three thresholds in an int32, whose sum is one instruction.
    lower = 0
    upper = 0
    for start in range(0, num_rows, BLOCK):
        length, _ = lengths_of_rows(
            seq_lens_ptr, seq_lens_ptr, start + tl.arange(0, BLOCK), num_requests, num_rows, offset, max_len,
            ROWS_PER_REQUEST=ROWS_PER_REQUEST, BLOCK=BLOCK,
        )  # fmt: skip
        beyond_lower = tl.zeros([BLOCK], tl.int32)
        beyond_upper = tl.zeros([BLOCK], tl.int32)
        for i in tl.static_range(3):
            beyond_lower += (length > THRESHOLDS[i]).to(tl.int32) << (10 * i)
            beyond_upper += (length > THRESHOLDS[3 + i]).to(tl.int32) << (10 * i)
        lower += tl.sum(beyond_lower, 0)
        upper += tl.sum(beyond_upper, 0)

    threshold = tl.full([], THRESHOLDS[5], tl.int32)
    listed_rows = upper >> 20
    within = num_rows >= 0
    for i in tl.static_range(5, -1, -1):
        beyond = ((upper if i >= 3 else lower) >> (10 * (i % 3))) & 1023
        within = within & (beyond <= CAPS[i])
        threshold = tl.where(within, THRESHOLDS[i], threshold)
        listed_rows = tl.where(within, beyond, listed_rows)
    tl.store(topk_plan_ptr, threshold)
    tl.store(topk_plan_ptr + 1, listed_rows)

    # Mostly no row is listed, and then nothing is left to do.
    carry = 0
    for start in range(0, tl.where(listed_rows > 0, num_rows, 0), BLOCK):
        row = start + tl.arange(0, BLOCK)
        length, _ = lengths_of_rows(
            seq_lens_ptr, seq_lens_ptr, row, num_requests, num_rows, offset, max_len,
            ROWS_PER_REQUEST=ROWS_PER_REQUEST, BLOCK=BLOCK,
        )  # fmt: skip
        listed = (length > threshold).to(tl.int32)
        item = carry + tl.cumsum(listed, 0)
        tl.store(topk_plan_ptr + 2 * item, row, mask=listed == 1)
        tl.store(topk_plan_ptr + 2 * item + 1, length, mask=listed == 1)
        carry += tl.sum(listed, 0)
