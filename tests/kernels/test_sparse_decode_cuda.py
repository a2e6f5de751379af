"""kernel.cu on an emulated Hopper SM, with NaN in every slot, entry, part and byte of shared memory that may not count.

A host compiler takes the kernel's own source; emulation/ has what PTX does. NVRTC compiles it for Hopper, which takes no GPU.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from test_sparse_decode import assert_near, case, expected

from nsa_backend.benchmarks.sparse_decode_cuda import nvrtc
from nsa_backend.benchmarks.sparse_decode_cuda.launch import prepare, sparse_decode_cuda
from nsa_backend.benchmarks.sparse_decode_cuda.tiles import (
    JOINS,
    LATENT,
    MOST_PARTS,
    MOST_SHARED_BYTES,
    ROPE,
    TILES,
    CudaSplit,
    CudaTile,
    join_of,
)  # fmt: skip
from nsa_backend.benchmarks.sparse_decode_cuda.variants import VARIANTS
from nsa_backend.kernels.sparse_decode import Parts

EMULATION = Path(__file__).parent / "emulation"
COMPILER = shutil.which("g++") or shutil.which("c++")
SCALE = 0.05
EMULATED = {
    "h16": TILES["h16"],
    "h32, cluster, in pieces": replace(TILES["h32"], cluster=2, bulk=False),
    "wgmma": TILES["wgmma"],
    "wgmma, cluster": replace(TILES["wgmma"], cluster=2),
}
"""Each way to copy, to multiply and to join, and each number of heads a block, in as few tiles as have them all."""
COMPILED = ("h16 b2", "h32 pieces", "wgmma")


@dataclass(frozen=True)
class Emulator:
    """One tile, as a host library."""

    tile: CudaTile
    library: ctypes.CDLL

    def __call__(self, inputs, sms: int, join_warps: int | None = None, seed: int = 0) -> torch.Tensor:
        rows, heads, _ = inputs[0].shape
        out = torch.full((rows, heads, LATENT), float("nan"), dtype=torch.bfloat16)
        split = CudaSplit.of(rows, heads, inputs[3].shape[1], sms, self.tile)
        parts = Parts.of(rows * split.parts * heads, LATENT, "cpu")
        parts.out.fill_(float("nan"))
        parts.lse.fill_(float("nan"))
        call = prepare(*inputs, SCALE, out, parts, self.tile, split, join_warps or join_of(split.parts))
        self.library.run_attend(ctypes.byref(call.attend), *call.grid, seed)
        if call.join_warps:
            self.library.run_join(ctypes.byref(call.join), call.join_warps, *call.join_grid, seed)
        return out


@pytest.fixture(scope="session")
def emulators(tmp_path_factory) -> dict[str, Emulator]:
    """Of EMULATED; their compilers run side by side."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    folder, running = tmp_path_factory.mktemp("emulation"), {}
    for name, tile in EMULATED.items():
        macros = [f"-D{macro}={value}" for macro, value in tile.macros().items()]
        options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-DEMULATE", f"-I{EMULATION}", *macros]
        running[name] = subprocess.Popen([COMPILER, *options, EMULATION / "emulation.cpp", "-o", folder / f"{name}.so"])
    assert [name for name, process in running.items() if process.wait()] == []
    return {name: Emulator(tile, ctypes.CDLL(str(folder / f"{name}.so"))) for name, tile in EMULATED.items()}


def inputs_of(rows, heads, topk, lens, seed, holes=True):
    return case("cpu", rows, heads, topk, lens, torch.bfloat16, seed, latent=LATENT, rope=ROPE, holes=holes)


def near(out, inputs) -> None:
    assert_near(out, expected(*inputs, SCALE), torch.bfloat16)


@pytest.mark.parametrize("name", EMULATED)
def test_every_tile_on_rows_of_any_length(emulators, name):
    """One block has two steps more than stages; empty and one-token rows beside them."""
    tile = EMULATED[name]
    topk = (tile.stages + 2) * tile.tokens * tile.cluster - 5
    inputs = inputs_of(4, tile.heads, topk, [topk, 0, 1, 17], 3)
    near(emulators[name](inputs, sms=4 * tile.cluster), inputs)
    near(emulators[name](inputs, sms=12 * tile.cluster, seed=1), inputs)


@pytest.mark.parametrize(("name", "heads"), [("h16", 8), ("h16", 24), ("h32, cluster, in pieces", 40), ("wgmma", 40)])
def test_heads_that_fill_no_block(emulators, name, heads):
    inputs = inputs_of(2, heads, 300, [300, 33], heads)
    near(emulators[name](inputs, sms=16), inputs)


@pytest.mark.parametrize(("rows", "heads"), [(1, 8), (2, 128)])
def test_the_models_shape(emulators, rows, heads):
    inputs = inputs_of(rows, heads, 2048, [300, 2048][-rows:], heads, holes=False)
    name = next(name for name, tile in TILES.items() if tile == CudaTile.of(rows, heads))
    near(emulators[name](inputs, sms=132), inputs)


@pytest.mark.parametrize("join_warps", JOINS)
def test_every_join(emulators, join_warps):
    inputs = inputs_of(2, 16, 1100, [1100, 700], join_warps)
    near(emulators["h16"](inputs, sms=132, join_warps=join_warps), inputs)


def test_a_row_without_slots_in_every_entry(emulators):
    inputs = inputs_of(2, 16, 300, [300, 300], 5)
    inputs[3][1] = -1
    for name in ("h16", "h32, cluster, in pieces"):
        near(emulators[name](inputs, sms=20), inputs)


def test_timing_does_not_change_a_bit(emulators):
    inputs = inputs_of(2, 16, 400, [400, 300], 7)
    run = emulators["h16"]
    assert torch.equal(run(inputs, sms=4), run(inputs, sms=4, seed=1))


@pytest.mark.parametrize("name", COMPILED)
def test_nvrtc_spills_nothing(name):
    tile = VARIANTS[name].tile
    try:
        _, said = nvrtc.compiled(tile.macros())
    except RuntimeError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip("NVRTC is not installed")
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    assert registers * tile.threads * tile.blocks <= 65536


def test_python_and_the_kernel_agree_on_shared_memory(emulators):
    assert all(one.library.shared_bytes() == one.tile.shared_bytes for one in emulators.values())
    for variant in VARIANTS.values():
        assert variant.tile.shared_bytes <= MOST_SHARED_BYTES
        assert variant.tile.blocks * (variant.tile.shared_bytes + 1024) <= 233472


def test_splits_fill_the_gpu_and_not_more():
    for tile in {variant.tile for variant in VARIANTS.values()}:
        for rows in (1, 2, 3, 8, 32, 64):
            for heads in (8, 64, 128):
                for topk in (1, 100, 2048, 16384):
                    split = CudaSplit.of(rows, heads, topk, 132, tile)
                    assert split.blocks * split.chunk >= topk
                    assert split.blocks == split.parts * tile.cluster
                    assert split.chunk % tile.tokens == 0
                    assert split.parts <= MOST_PARTS
                    blocks = rows * -(-heads // tile.heads) * split.blocks
                    assert blocks <= 132 * tile.blocks or split.blocks == tile.cluster


def test_what_the_kernel_would_misread_is_refused():
    inputs = inputs_of(1, 16, 64, [64], 1)
    for place, wrong in ((0, inputs[0].float()), (2, inputs[2].float()), (3, inputs[3].long()), (4, inputs[4].long())):
        given = list(inputs)
        given[place] = wrong
        with pytest.raises(ValueError, match="see sparse_decode_cuda"):
            sparse_decode_cuda(*given, SCALE, num_sms=132)
