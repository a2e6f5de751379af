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

THRESHOLDS = (65_536, 98_304, 131_072, 196_608, 262_144, 393_216)
CAPS = (30, 45, 60, 80, 112, 128)
"""Most rows that may exceed the threshold beside it."""

MAX_ROWS = 512
"""Of more rows none goes to the pool, and the plan is not read."""


@triton.jit
def write_topk_plan(
    seq_lens_ptr,  # int32 | int64 [num_requests]
    topk_plan_ptr,  # int32 [num_rows + 1, 2]; what lies past the listed rows keeps its values
    num_rows,
    offset,
    max_len,
    ROWS_PER_REQUEST: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    CAPS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
):
    row = tl.arange(0, MAX_ROWS)
    mask = row < num_rows
    length = tl.load(seq_lens_ptr + row // ROWS_PER_REQUEST, mask=mask, other=0).to(tl.int32)
    length = tl.minimum(tl.maximum(length + offset + row % ROWS_PER_REQUEST, 1), max_len)
    length = tl.where(mask, length, 0)

    # One reduction for all thresholds: rows beyond each of them in ten bits, which hold MAX_ROWS.
    beyond = tl.zeros([MAX_ROWS], tl.int64)
    for i in tl.static_range(len(THRESHOLDS)):
        beyond += (length > THRESHOLDS[i]).to(tl.int64) << (10 * i)
    counts = tl.sum(beyond, 0)
    threshold = tl.full([], THRESHOLDS[len(THRESHOLDS) - 1], tl.int32)
    within = counts >= 0
    for i in tl.static_range(len(THRESHOLDS) - 1, -1, -1):
        within = within & (((counts >> (10 * i)) & 1023) <= CAPS[i])
        threshold = tl.where(within, THRESHOLDS[i], threshold)

    listed = (length > threshold).to(tl.int32)
    item = tl.cumsum(listed, 0)
    tl.store(topk_plan_ptr + 2 * item, row, mask=listed == 1)
    tl.store(topk_plan_ptr + 2 * item + 1, length, mask=listed == 1)
    tl.store(topk_plan_ptr, threshold)
    tl.store(topk_plan_ptr + 1, tl.sum(listed, 0))
