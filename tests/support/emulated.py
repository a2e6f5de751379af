"""The kernel in CUDA C++ as this machine runs it: compiled for the host, over emulated blocks."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from nsa_backend.kernels import sparse_verify as verify

HERE = Path(__file__).parent


@cache
def emulator(source: Path, *shape: int, fp8: bool = False) -> ctypes.CDLL:
    """Of a source, for groups of so many rows, on one of so many ranks."""
    out = Path(tempfile.mkdtemp(prefix="nsa-emulation-")) / "kernel.so"
    words = [f"-D{name}={value}" for name, value in verify.constants(*shape, fp8=fp8).items()]
    words += ["-DEMULATE", f'-DSOURCE="{source.resolve()}"']
    subprocess.run(
        ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", *words, "-I", HERE, HERE / "emulation.cpp", "-o", out], check=True
    )
    return ctypes.CDLL(str(out))


class Emulated:
    """In place of `cuda_source.CudaKernel`; `grids` are those of its launches."""

    def __init__(self, rows: int, heads: int, topk: int, seed: int = 0, ranks: int = 1, rank: int = 0, *, fp8: bool = False):
        self._shape, self._fp8, self._seed = (rows, heads, topk, ranks, rank), fp8, seed
        self.grids: list[tuple[int, int]] = []

    def launch(self, grid: tuple[int, int], arguments: verify.Arguments) -> None:
        self.grids.append(grid)
        source = verify.source_of(grid[0], fp8=self._fp8)
        emulator(source, *self._shape, fp8=self._fp8).run(ctypes.byref(arguments), *grid, self._seed)
