"""kernel.cu on an emulated Hopper SM, with NaN in every slot, entry, part and byte of shared memory that may not count.

A host compiler takes the kernel's own source; emulation.h has what PTX does. NVRTC compiles it for Hopper, which takes no GPU.
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

from nsa_backend.kernels.sparse_decode import Parts
from nsa_backend.benchmarks.sparse_decode_cuda.launch import (
    JOINS,
    LATENT,
    MOST_PARTS,
    MOST_SHARED_BYTES,
    ROPE,
    TILES,
    CudaSplit,
    CudaTile,
    compiled,
    join_of,
    prepare,
    sparse_decode_cuda,
)

HERE = Path(__file__).parent / "emulation"
SCALE = 0.05
OTHERS = {
    "h16, 64 tokens": CudaTile(16, 64, 2, 1, 4, 2),
    "h16, two blocks": CudaTile(16, 32, 2, 1, 2, 4, blocks=2),
    "h16, four warps": CudaTile(16, 32, 4, 1, 2, 2),
    "h16, in pieces": replace(TILES["h16"], bulk=False),
    "h64, mma": CudaTile(64, 32, 4, 2, 1, 4, passes=2),
}
EVERY = TILES | OTHERS | {f"{name}, cluster": replace(tile, cluster=4) for name, tile in TILES.items()}


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


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no host compiler")
    found = {}

    def of(tile: CudaTile) -> Emulator:
        if tile not in found:
            path = tmp_path_factory.mktemp("emulation") / f"{tile.name}.so"
            macros = [f"-D{name}={value}" for name, value in tile.macros().items()]
            options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-DEMULATE", f"-I{HERE}"]
            subprocess.run(["g++", *options, *macros, HERE / "emulation.cpp", "-o", path], check=True)
            found[tile] = Emulator(tile, ctypes.CDLL(str(path)))
        return found[tile]

    return of


def inputs_of(rows, heads, topk, lens, seed, holes=True):
    return case("cpu", rows, heads, topk, lens, torch.bfloat16, seed, latent=LATENT, rope=ROPE, holes=holes)


def near(out, inputs) -> None:
    assert_near(out, expected(*inputs, SCALE), torch.bfloat16)


@pytest.mark.parametrize("name", EVERY)
def test_every_tile_on_rows_of_any_length(emulator, name):
    """One block has two steps more than stages; empty and one-token rows beside them."""
    tile = EVERY[name]
    topk = (tile.stages + 2) * tile.tokens * tile.cluster - 5
    lens = [topk, 0, 1, 17]
    inputs = inputs_of(4, tile.heads, topk, lens, 3)
    run = emulator(tile)
    near(run(inputs, sms=4 * tile.cluster), inputs)
    near(run(inputs, sms=12 * tile.cluster, seed=1), inputs)


@pytest.mark.parametrize("heads", [8, 24, 40])
@pytest.mark.parametrize("name", TILES)
def test_heads_that_fill_no_block(emulator, name, heads):
    inputs = inputs_of(2, heads, 300, [300, 33], heads)
    near(emulator(TILES[name])(inputs, sms=16), inputs)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(("rows", "lens"), [(1, [2048]), (2, [300, 2048])])
def test_the_models_shape(emulator, rows, lens, heads):
    inputs = inputs_of(rows, heads, 2048, lens, heads, holes=False)
    near(emulator(CudaTile.of(rows, heads))(inputs, sms=132), inputs)


@pytest.mark.parametrize("join_warps", JOINS)
def test_every_join(emulator, join_warps):
    inputs = inputs_of(2, 16, 1100, [1100, 700], join_warps)
    near(emulator(TILES["h16"])(inputs, sms=132, join_warps=join_warps), inputs)


def test_a_row_without_slots_in_every_entry(emulator):
    inputs = inputs_of(2, 16, 300, [300, 300], 5)
    inputs[3][1] = -1
    for name in ("h16", "h16, cluster"):
        near(emulator(EVERY[name])(inputs, sms=20), inputs)


def test_timing_does_not_change_a_bit(emulator):
    inputs = inputs_of(2, 16, 400, [400, 300], 7)
    run = emulator(TILES["h16"])
    assert all(torch.equal(run(inputs, sms=4), run(inputs, sms=4, seed=seed)) for seed in (1, 2))


@pytest.mark.parametrize("name", EVERY)
def test_nvrtc_spills_nothing(name):
    tile = EVERY[name]
    try:
        _, said = compiled(tile)
    except RuntimeError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip("NVRTC is not installed")
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    assert registers * tile.threads * tile.blocks <= 65536


@pytest.mark.parametrize("name", EVERY)
def test_python_and_the_kernel_agree_on_shared_memory(emulator, name):
    tile = EVERY[name]
    assert emulator(tile).library.shared_bytes() == tile.shared_bytes <= MOST_SHARED_BYTES
    assert tile.blocks * (tile.shared_bytes + 1024) <= 233472


def test_splits_fill_the_gpu_and_not_more():
    for tile in EVERY.values():
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
