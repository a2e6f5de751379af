"""Products of up to eight rows in one launch, whose weights come while the kernel ahead runs, in CUDA C++: early_products.cu.

`tile_products` computes the same of more rows, which tensor cores read from shared memory. Here a block has a sum alone, its
weights stay in registers, and all blocks run at once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa_backend.kernels import cuda_source
from nsa_backend.kernels.block_fp8 import Product, check
from nsa_backend.kernels.cuda_source import CudaKernel, Launch
from nsa_backend.kernels.layer_front_weights import GROUP

SOURCE = Path(__file__).with_name("early_products.cu")
MOST_ROWS = 8
GATES = 8
"""Columns of a product of bfloat16 weights that a block has."""
CHUNK = 64
"""Values of a row or a weight that four lanes have."""
MOST_CHUNKS = 16
"""Of a warp's part."""


@dataclass(frozen=True)
class Tile:
    """How a launch is divided."""

    warps: int  # of a block, that divide the inner dimension
    columns: int  # of a block
    ahead: int  # chunks of a warp's part that its registers hold at once
    before: int  # of those, asked for before the rows are there
    of_sm: int = 2  # blocks of a multiprocessor that are to fit

    def shared_bytes(self, inner: int) -> int:
        """Shared memory of a block."""
        groups = inner // GROUP
        return MOST_ROWS * (inner + CHUNK + groups * 4) + groups * 4 + self.warps * self.columns * MOST_ROWS * 4 + 16


def chunks_of(inner: int, warps: int) -> int:
    """Of a warp's part of rows of so many values; 0 where so many warps cannot divide them."""
    chunks, left = divmod(inner, CHUNK * warps)
    return 0 if left or chunks % 2 or chunks > MOST_CHUNKS else chunks


def tile_for(inner: int) -> Tile | None:
    """Of products whose rows have so many values; None where no division of them is served.

    Those of 7168, 1536 and 2048 values are the fastest measured, of 1 and of 8 rows (benchmarks/tuning/projections.py).
    """
    for warps, ahead in ((8, 4), (4, 6)):
        if chunks := chunks_of(inner, warps):
            return Tile(warps, 32, min(ahead, chunks), min(4, chunks))
    return None


class Weight(ctypes.Structure):
    """`Weight` of early_products.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "scales", "out")),
        *((name, ctypes.c_int) for name in ("columns", "blocks")),
    ]


class Arguments(ctypes.Structure):
    """`Products` of early_products.cu."""

    _fields_ = [
        *((name, Weight) for name in ("first", "second")),
        *((name, ctypes.c_void_p) for name in ("gates", "gates_out", "x", "x_scales", "hidden")),
        *((name, ctypes.c_longlong) for name in ("row_stride", "group_stride")),
        *((name, ctypes.c_int) for name in ("gates_columns", "rows", "before_ours", "unused")),
    ]


def constants(inner: int, tile: Tile, gates_dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """Macros of the source."""
    return {
        "INNER": inner, "WARPS": tile.warps, "COLUMNS": tile.columns, "AHEAD": tile.ahead, "BEFORE": tile.before,
        "BLOCKS_OF_SM": tile.of_sm, "GATES_BF16": int(gates_dtype == torch.bfloat16),
    }  # fmt: skip


def _kernel(device: int, inner: int, tile: Tile, gates_dtype: torch.dtype) -> CudaKernel:
    block = tile.warps * 32, tile.shared_bytes(inner)
    return cuda_source.kernel_on(device, SOURCE, *block, **constants(inner, tile, gates_dtype))


def compile_ahead(device: torch.device, inner: int, gates_dtype: torch.dtype = torch.float32) -> None:
    """Compile it for rows of so many values: while a forward is captured nothing can be compiled.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    _kernel(cuda_source.index_of(device), inner, tile_for(inner), gates_dtype)


def problem(inner: int, *columns: int, gates: int = 0) -> str | None:
    """Why products of rows of `inner` values with FP8 weights of so many columns, and of gates, are not served, or None."""
    tile = tile_for(inner)
    if tile is None:
        return f"rows of {inner} values: 8 or 4 warps do not divide them, by whole groups of {GROUP}"
    if any(width % tile.columns for width in columns) or gates % GATES:
        return f"weights of {columns} columns, {gates} gates: multiples of {tile.columns} and of {GATES} are served"
    return None


def early_products(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    first: Product,
    second: Product | None = None,
    gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    gates_dtype: torch.dtype = torch.float32,
    *,
    before_ours: bool = False,
    tile: Tile | None = None,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, ...]:
    """x times one or two weights, and other rows times the gates' weight; one launch.

    Weights are read before the kernel ahead has ended, which must not write them.

    Args:
        x: float8_e4m3fn [rows, inner], contiguous, 1 to MOST_ROWS rows.
        x_scales: float32 [rows, inner / GROUP] of any strides.
        first, second: weights, contiguous, scales contiguous; no second if None.
        gates: bfloat16 [rows, inner], and its weight, bfloat16 [columns, inner], both contiguous; None for none.
        gates_dtype: of their product, float32 or bfloat16.
        before_ours: whether what is launched next on this stream is a kernel of this package that waits for this one.
        tile: how the launch is divided; that of `tile_for` if None.
        launch: in place of a GPU.

    Returns:
        bfloat16 [rows, columns] of the first and, if there is one, the second; `gates_dtype` [rows, columns] of the gates where
        they are given. All are contiguous.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
        RuntimeError: NVRTC or the driver refuses.
    """
    rows, inner = x.shape
    products = {"first": first} if second is None else {"first": first, "second": second}
    widths = [weight.shape[0] for weight, _ in products.values()]
    of_gates = 0 if gates is None else len(gates[1])
    if (why := problem(inner, *widths, gates=of_gates)) is not None:
        raise ValueError(why)
    tile = tile or tile_for(inner)
    check(x, x_scales, products, gates, MOST_ROWS, tile.columns)
    outs = [torch.empty(rows, width, dtype=torch.bfloat16, device=x.device) for width in widths]
    weights = [
        Weight(weight.data_ptr(), scales.data_ptr(), out.data_ptr(), len(weight), len(weight) // tile.columns)
        for (weight, scales), out in zip(products.values(), outs, strict=True)
    ]
    if gates is not None:
        outs.append(torch.empty(rows, of_gates, dtype=gates_dtype, device=x.device))
    hidden, of_hidden = gates or (x, x)
    arguments = Arguments(
        weights[0], weights[1] if second is not None else Weight(), of_hidden.data_ptr(), outs[-1].data_ptr(), x.data_ptr(),
        x_scales.data_ptr(), hidden.data_ptr(), *x_scales.stride(), of_gates, rows, before_ours,
    )  # fmt: skip
    launch = launch or _kernel(x.device.index, inner, tile, gates_dtype).launch
    launch((sum(weight.blocks for weight in weights) + of_gates // GATES, 1), arguments)
    return tuple(outs)
