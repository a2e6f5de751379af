"""Products of 9 to 128 rows in one launch, whose weights come while the kernel ahead runs, in CUDA C++.

`early_products` has fewer rows. Up to 32 are tile_products.cu's, where tensor cores take 64 columns of weights at once; of more
row_products.cu has them take 64 rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from nsa_backend.kernels import cuda_source
from nsa_backend.kernels.block_fp8 import Product, check
from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.cuda_source import ALIGNMENT, Boxes, CudaKernel, Launch, TensorMap, tensor_map
from nsa_backend.kernels.layer_front_weights import GROUP

COLUMNS = 64
"""Of a warpgroup; weights have a multiple."""
LINES = 64
"""Rows of a warpgroup of row_products.cu, whose tiles have as many or more, and columns of its blocks of bfloat16 weights."""
ROWS = 16, 32, 64, 128
"""Of a tile."""
MOST_ROWS = max(ROWS)
LEAST_DIVIDED = 4096
"""Values of a row from which on a cluster divides them: fewer fill all multiprocessors as they are."""
MOST_STEPS = 32
"""Groups of a part of the inner dimension, for tile_products.cu."""
AT_ONCE = {1: 132, 4: 120}
"""Blocks of row_products.cu that run at once on H100 and H200, by how many are a cluster (`rows_together_clusters`)."""


@dataclass(frozen=True)
class Tile:
    """How a launch of tile_products.cu is divided."""

    source: ClassVar[Path] = Path(__file__).with_name("tile_products.cu")
    gates: ClassVar[int] = 32
    """Columns of a product of bfloat16 weights that a block has."""

    rows: int  # of a block; those that are not there are zeros
    parts: int  # of the inner dimension, each of a block of a cluster
    wide: int  # times COLUMNS that a block has
    takers: int  # warpgroups that take turns at the steps of a part
    stages: int  # steps of a part that are there or on their way, a multiple of warpgroups

    @property
    def columns(self) -> int:
        """Of a block."""
        return self.wide * COLUMNS

    @property
    def gates_rows(self) -> int:
        """Rows of a block of bfloat16 weights."""
        return self.rows

    @property
    def threads(self) -> int:
        """Of a block: warpgroups, and a warp that brings what they multiply."""
        return self.wide * self.takers * 128 + 32

    @property
    def macros(self) -> dict[str, int]:
        """Of the source."""
        return {"ROWS": self.rows, "PARTS": self.parts, "WIDE": self.wide, "TAKERS": self.takers, "STAGES": self.stages}

    def shared_bytes(self, inner: int) -> int:
        """Shared memory of a block."""
        steps = inner // GROUP // self.parts
        return self.stages * (self.columns + self.rows) * GROUP + steps * self.rows * 4 + 2 * self.stages * 8 + ALIGNMENT

    def divides(self, inner: int) -> bool:
        """Whether rows of so many values have parts of whole steps, not too many, and warpgroups as many steps each."""
        steps, left = divmod(inner, GROUP * self.parts)
        return not left and 0 < steps <= MOST_STEPS and not steps % self.takers and not 2 * steps % (self.wide * self.takers)


@dataclass(frozen=True)
class RowTile:
    """How a launch of row_products.cu is divided."""

    source: ClassVar[Path] = Path(__file__).with_name("row_products.cu")
    gates: ClassVar[int] = LINES
    gates_rows: ClassVar[int] = LINES
    threads: ClassVar[int] = 256 + 32

    rows: int  # 64, at whose steps two warpgroups take turns, or 128, of which each has half
    parts: int  # of the inner dimension, each of a block of a cluster
    columns: int  # of a block, as many as its bfloat16 weights have or more
    stages: int  # steps of a part that are there or on their way, an even number

    @property
    def macros(self) -> dict[str, int]:
        """Of the source."""
        return {"ROWS": self.rows, "PARTS": self.parts, "COLUMNS": self.columns, "STAGES": self.stages}

    @property
    def sums_bytes(self) -> int:
        """Of shared memory, those that sums take."""
        return 2 * LINES * (self.columns + 8) * 4

    def shared_bytes(self, inner: int) -> int:
        """Shared memory of a block, whatever rows have."""
        return self.stages * (self.columns + self.rows) * GROUP + self.sums_bytes + 2 * self.stages * 8 + 8 + ALIGNMENT

    def divides(self, inner: int) -> bool:
        """Whether rows of so many values have parts of whole steps, and warpgroups as many each."""
        steps, left = divmod(inner, GROUP * self.parts)
        return not left and steps > 0 and not steps % (2 * LINES // self.rows)


def tile_for(inner: int, rows: int, widths: Sequence[int], gates: int = 0) -> Tile | RowTile | None:
    """Of products of so many rows of `inner` values with weights of so many columns; None where no division is served.

    Of 7168 and 1536 values about the fastest measured (`tile_products_by_division` and `row_products` of
    attention_0_5_23_h200.json).
    """
    of_tile = next((most for most in ROWS if rows <= most), None)
    if of_tile is None:
        return None
    parts = 4 if inner >= LEAST_DIVIDED else 1
    if of_tile < LINES:
        tile = Tile(of_tile, parts, 2, 1, 8) if parts > 1 else Tile(of_tile, 1, 1, 2, 8)
        return tile if tile.divides(inner) else None
    tiles = [RowTile(of_tile, parts, columns, 4 if of_tile == MOST_ROWS else 6) for columns in (64, 96, 128)]
    tile = next((tile for tile in tiles if blocks_of(tile, widths, gates) <= AT_ONCE[parts]), tiles[-1])
    return tile if tile.divides(inner) else None


def blocks_of(tile: Tile | RowTile, widths: Sequence[int], gates: int) -> int:
    """Of a launch: `parts` for each of its divisions of columns."""
    return tile.parts * (sum(blocks(width, tile.columns) for width in widths) + blocks_of_gates(tile, gates))


def blocks_of_gates(tile: Tile | RowTile, gates: int) -> int:
    """Divisions of so many columns of bfloat16 weights, and of their rows."""
    return blocks(gates, tile.gates) * (tile.rows // tile.gates_rows)


class Weight(ctypes.Structure):
    """`Weight` of product_steps.cuh."""

    _fields_ = [("scales", ctypes.c_void_p), ("out", ctypes.c_void_p), ("columns", ctypes.c_int), ("blocks", ctypes.c_int)]


class Arguments(ctypes.Structure):
    """`Products` of product_steps.cuh, whose size is a multiple of 64."""

    _fields_ = [
        *((name, TensorMap) for name in ("first", "second", "gates", "x", "hidden")),
        *((name, Weight) for name in ("of_first", "of_second", "of_gates")),
        ("x_scales", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("row_stride", "group_stride")),
        *((name, ctypes.c_int) for name in ("rows", "before_ours")),
        ("unused", ctypes.c_int * 6),
    ]


def constants(inner: int, tile: Tile | RowTile, gates_dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """Macros of the tile's source."""
    return {"INNER": inner, "GATES_BF16": int(gates_dtype == torch.bfloat16), **tile.macros}


def _kernel(device: int, inner: int, tile: Tile | RowTile, gates_dtype: torch.dtype) -> CudaKernel:
    block = tile.threads, tile.shared_bytes(inner)
    return cuda_source.kernel_on(device, tile.source, *block, **constants(inner, tile, gates_dtype))


def compile_ahead(
    device: torch.device,
    inner: int,
    rows: range,
    widths: Sequence[int],
    gates: int = 0,
    gates_dtype: torch.dtype = torch.float32,
) -> None:
    """Compile it for so many rows, as `tile_for` takes the rest: while a forward is captured nothing can be compiled.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    for tile in {tile_for(inner, count, widths, gates) for count in rows}:
        _kernel(cuda_source.index_of(device), inner, tile, gates_dtype)


def problem(inner: int, *columns: int, gates: int = 0) -> str | None:
    """Why products of rows of `inner` values with FP8 weights of so many columns, and of gates, are not served, or None."""
    if any(tile_for(inner, rows, columns, gates) is None for rows in ROWS):
        return f"rows of {inner} values: even numbers of {GROUP} up to {LEAST_DIVIDED} are served, or multiples of {8 * GROUP}"
    if any(width % COLUMNS for width in columns) or gates % Tile.gates:
        return f"weights of {columns} columns, {gates} gates: multiples of {COLUMNS} and of {Tile.gates} are served"
    return None


def tile_products(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    first: Product,
    second: Product | None = None,
    gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    gates_dtype: torch.dtype = torch.float32,
    *,
    before_ours: bool = False,
    tile: Tile | RowTile | None = None,
    launch: Launch | None = None,
    boxes: Boxes = tensor_map,
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
        launch, boxes: in place of a GPU.

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
    check(x, x_scales, products, gates, MOST_ROWS, COLUMNS)
    tile = tile or tile_for(inner, rows, widths, of_gates)
    outs = [torch.empty(rows, width, dtype=torch.bfloat16, device=x.device) for width in widths]
    weights = [
        Weight(scales.data_ptr(), out.data_ptr(), out.shape[1], blocks(out.shape[1], tile.columns))
        for (_, scales), out in zip(products.values(), outs, strict=True)
    ]
    maps = [boxes(weight, tile.columns) for weight, _ in products.values()]
    if gates is None:
        others = Weight(), TensorMap(), TensorMap()
    else:
        outs.append(torch.empty(rows, of_gates, dtype=gates_dtype, device=x.device))
        hidden, of_hidden = (
            boxes(tensor.view(torch.uint8), box) for tensor, box in zip(gates, (tile.gates_rows, tile.gates), strict=True)
        )
        others = Weight(0, outs[-1].data_ptr(), of_gates, blocks_of_gates(tile, of_gates)), of_hidden, hidden
    arguments = Arguments(
        maps[0], maps[-1], others[1], boxes(x, tile.rows), others[2], weights[0],
        weights[1] if second is not None else Weight(), others[0], x_scales.data_ptr(), *x_scales.stride(), rows, before_ours,
    )  # fmt: skip
    launch = launch or _kernel(x.device.index, inner, tile, gates_dtype).launch
    launch((blocks_of(tile, widths, of_gates), 1), arguments)
    return tuple(outs)
