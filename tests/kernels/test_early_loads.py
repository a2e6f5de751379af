"""Weights are asked for before the wait for the kernel ahead, where the assembler had put them behind it to save registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from triton.backends.nvidia import compiler as nvidia

from nsa_backend.kernels import add_norm, early_products, head_products, router
from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.layer_front_weights import Scales

DISASSEMBLER = Path(nvidia.__file__).parent / "bin" / "nvdisasm"
WAITS = "ACQBULK"
"""What griddepcontrol.wait becomes."""
CHOICE = router.Choice(8, 8, 4)
ROWS = [8, 16, 32]


def loads_before_waits(source: Path, macros: dict[str, int], folder: Path) -> list[int]:
    """Loads of global memory before each wait of a kernel, behind the wait before it."""
    cubin, _ = compiled(source, macros)
    (folder / "kernel.cubin").write_bytes(cubin)
    text = subprocess.run([DISASSEMBLER, "-c", folder / "kernel.cubin"], check=True, capture_output=True, text=True).stdout
    return [len(re.findall(r"\bLDG\.", part)) for part in text.split(WAITS)[:-1]]


@pytest.mark.parametrize("rows", ROWS)
def test_a_routers_weights(rows, tmp_path):
    """Of seven chunks of sixteen columns."""
    assert loads_before_waits(router.SOURCE, router.constants(7168, CHOICE, rows), tmp_path) == [14]


@pytest.mark.parametrize("rows", ROWS)
def test_weights_of_heads(rows, tmp_path):
    """Of four chunks of sixteen columns; what is turned has no weight, and is behind the first wait."""
    for source, macros in (
        (head_products.QUERIES, head_products.query_constants(128, rows, neox=False)),
        (head_products.VALUES, head_products.value_constants(128, rows, Scales.EXACT)),
    ):
        assert loads_before_waits(source, macros, tmp_path)[0] == 8


def test_weights_of_products_and_of_gates(tmp_path):
    """Of gates half, as registers have no more."""
    tile = early_products.tile_for(7168)
    first, gates = loads_before_waits(early_products.SOURCE, early_products.constants(7168, tile), tmp_path)
    assert first >= 4 * tile.before
    assert gates >= 14


def test_weights_of_a_norm(tmp_path):
    assert loads_before_waits(add_norm.SOURCE, add_norm.constants(7168, Scales.EXACT), tmp_path) == [add_norm.EACH]
