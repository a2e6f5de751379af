"""Products of a few rows in one launch, each weight read once by the one program that sums its column.

Tensor cores take sixteen rows where there are one to four, and `split_products` divides a sum among programs that then wait
for one another. Here a program has whole columns and multiplies as it reads, as fast as memory gives. It quantises its input
itself where that is bfloat16, which spares a launch. Up to two products are of block-FP8 weights, another of bfloat16 weights
and of the rows before they were quantised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import blocks, power_of_two
from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.dependent_launch import early, let_next_begin, wait_for_kernel_ahead
from nsa_backend.kernels.lane_sums import LANE, LANE_OF_BFLOAT16, sum_of_lanes
from nsa_backend.kernels.layer_front_steps import GROUP as GROUP_OF_KERNEL
from nsa_backend.kernels.layer_front_steps import quantised
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.kernels.split_products import Product

MOST_ROWS = 4
"""By arithmetic: with more the multiplications take as long as the bytes. Nothing of it was timed."""


@dataclass(frozen=True)
class Tile:
    """How much a program has."""

    columns: int = 8  # of a product; divides GROUP
    step: int = 512  # of their sums, at once
    stages: int = 4
    warps: int = 4


SERVED = Tile()
"""Unless a call says otherwise. Not tuned: no GPU has run it."""


def problem(inner: int, columns: int, tile: Tile | None = None) -> str | None:
    """Why a weight of this shape cannot have the launch, or None."""
    tile = tile or SERVED
    if inner % tile.step or columns % tile.columns:
        return f"a weight of {columns} columns of {inner}: multiples of {tile.columns} and of {tile.step} are served"
    return None


@triton.jit(do_not_specialize=["row_stride", "group_stride", "rows"])
def row_products_kernel(
    x_ptr,  # bfloat16 [rows, INNER], or FP8
    x_scales_ptr,  # float32 [rows, INNER / GROUP], strides below; where x is FP8
    row_stride,
    group_stride,
    first_ptr,  # FP8 [FIRST, INNER]
    first_scales_ptr,  # float32 [FIRST / GROUP, INNER / GROUP], rows rounded up
    second_ptr,  # FP8 [SECOND, INNER]
    second_scales_ptr,
    third_ptr,  # bfloat16 [THIRD, INNER]
    first_out_ptr,  # bfloat16 [rows, FIRST]
    second_out_ptr,
    third_out_ptr,  # [rows, THIRD]
    rows,
    INNER: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    QUANTISES: tl.constexpr,
    POWERS: tl.constexpr,
    BEFORE_OURS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program (block of columns of one product). All but `x_scales` contiguous."""
    let_next_begin(BEFORE_OURS, COMPILED)
    wait_for_kernel_ahead(COMPILED)
    block = tl.program_id(0)
    groups: tl.constexpr = STEP // GROUP_OF_KERNEL
    of_inner: tl.constexpr = INNER // GROUP_OF_KERNEL
    row, column, at = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    there = row < rows
    if THIRD > 0:  # noqa: SIM102  the compiler leaves it out by this alone
        if block >= (FIRST + SECOND) // COLUMNS:
            begin = block * COLUMNS - (FIRST + SECOND)
            weights = third_ptr + (begin + column)[None, :, None] * INNER + at[None, None, :]
            hidden = x_ptr + row[:, None, None] * INNER + at[None, None, :]
            sums = tl.zeros([ROWS, COLUMNS, STEP // LANE_OF_BFLOAT16], tl.float32)
            for start in tl.range(0, INNER, STEP, num_stages=STAGES):
                values = tl.load(hidden + start, there[:, None, None], 0.0).to(tl.float32)
                sums += sum_of_lanes(tl.load(weights + start).to(tl.float32) * values, LANE_OF_BFLOAT16)
            out = third_out_ptr + row[:, None] * THIRD + begin + column[None, :]
            tl.store(out, tl.sum(sums, axis=2), there[:, None])
            return
    if block < FIRST // COLUMNS:
        weight, scales, out, width, begin = first_ptr, first_scales_ptr, first_out_ptr, FIRST, block * COLUMNS
    else:
        weight, scales, out, width, begin = second_ptr, second_scales_ptr, second_out_ptr, SECOND, block * COLUMNS - FIRST
    weights = weight + (begin + column)[None, :, None] * INNER + at[None, None, :]
    part = tl.arange(0, ROWS * groups)  # a group of a row
    of_row, group = part // groups, part % groups
    given, inside = of_row < rows, tl.arange(0, GROUP_OF_KERNEL)
    x = x_ptr + (of_row * INNER + group * GROUP_OF_KERNEL)[:, None] + inside[None, :]
    scales += begin // GROUP_OF_KERNEL * of_inner + group
    total = tl.zeros([ROWS, COLUMNS, STEP // LANE], tl.float32)
    for start in tl.range(0, INNER, STEP, num_stages=STAGES):
        values = tl.load(x + start, given[:, None], 0.0)
        if QUANTISES:
            values, scale = quantised(values.to(tl.float32), POWERS, COMPILED)
        else:
            of_groups = (group + start // GROUP_OF_KERNEL) * group_stride
            scale = tl.load(x_scales_ptr + of_row * row_stride + of_groups, given, 0.0)[:, None]
        scale *= tl.load(scales + start // GROUP_OF_KERNEL)[:, None]
        values = tl.reshape(values.to(tl.float32) * scale, (ROWS, 1, STEP))
        total += sum_of_lanes(tl.load(weights + start).to(tl.float32) * values, LANE)
    out += row[:, None] * width + begin + column[None, :]
    tl.store(out, tl.sum(total, axis=2).to(tl.bfloat16), there[:, None])


def row_products(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    first: Product,
    second: Product | None = None,
    third: torch.Tensor | None = None,
    third_dtype: torch.dtype = torch.float32,
    *,
    scales: Scales = Scales.EXACT,
    before_ours: bool = False,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, ...]:
    """x times one or two weights of block FP8, and where there is one times a weight of bfloat16; one launch.

    Args:
        x: bfloat16 [rows, inner], contiguous, 1 to MOST_ROWS rows; or without `third` FP8 values of that shape, and their
            scales, float32 [rows, inner / GROUP] of any strides.
        first, second: weights as of `split_products`, columns and inner multiples of the tile's; no second if None.
        third: bfloat16 [columns, inner], contiguous; it takes x as it is.
        third_dtype: of its product.
        scales: with which a bfloat16 x is quantised for the others.
        before_ours: whether what is launched next on this stream is a kernel of this package that waits for this one.
        tile: of the programs.

    Returns:
        bfloat16 [rows, columns] of the first and, if there is one, the second; `third_dtype` [rows, columns] of the third. All
        are contiguous.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    tile = tile or SERVED
    values, x_scales = x if isinstance(x, tuple) else (x, None)
    rows, inner = values.shape
    require(0 < rows <= MOST_ROWS, "x", values, f"of 1 to {MOST_ROWS} rows", "more rows are tensor cores' work")
    check_tensor("x", values, torch.bfloat16 if x_scales is None else torch.float8_e4m3fn, (rows, inner))
    if x_scales is not None:
        fits = x_scales.dtype == torch.float32 and x_scales.shape == (rows, inner // GROUP) and third is None
        form = f"torch.float32 {[rows, inner // GROUP]}, without a third weight"
        require(fits, "scales of x", x_scales, form, "the kernel would misread them")
    for name, product in {"first": first, "second": second}.items():
        if product is not None:
            _check_weight(name, product[0], tile)
            check_tensor(name, product[0], torch.float8_e4m3fn, (len(product[0]), inner))
            check_tensor(f"scales of {name}", product[1], torch.float32, (blocks(len(product[0]), GROUP), inner // GROUP))
    if third is not None:
        _check_weight("third", third, tile)
        check_tensor("third", third, torch.bfloat16, (len(third), inner))
    widths = [len(first[0]), 0 if second is None else len(second[0]), 0 if third is None else len(third)]
    dtypes = torch.bfloat16, torch.bfloat16, third_dtype
    outs = [torch.empty(rows, width, dtype=dtype, device=values.device) for width, dtype in zip(widths, dtypes, strict=True)]
    of_second = second or first  # which nothing reads where there is none
    strides = (0, 0) if x_scales is None else x_scales.stride()
    row_products_kernel[(sum(widths) // tile.columns,)](
        values, first[1] if x_scales is None else x_scales, *strides, *first, *of_second,
        values if third is None else third, *outs, rows, INNER=inner, FIRST=widths[0], SECOND=widths[1], THIRD=widths[2],
        ROWS=power_of_two(rows), COLUMNS=tile.columns, STEP=tile.step, STAGES=tile.stages, QUANTISES=x_scales is None,
        POWERS=scales is Scales.POWERS_OF_TWO, BEFORE_OURS=before_ours, COMPILED=values.is_cuda, num_warps=tile.warps,
        **early(values.is_cuda),
    )  # fmt: skip
    return tuple(out for out, width in zip(outs, widths, strict=True) if width)


def _check_weight(name: str, weight: torch.Tensor, tile: Tile) -> None:
    if (why := problem(weight.shape[1], len(weight), tile)) is not None:
        raise ValueError(f"{name} is {why}")
