"""Products of tiles of rows against torch's: exactly where no sum is rounded, else nearly, on poisoned memory."""

from __future__ import annotations

import re

import pytest
import torch
from block_products import MISREAD, OF_LAYERS, check, inputs, misread
from emulated import multiplying_tiles

from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.tile_products import (
    AT_ONCE,
    MOST_ROWS,
    ROWS,
    RowTile,
    Tile,
    blocks_of,
    constants,
    problem,
    tile_for,
    tile_products,
)

pytestmark = pytest.mark.usefixtures("poisoned")

NEAR = 2**-11
"""Tensor cores add up FP8 products with some 14 bits."""
TILES = {"whole rows": (1, 1, 1, 9), "in turns": (1, 2, 2, 4), "two parts": (2, 1, 2, 4), "four parts": (4, 2, 1, 2)}


@pytest.mark.parametrize(("rows", "widths", "gates", "exact"), [(3, (192, 128), 64, False), (29, (64,), 160, True)])
@pytest.mark.parametrize("tile", TILES)
def test_products(rows, widths, gates, exact, tile):
    """Of 1024 values a row: eight steps, two of them a block's where there are four parts."""
    multiply_in(rows, widths, gates, exact, Tile(next(most for most in ROWS if rows <= most), *TILES[tile]))


@pytest.mark.parametrize(
    ("rows", "widths", "gates", "exact", "cut"),
    [
        (33, (192, 128), 64, False, RowTile(64, 4, 96, 4)), (61, (320,), 160, True, RowTile(64, 2, 64, 4)),
        (128, (192, 64), 64, True, RowTile(MOST_ROWS, 1, 128, 4)), (127, (448, 128), 96, False, RowTile(MOST_ROWS, 2, 96, 2)),
        (70, (256,), 0, True, RowTile(MOST_ROWS, 4, 64, 4)), (97, (320, 64), 64, True, RowTile(MOST_ROWS, 4, 96, 2)),
    ],
)  # fmt: skip
def test_products_of_more_rows(rows, widths, gates, exact, cut):
    """Columns of a block that share a scale, or have two; steps that have room at once, or come in turns."""
    multiply_in(rows, widths, gates, exact, cut)


def multiply_in(rows: int, widths: tuple[int, ...], gates: int, exact: bool, cut: Tile | RowTile) -> None:
    torch.manual_seed(rows)
    given = inputs(rows, 1024, widths, gates, rows % 2 == 1, exact, "cpu")
    dtype = torch.bfloat16 if rows in (29, 61) else torch.float32
    check(tile_products, given, exact, tile=cut, gates_dtype=dtype, **multiplying_tiles(1024, cut, dtype, seed=rows))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 31, 32, 33, 64, 65, 96, 127, 128])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("which", OF_LAYERS)
def test_products_of_a_layer(rows, exact, which):
    torch.manual_seed(rows)
    inner, widths, gates = OF_LAYERS[which]
    dtype = torch.bfloat16 if gates == 160 else torch.float32
    check(tile_products, inputs(rows, inner, widths, gates, rows % 2 == 1, exact, "cuda"), exact, NEAR, gates_dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("which", OF_LAYERS)
def test_it_compiles_for_hopper_with_all_in_registers(which, rows):
    inner, widths, gates = OF_LAYERS[which]
    tile = tile_for(inner, rows, widths, gates)
    _, said = compiled(tile.source, constants(inner, tile))
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", said)]
    assert spilled == [0, 0]
    assert "serialized" not in said  # products that the compiler would make wait for each other


@pytest.mark.parametrize("rows", [33, 64, 65, MOST_ROWS])
@pytest.mark.parametrize("which", OF_LAYERS)
def test_blocks_of_many_rows_run_at_once(which, rows):
    """And a block has no more columns than that takes."""
    inner, widths, gates = OF_LAYERS[which]
    tile = tile_for(inner, rows, widths, gates)
    assert blocks_of(tile, widths, gates) <= AT_ONCE[tile.parts]
    narrower = RowTile(tile.rows, tile.parts, tile.columns - 32, tile.stages)
    assert tile.columns == 64 or blocks_of(narrower, widths, gates) > AT_ONCE[tile.parts]


def test_products_that_no_block_is_too_narrow_for_have_the_widest():
    assert tile_for(1536, MOST_ROWS, (24576, 8192)).columns == 128


def test_what_no_division_serves():
    assert "rows of 6784 values" in problem(6784, 64)
    assert "rows of 1664 values" in problem(1664, 64)
    assert "weights of (64, 72) columns" in problem(2048, 64, 72)
    assert "12 gates" in problem(2048, 64, gates=12)


@pytest.mark.parametrize("said", MISREAD)
def test_refuses_what_it_would_misread(said):
    with pytest.raises(ValueError, match=said):
        tile_products(**misread(said))


def test_refuses_more_rows():
    given = inputs(MOST_ROWS + 1, 1024, (128, 64), 64, True, True, "cpu")
    with pytest.raises(ValueError, match=r"\[1 to 128, 1024\]"):
        tile_products(**given)
