"""Products whose weights come early against torch's: exactly where no sum is rounded, else nearly, on poisoned memory."""

from __future__ import annotations

import re

import pytest
import torch
from block_products import MISREAD, OF_LAYERS, check, inputs, misread
from emulated import multiplying_early

from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.early_products import (
    MOST_ROWS,
    SOURCE,
    Tile,
    constants,
    early_products,
    problem,
    tile_for,
)

pytestmark = pytest.mark.usefixtures("poisoned")

TILES = {"served": None, "in turns": Tile(4, 32, 2, 1), "late": Tile(4, 16, 4, 0)}


@pytest.mark.parametrize(
    ("rows", "widths", "gates"), [(1, (192, 128), 64), (3, (128, 64), 0), (5, (64,), 32), (8, (160, 32), 8)]
)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("tile", TILES)
def test_products(rows, widths, gates, exact, tile):
    """Of 1024 values a row: eight groups, two of them a warp's where four have them."""
    torch.manual_seed(rows)
    given = inputs(rows, 1024, widths, gates, rows % 2 == 1, exact, "cpu")
    dtype = torch.bfloat16 if rows == 5 else torch.float32
    cut = TILES[tile] or tile_for(1024)
    check(early_products, given, exact, tile=cut, gates_dtype=dtype, launch=multiplying_early(1024, cut, dtype, seed=rows))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("which", OF_LAYERS)
def test_products_of_a_layer(rows, exact, which):
    torch.manual_seed(rows)
    inner, widths, gates = OF_LAYERS[which]
    dtype = torch.bfloat16 if gates == 160 else torch.float32
    check(early_products, inputs(rows, inner, widths, gates, rows % 2 == 1, exact, "cuda"), exact, gates_dtype=dtype)


@pytest.mark.parametrize("inner", [7168, 6144, 2048, 1536, 5120])
def test_it_compiles_for_hopper_with_nearly_all_in_registers(inner):
    _, said = compiled(SOURCE, constants(inner, tile_for(inner)))
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", said)]
    assert len(spilled) == 2
    assert max(spilled) <= 40


def test_what_no_division_serves():
    assert "rows of 1664 values" in problem(1664, 64)
    assert "weights of (64, 72) columns" in problem(2048, 64, 72)
    assert "12 gates" in problem(2048, 64, gates=12)


@pytest.mark.parametrize("said", MISREAD)
def test_refuses_what_it_would_misread(said):
    with pytest.raises(ValueError, match=said):
        early_products(**misread(said))


def test_refuses_more_rows():
    given = inputs(MOST_ROWS + 1, 1024, (128, 64), 64, True, True, "cpu")
    with pytest.raises(ValueError, match=r"\[1 to 8, 1024\]"):
        early_products(**given)
