"""Two block-FP8 products of the same few rows in one launch, whose sums over a long inner dimension are divided among programs.

A GEMM that gives every block of columns to one program takes as long as that program's walk over the inner dimension, which
is 7168 values in the first projections of a layer. Here SPLITS programs walk a part each; the last one to arrive adds the
parts in order, so that the result does not depend on who was last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.checks import require
from nsa_backend.kernels.layer_front_weights import GROUP

COLUMNS = 64
"""Of a product, that a program sums."""
MOST_ROWS = 32
LEAST_INNER = 4096
"""Values of a row from which on dividing the sums pays; at 1536 and 2048 it does not (benchmarks/tuning/projections.py)."""
TILES = {16: (8, 4), 32: (4, 6)}
"""By rows, padded: programs a block of columns, and stages that loads run ahead. The fastest measured."""

Product = tuple[torch.Tensor, torch.Tensor]
"""float8_e4m3fn [columns, inner], and float32 scales [ceil(columns / GROUP), inner / GROUP] of its blocks."""


@triton.jit(do_not_specialize=["row_stride", "group_stride", "rows"])
def split_products_kernel(
    x_ptr, x_scales_ptr, row_stride, group_stride, first_ptr, first_scales_ptr, second_ptr, second_scales_ptr,
    first_out_ptr, second_out_ptr, sums_ptr, arrived_ptr, rows,
    INNER: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program (block of columns of either product, split). `arrived` is zero before, and left so."""
    block, split = tl.program_id(0), tl.program_id(1)
    if block < FIRST // COLUMNS:
        weight, weight_scales, out, width, begin = first_ptr, first_scales_ptr, first_out_ptr, FIRST, block * COLUMNS
    else:
        weight, weight_scales, out, width, begin = (
            second_ptr,
            second_scales_ptr,
            second_out_ptr,
            SECOND,
            block * COLUMNS - FIRST,
        )
    groups: tl.constexpr = INNER // GROUP
    column, row, inner = begin + tl.arange(0, COLUMNS), tl.arange(0, ROWS), tl.arange(0, GROUP)
    there = row < rows
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for group in tl.range(split * groups // SPLITS, (split + 1) * groups // SPLITS, num_stages=STAGES):
        at = group * GROUP + inner
        w = tl.load(weight + column[:, None] * INNER + at[None, :])
        values = tl.load(x_ptr + row[None, :] * INNER + at[:, None], there[None, :], 0.0)
        w_scale = tl.load(weight_scales + begin // GROUP * groups + group)  # one, as blocks of columns divide GROUP
        x_scale = tl.load(x_scales_ptr + row * row_stride + group * group_stride, there, 0.0)
        total += tl.dot(w, values) * (x_scale * w_scale)[None, :]
    part = (block * COLUMNS + tl.arange(0, COLUMNS)[:, None]) * ROWS + row[None, :]
    all_columns: tl.constexpr = FIRST + SECOND
    tl.store(sums_ptr + split * all_columns * ROWS + part, total)
    tl.debug_barrier()  # every warp has stored its part
    if tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel") == SPLITS - 1:
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(sums_ptr + other * all_columns * ROWS + part, cache_modifier=".cg")
        tl.store(out + row[None, :] * width + column[:, None], total, there[None, :])
        tl.store(arrived_ptr + block, 0)


def counters(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """What `split_products` of these two weights counts its programs with: zeros, and zeros again after every launch.

    Launches that may run at the same time need one each.
    """
    return torch.zeros((first.shape[0] + second.shape[0]) // COLUMNS, dtype=torch.int32, device=first.device)


def split_products(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    first: Product,
    second: Product,
    arrived: torch.Tensor,
    tile: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x times both weights; one launch.

    Args:
        x: float8_e4m3fn [rows, inner], contiguous, 1 to MOST_ROWS rows, inner a multiple of GROUP.
        x_scales: float32 [rows, inner / GROUP] of any strides.
        first, second: weights, contiguous, columns a multiple of COLUMNS, scales contiguous.
        arrived: from `counters`.
        tile: programs a block of columns, and stages; that of TILES if None.

    Returns:
        bfloat16 [rows, columns] of either, contiguous.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    (rows, inner), padded = x.shape, padded_rows(x.shape[0])
    splits, stages = tile or TILES[padded]
    for name, (weight, scales) in {"first": first, "second": second}.items():
        columns = weight.shape[0]
        fits = weight.dtype == torch.float8_e4m3fn and weight.is_contiguous() and not columns % COLUMNS
        form = f"contiguous torch.float8_e4m3fn [a multiple of {COLUMNS}, {inner}]"
        require(fits and weight.shape[1] == inner, name, weight, form, "the kernel would misread it")
        blocks = -(-columns // GROUP), inner // GROUP
        fits = scales.dtype == torch.float32 and scales.shape == blocks and scales.is_contiguous()
        require(fits, f"scales of {name}", scales, f"contiguous torch.float32 {list(blocks)}", "the kernel would misread them")
    fits = x.dtype == torch.float8_e4m3fn and x.is_contiguous() and not inner % GROUP
    require(fits, "x", x, f"contiguous torch.float8_e4m3fn [rows, a multiple of {GROUP}]", "the kernel would misread it")
    fits = x_scales.dtype == torch.float32 and x_scales.shape == (rows, inner // GROUP)
    require(fits, "x_scales", x_scales, f"torch.float32 {[rows, inner // GROUP]}", "the kernel would misread them")
    widths = first[0].shape[0], second[0].shape[0]
    fits = arrived.dtype == torch.int32 and arrived.shape == (sum(widths) // COLUMNS,)
    require(fits, "arrived", arrived, f"torch.int32 [{sum(widths) // COLUMNS}]", "the kernel would count past its end")
    outs = [torch.empty(rows, width, dtype=torch.bfloat16, device=x.device) for width in widths]
    sums = torch.empty(splits * sum(widths) * padded, dtype=torch.float32, device=x.device)
    split_products_kernel[(len(arrived), splits)](
        x, x_scales, *x_scales.stride(), *first, *second, *outs, sums, arrived, rows, INNER=inner, FIRST=widths[0],
        SECOND=widths[1], ROWS=padded, COLUMNS=COLUMNS, SPLITS=splits, STAGES=stages, GROUP=GROUP, num_warps=4,
    )  # fmt: skip
    return outs[0], outs[1]


def padded_rows(rows: int) -> int:
    """Rows of the kernel's tile.

    Raises:
        ValueError: there are none, or more than MOST_ROWS.
    """
    if not 0 < rows <= MOST_ROWS:
        raise ValueError(f"x has {rows} rows and the kernel takes 1 to {MOST_ROWS}")
    return next(most for most in TILES if rows <= most)
