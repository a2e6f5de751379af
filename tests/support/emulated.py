"""Kernels in CUDA C++ as this machine runs them: compiled for the host, over emulated blocks."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch

from nsa_backend.kernels import early_experts, early_products, expert_tiles, index_rows, router, tile_products
from nsa_backend.kernels import sparse_verify as verify
from nsa_backend.kernels.cuda_source import Boxes, Launch, TensorMap
from nsa_backend.kernels.few_experts import ExpertWeights

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build" / "emulators"
"""What was compiled, by what it was compiled from: nothing is twice, in this run of the tests or in another."""
COMPILER = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"]
"""A fortified libc takes it for a mistake that fibers leave their stacks by longjmp."""
APART = {"BLOCKS_AT_ONCE": 2}
"""Of kernels whose blocks do not meet: with few at a time an emulator takes a fifth of the time."""


@cache
def emulator(source: Path, arguments: str, kernel: str, **constants: int) -> ctypes.CDLL:
    """Of a source's kernel, which takes a struct called `arguments`, with these macros."""
    words = [f"-D{name}={value}" for name, value in constants.items()]
    words += [f'-DSOURCE="{source.resolve()}"', f"-DARGUMENTS={arguments}", f"-DKERNEL={kernel}"]
    header = header_read_once()
    return ctypes.CDLL(
        str(built(f"{source.stem}.so", ["-include", header, *words, "-I", header.parent, HERE / "emulation.cpp"]))
    )


@cache
def header_read_once() -> Path:
    """emulation.h, beside it what the compiler has of it once it is read, which takes half of an emulator's compilation."""
    name = "emulation.h"
    with alone():
        read = built(f"{name}.gch", ["-x", "c++-header", HERE / name])
        header = read.with_name(name)
        if not header.exists():
            shutil.copy2(HERE / name, header)
    return header


def built(name: str, words: Sequence[str | Path]) -> Path:
    """A file that the compiler makes of these words and the sources, unless it is there."""
    words = [*COMPILER, "-DEMULATE", *map(str, words)]
    path = BUILT / hashlib.sha256("\n".join([of_sources(), *words]).encode()).hexdigest()[:32] / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as own:
            made = Path(own) / name
            subprocess.run([*words, "-o", made], check=True)
            made.replace(path)
    return path


@cache
def of_sources() -> str:
    """What all emulators are compiled from, and by which compiler."""
    version = subprocess.run([COMPILER[0], "--version"], check=True, capture_output=True).stdout
    folders, kinds = (HERE, router.SOURCE.parent), (".cu", ".cuh", ".cpp", ".h")
    files = sorted(file for folder in folders for file in folder.iterdir() if file.suffix in kinds)
    return hashlib.sha256(version + b"".join(file.read_bytes() for file in files)).hexdigest()


@contextmanager
def alone() -> Iterator[None]:
    """While no other process is."""
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def attend_emulator(source: Path, *shape: int, fp8: bool = False) -> ctypes.CDLL:
    """Of a source that attends, for groups of so many rows, on one of so many ranks."""
    return emulator(source, "Attend", "attend", **verify.constants(*shape, fp8=fp8))


class Emulated:
    """In place of `cuda_source.CudaKernel`; `grids` are those of its launches."""

    def __init__(self, rows: int, heads: int, topk: int, seed: int = 0, ranks: int = 1, rank: int = 0, *, fp8: bool = False):
        self._shape, self._fp8, self._seed = (rows, heads, topk, ranks, rank), fp8, seed
        self.grids: list[tuple[int, int]] = []

    def launch(self, grid: tuple[int, int], arguments: verify.Arguments) -> None:
        self.grids.append(grid)
        source = verify.source_of(grid[0], fp8=self._fp8)
        attend_emulator(source, *self._shape, fp8=self._fp8).run(ctypes.byref(arguments), *grid, self._seed)


def multiply_emulator(kernel: expert_tiles.Kernel) -> ctypes.CDLL:
    """Of what multiplies rows of experts."""
    return emulator(kernel.source, "Multiply", kernel.source.stem, **kernel.constants)


def emulating(kernel: expert_tiles.Kernel, seed: int = 0) -> dict[str, Launch | Boxes]:
    """What its callers take in place of a GPU, by name."""
    return {"launch": launcher(partial(multiply_emulator, kernel), seed), "boxes": boxes}


def turning(heads: int, *, neox: bool, seed: int = 0) -> Launch:
    """What launches queries of so many index heads."""
    of_heads = index_rows.constants(heads, neox=neox)
    return launcher(partial(emulator, index_rows.SOURCE, "Queries", index_rows.SOURCE.stem, **of_heads, **APART), seed)


def multiplying_early(inner: int, tile: early_products.Tile, gates_dtype: torch.dtype, seed: int = 0) -> Launch:
    """What launches products of few rows of so many values."""
    macros = early_products.constants(inner, tile, gates_dtype)
    return launcher(partial(emulator, early_products.SOURCE, "Products", early_products.SOURCE.stem, **macros, **APART), seed)


def multiplying_tiles(
    inner: int, tile: tile_products.Tile, gates_dtype: torch.dtype, seed: int = 0
) -> dict[str, Launch | Boxes]:
    """What `tile_products` of rows of so many values takes in place of a GPU, by name."""
    macros = tile_products.constants(inner, tile, gates_dtype)
    macros |= {"CLUSTER": tile.parts, "BLOCKS_AT_ONCE": tile.parts}
    compiled = partial(emulator, tile_products.SOURCE, "Products", tile_products.SOURCE.stem, **macros)
    return {"launch": launcher(compiled, seed), "boxes": partial(boxes, may_end=True)}


def routing(hidden: int, choice: router.Choice, rows: int, seed: int = 0, division: router.Division = router.SERVED) -> Launch:
    """What launches the router of so many rows."""
    macros = router.constants(hidden, choice, rows, division)
    macros |= {"BLOCKS_AT_ONCE": router.MOST_ROWS}  # at least as many as wait for the others
    return launcher(partial(emulator, router.SOURCE, "Router", router.SOURCE.stem, **macros), seed)


def with_experts(x: torch.Tensor, chosen: torch.Tensor, shared: ExpertWeights | None) -> early_experts.Launch:
    """What runs both launches of `early_experts` for such inputs."""
    form = x.shape[1], chosen.shape[1], int(shared is not None)

    def launch(which: str, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        macros = early_experts.constants(which, *form, powers=early_experts.by_powers(shared))
        emulator(early_experts.SOURCE, "Experts", which, **macros, **APART).run(ctypes.byref(arguments), *grid, len(x))

    return launch


def launcher(compiled: Callable[[], ctypes.CDLL], seed: int) -> Launch:
    """Launches what `compiled` gives once it is asked to."""

    def launch(grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        compiled().run(ctypes.byref(arguments), *grid, seed)

    return launch


def boxes(tensor: torch.Tensor, box_rows: int, *, may_end: bool = False) -> TensorMap:
    """In place of `cuda_source.tensor_map`; whether a box may end behind the tensor, where a GPU reads zeros."""
    words = (ctypes.c_int64 * 16)(tensor.data_ptr(), *tensor.shape, box_rows, may_end)
    return TensorMap.from_buffer_copy(words)
