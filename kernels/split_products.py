"""Products of the same few rows in one launch, whose sums over a long inner dimension are divided among programs.

A GEMM that gives every block of columns to one program takes as long as that program's walk over the inner dimension, which
is 7168 values in the first projections of a layer. Here SPLITS programs walk a part each; the last one to arrive adds the
parts in order, so that the result does not depend on who was last. Up to two products are of block-FP8 weights, and another,
which gives the gates of an indexer's heads and in some models its key too, is of bfloat16 weights and of the row before it was
quantised.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import require
from nsa_backend.kernels.dependent_launch import early, let_next_begin, wait_for_kernel_ahead
from nsa_backend.kernels.layer_front_weights import GROUP

COLUMNS = 64
"""Of a product of FP8 weights, that a program sums."""
GATES = 32
"""Of a product of bfloat16 weights: as many bytes."""
FEW_ROWS = 32
"""Up to which dividing the sums pays for the products of one or two launches (benchmarks/tuning/projections.py)."""
FEW_ROWS_OF_THREE = 128
"""The same where three launches become one: qkv_a, wk and the gates."""
LEAST_INNER = 4096
"""Values of a row from which on dividing the sums pays for one product; at 1536 and 2048 it does for two
(benchmarks/tuning/projections.py)."""
TILES = {16: (8, 4), 32: (4, 6), 64: (3, 4), 128: (3, 4)}
"""By rows, padded: programs a block of columns, and stages that loads run ahead. The fastest measured."""
TILES_OF_QUERIES = {16: (2, 4), 32: (2, 4), 64: (2, 4), 128: (1, 4)}
"""The same for both projections of the query's latent, whose inner dimension is 1536 or 2048."""
MOST_ROWS = max(TILES)

Product = tuple[torch.Tensor, torch.Tensor]
"""float8_e4m3fn [columns, inner], and float32 scales [ceil(columns / GROUP), inner / GROUP] of its blocks."""


@triton.jit
def is_last_to_arrive(part, sums, arrived, split, split_size, SPLITS: tl.constexpr):
    """Store this program's part of a sum; whether all SPLITS parts are there. `sums`: where the first part goes."""
    tl.store(sums + split * split_size, part)
    tl.debug_barrier()  # every warp has stored its part
    return tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1


@triton.jit
def sum_of_parts(part, sums, split_size, SPLITS: tl.constexpr):
    """All parts of a sum in their order; `part` is any of them."""
    total = tl.zeros_like(part)
    for other in tl.static_range(SPLITS):
        total += tl.load(sums + other * split_size, cache_modifier=".cg")
    return total


@triton.jit
def add_to_splits(total, sums, arrived, out, there, SPLIT_SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Store this program's part of a block; the last of SPLITS programs stores the sum."""
    if is_last_to_arrive(total, sums, arrived, tl.program_id(1), SPLIT_SIZE, SPLITS):
        tl.store(out, sum_of_parts(total, sums, SPLIT_SIZE, SPLITS), there)
        tl.store(arrived, 0)


@triton.jit(do_not_specialize=["row_stride", "group_stride", "rows"])
def split_products_kernel(
    x_ptr, x_scales_ptr, row_stride, group_stride, first_ptr, first_scales_ptr, second_ptr, second_scales_ptr,
    first_out_ptr, second_out_ptr, hidden_ptr, gates_weight_ptr, gates_out_ptr, sums_ptr, arrived_ptr, rows,
    INNER: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, GATES: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    BEFORE_OURS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Program (block of columns of one product, split). `arrived` is zero before, and left so."""
    let_next_begin(BEFORE_OURS, COMPILED)
    wait_for_kernel_ahead(COMPILED)
    block, split = tl.program_id(0), tl.program_id(1)
    groups: tl.constexpr = INNER // GROUP
    split_size: tl.constexpr = (FIRST + SECOND + THIRD) * ROWS
    first_group, end_group = split * groups // SPLITS, (split + 1) * groups // SPLITS
    row, inner = tl.arange(0, ROWS), tl.arange(0, GROUP)
    there = row < rows
    if THIRD > 0:  # noqa: SIM102  the compiler leaves it out by this alone
        if block >= (FIRST + SECOND) // COLUMNS:
            begin = block * GATES - (FIRST + SECOND) // COLUMNS * GATES
            column = begin + tl.arange(0, GATES)
            total = tl.zeros([GATES, ROWS], tl.float32)
            for group in tl.range(first_group, end_group, num_stages=STAGES - 1):
                at = group * GROUP + inner
                w = tl.load(gates_weight_ptr + column[:, None] * INNER + at[None, :])
                values = tl.load(hidden_ptr + row[None, :] * INNER + at[:, None], there[None, :], 0.0)
                if not COMPILED:  # the interpreter multiplies the bits of bfloat16
                    w, values = w.to(tl.float32), values.to(tl.float32)
                total = tl.dot(w, values, total)
            sums = sums_ptr + (FIRST + SECOND + column[:, None]) * ROWS + row[None, :]
            out = gates_out_ptr + row[None, :] * THIRD + column[:, None]
            add_to_splits(total, sums, arrived_ptr + block, out, there[None, :], split_size, SPLITS)
            return
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
    column = begin + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for group in tl.range(first_group, end_group, num_stages=STAGES):
        at = group * GROUP + inner
        w = tl.load(weight + column[:, None] * INNER + at[None, :])
        values = tl.load(x_ptr + row[None, :] * INNER + at[:, None], there[None, :], 0.0)
        w_scale = tl.load(weight_scales + begin // GROUP * groups + group)  # one, as blocks of columns divide GROUP
        x_scale = tl.load(x_scales_ptr + row * row_stride + group * group_stride, there, 0.0)
        total += tl.dot(w, values) * (x_scale * w_scale)[None, :]
    sums = sums_ptr + (block * COLUMNS + tl.arange(0, COLUMNS)[:, None]) * ROWS + row[None, :]
    add_to_splits(
        total, sums, arrived_ptr + block, out + row[None, :] * width + column[:, None], there[None, :], split_size, SPLITS
    )


def counters(first: torch.Tensor, second: torch.Tensor | None, gates: torch.Tensor | None = None) -> torch.Tensor:
    """What `split_products` of these weights counts its programs with: zeros, and zeros again after every launch.

    Launches that may run at the same time need one each.
    """
    columns = (0 if weight is None else weight.shape[0] for weight in (first, second, gates))
    return torch.zeros(_blocks(*columns), dtype=torch.int32, device=first.device)


def _blocks(first: int, second: int, gates: int) -> int:
    return (first + second) // COLUMNS + gates // GATES


def check_product(name: str, product: Product, inner: int, multiple: int) -> None:
    """Refuse weights that a kernel would misread, or whose columns are no multiple of `multiple`."""
    weight, scales = product
    columns = weight.shape[0]
    fits = weight.dtype == torch.float8_e4m3fn and weight.is_contiguous() and not columns % multiple
    form = f"contiguous torch.float8_e4m3fn [a multiple of {multiple}, {inner}]"
    require(fits and weight.shape[1] == inner, name, weight, form, "the kernel would misread it")
    of_weight = blocks(columns, GROUP), inner // GROUP
    fits = scales.dtype == torch.float32 and scales.shape == of_weight and scales.is_contiguous()
    require(fits, f"scales of {name}", scales, f"contiguous torch.float32 {list(of_weight)}", "the kernel would misread them")


def split_products(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    first: Product,
    second: Product | None,
    arrived: torch.Tensor,
    tile: tuple[int, int] | None = None,
    gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    gates_dtype: torch.dtype = torch.float32,
    *,
    before_ours: bool = False,
) -> tuple[torch.Tensor, ...]:
    """x times one or two weights, and other rows times the gates' weight; one launch.

    Args:
        x: float8_e4m3fn [rows, inner], contiguous, 1 to MOST_ROWS rows, inner a multiple of GROUP.
        x_scales: float32 [rows, inner / GROUP] of any strides.
        first, second: weights, contiguous, columns a multiple of COLUMNS, scales contiguous; no second if None.
        arrived: from `counters`, of these weights or of wider ones.
        tile: programs a block of columns, and stages; that of TILES for so many rows if None.
        gates: bfloat16 [rows, inner], and its weight, bfloat16 [a multiple of GATES, inner], both contiguous; None for none.
        gates_dtype: of their product.
        before_ours: whether what is launched next on this stream is a kernel of this package that waits for this one.

    Returns:
        bfloat16 [rows, columns] of the first and, if there is one, the second; `gates_dtype` [rows, columns] of the gates where
        they are given. All are contiguous.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    (rows, inner), padded = x.shape, padded_rows(x.shape[0])
    splits, stages = tile or TILES[padded]
    products = {"first": first} if second is None else {"first": first, "second": second}
    for name, product in products.items():
        check_product(name, product, inner, COLUMNS)
    fits = x.dtype == torch.float8_e4m3fn and x.is_contiguous() and not inner % GROUP
    require(fits, "x", x, f"contiguous torch.float8_e4m3fn [rows, a multiple of {GROUP}]", "the kernel would misread it")
    fits = x_scales.dtype == torch.float32 and x_scales.shape == (rows, inner // GROUP)
    require(fits, "x_scales", x_scales, f"torch.float32 {[rows, inner // GROUP]}", "the kernel would misread them")
    for name, tensor, least in () if gates is None else (("hidden", gates[0], rows), ("weight of the gates", gates[1], GATES)):
        fits = tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.shape[1:] == (inner,)
        fits &= tensor.shape[0] == rows if name == "hidden" else not tensor.shape[0] % GATES
        form = f"contiguous torch.bfloat16 [{'' if name == 'hidden' else 'a multiple of '}{least}, {inner}]"
        require(fits, name, tensor, form, "the kernel would misread it")
    weights = first[0], None if second is None else second[0], None if gates is None else gates[1]
    widths = [0 if weight is None else weight.shape[0] for weight in weights]
    programs = _blocks(*widths)
    fits = arrived.dtype == torch.int32 and arrived.dim() == 1 and len(arrived) >= programs
    require(fits, "arrived", arrived, f"torch.int32 [{programs} or more]", "the kernel would count past its end")
    dtypes = torch.bfloat16, torch.bfloat16, gates_dtype
    outs = [torch.empty(rows, width, dtype=dtype, device=x.device) for width, dtype in zip(widths, dtypes, strict=True)]
    hidden, weight = gates or (x, x)
    of_second = second or first  # which nothing reads where there is none
    sums = torch.empty(splits * sum(widths) * padded, dtype=torch.float32, device=x.device)
    split_products_kernel[(programs, splits)](
        x, x_scales, *x_scales.stride(), *first, *of_second, *outs[:2], hidden, weight, outs[2], sums, arrived, rows,
        INNER=inner, FIRST=widths[0], SECOND=widths[1], THIRD=widths[2], ROWS=padded, COLUMNS=COLUMNS, GATES=GATES,
        SPLITS=splits, STAGES=stages, GROUP=GROUP, BEFORE_OURS=before_ours,
        COMPILED=x.is_cuda, num_warps=4, **early(x.is_cuda),
    )  # fmt: skip
    return tuple(out for out, width in zip(outs, widths, strict=True) if width)


def padded_rows(rows: int) -> int:
    """Rows of the kernel's tile.

    Raises:
        ValueError: there are none, or more than MOST_ROWS.
    """
    if not 0 < rows <= MOST_ROWS:
        raise ValueError(f"x has {rows} rows and the kernel takes 1 to {MOST_ROWS}")
    return next(most for most in TILES if rows <= most)
