"""A block-FP8 product of few rows whose inner dimension is divided among programs: a candidate that is measured, not served.

Programs of one block of columns write their sums to a workspace; the last to arrive adds them up in order, so that the result
does not depend on who was last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128
_SPACES: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}


@triton.jit
def split_gemm_kernel(
    x, x_scales, weight, weight_scales, sums, arrived, out, rows,
    n: tl.constexpr, k: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(0), tl.program_id(1)
    groups: tl.constexpr = k // 128
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, 128)
    begin, end = split * groups // SPLITS, (split + 1) * groups // SPLITS
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for group in tl.range(begin, end, num_stages=STAGES):
        at = group * 128 + inner
        w = tl.load(weight + column[:, None] * k + at[None, :], column[:, None] < n, 0.0)
        a = tl.load(x + row[None, :] * k + at[:, None], row[None, :] < rows, 0.0)
        ws = tl.load(weight_scales + column // 128 * groups + group, column < n, 0.0)
        xs = tl.load(x_scales + row * groups + group, row < rows, 0.0)
        total += tl.dot(w, a) * (ws[:, None] * xs[None, :])
    where = row[None, :] * n + column[:, None]
    inside = (row[None, :] < rows) & (column[:, None] < n)
    if SPLITS == 1:
        tl.store(out + where, total, inside)
    else:
        tl.store(sums + split * ROWS * n + where, total, inside)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + block, 1, sem="acq_rel")
        if before == SPLITS - 1:
            total = tl.zeros([COLUMNS, ROWS], tl.float32)
            for other in range(SPLITS):
                total += tl.load(sums + other * ROWS * n + where, inside, 0.0, cache_modifier=".cg")
            tl.store(out + where, total, inside)
            tl.store(arrived + block, 0)


def split_gemm(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor,
    columns: int, splits: int, warps: int, stages: int,
) -> torch.Tensor:  # fmt: skip
    """bfloat16 [rows, n] = x @ weight.T with scales by group of 128 columns of x and by block of 128 x 128 of the weight.

    Args:
        x: float8_e4m3fn [rows, k], at most 32 rows; x_scales: float32 [rows, k / 128].
        weight: float8_e4m3fn [n, k]; weight_scales: float32 [ceil(n / 128), k / 128].
        columns, splits, warps, stages: of a program's block, programs a block, and how they are compiled.
    """
    (rows, k), n = x.shape, weight.shape[0]
    padded = max(16, triton.next_power_of_2(rows))
    blocks = triton.cdiv(n, columns)
    key = (x.device, n, padded, splits, columns)
    if key not in _SPACES:
        sums = torch.empty(splits * padded * n, dtype=torch.float32, device=x.device)
        _SPACES[key] = sums, torch.zeros(blocks, dtype=torch.int32, device=x.device)
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
    split_gemm_kernel[blocks, splits](
        x, x_scales, weight, weight_scales, *_SPACES[key], out, rows,
        n=n, k=k, ROWS=padded, COLUMNS=columns, SPLITS=splits, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out
