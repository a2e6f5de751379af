"""Kernels in CUDA C++ as this machine runs them: compiled for the host, over emulated blocks."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.kernels import (
    add_norm,
    cuda_source,
    early_experts,
    early_products,
    expert_tiles,
    head_products,
    norm_rope_store,
    rope_quantise,
    router,
    tile_products,
    whole_experts,
)
from nsa_backend.kernels import sparse_verify as verify
from nsa_backend.kernels.cuda_source import Boxes, Launch, TensorMap
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.layer_front_weights import FrontWeights, Scales

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
    macros = constants | {"SOURCE": f'"{source.resolve()}"', "ARGUMENTS": arguments, "KERNEL": kernel}
    # Not as options: a header that was read without a macro that its words may mean is read anew.
    text = "".join(f"#define {name} {value}\n" for name, value in macros.items()) + '#include "emulation.cpp"\n'
    words = ["-include", str(header_read_once().with_suffix("")), "-I", str(HERE), "-x", "c++", "-"]
    return ctypes.CDLL(str(built(f"{source.stem}.so", words, sources(), text)))


@cache
def header_read_once() -> Path:
    """What the compiler has of emulation.h once it is read, which takes half of an emulator's compilation: emulation.h.gch."""
    header = HERE / "emulation.h"
    return built(f"{header.name}.gch", ["-x", "c++-header", str(header)], [header])


@cache
def sources() -> list[Path]:
    """What any emulator may include."""
    kinds = ".cu", ".cuh", ".cpp", ".h"
    return sorted(file for folder in (HERE, router.SOURCE.parent) for file in folder.iterdir() if file.suffix in kinds)


def built(name: str, words: Sequence[str], sources: Sequence[Path], text: str = "") -> Path:
    """A file that the compiler, which is given `text`, makes of these words and of the sources, unless it is there."""
    words = [*COMPILER, "-DEMULATE", *words]
    made_of = hashlib.sha256("\n".join([version(), *words, text]).encode())
    for source in sources:
        made_of.update(source.read_bytes())
    path = BUILT / made_of.hexdigest()[:32] / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as own:
            made = Path(own) / name
            subprocess.run([*words, "-o", made], input=text, text=True, check=True)
            made.replace(path)
    return path


@cache
def version() -> str:
    """The compiler's."""
    return subprocess.run([COMPILER[0], "--version"], check=True, capture_output=True, text=True).stdout


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


def emulator_of_whole_experts(form: whole_experts.Form) -> ctypes.CDLL:
    """Of both products of experts."""
    macros = form.constants | {"CLUSTER": 1}
    return emulator(whole_experts.SOURCE, "Experts", whole_experts.SOURCE.stem, **macros)


def whole_experts_emulated(form: whole_experts.Form, seed: int = 0) -> dict[str, Launch | Boxes]:
    """What `whole_experts` takes in place of a GPU, by name."""
    return {"launch": launcher(partial(emulator_of_whole_experts, form), seed), "boxes": boxes}


AROUND = {
    add_norm.SOURCE: "AddNorm", norm_rope_store.SOURCE: "Store", rope_quantise.SOURCE: "Queries",
    head_products.QUERIES: "Queries", head_products.VALUES: "Values",
}  # fmt: skip
"""Sources of launches around a layer's products to the struct that they take."""


def around(source: Path, macros: dict[str, int]) -> ctypes.CDLL:
    """Of one of AROUND."""
    together = {"CLUSTER": 8, "BLOCKS_AT_ONCE": 8} if source == head_products.VALUES else APART
    return emulator(source, AROUND[source], source.stem, **macros, **together)


def compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all of AROUND emulated wherever they are called from."""

    def kernel_on(device: int | None, source: Path, threads: int, shared_bytes: int = 0, **macros: int) -> SimpleNamespace:
        return SimpleNamespace(launch=launcher(partial(around, source, macros), 0))

    monkeypatch.setattr(cuda_source, "kernel_on", kernel_on)


def readying_queries(inner: int, rows: int, *, neox: bool) -> Launch:
    """What launches MLA's queries of so many rows, whose heads have so many values that are not turned."""
    return launcher(partial(around, head_products.QUERIES, head_products.query_constants(inner, rows, neox=neox)), 0)


def making_values(width: int, rows: int, scales: Scales) -> Launch:
    """What launches values of so many rows, of heads that have so many."""
    return launcher(partial(around, head_products.VALUES, head_products.value_constants(width, rows, scales)), 0)


def norming(width: int, scales: Scales | None) -> Launch:
    """What launches sums and norms of rows of so many values."""
    return launcher(partial(around, add_norm.SOURCE, add_norm.constants(width, scales)), 0)


def storing(
    weights: FrontWeights, q_scales: Scales | None, ranks: int = 1, rank: int = 0, seed: int = 0, *, kv_fp8: bool
) -> Launch:
    """What launches norms and writes behind a layer's first products."""
    macros = norm_rope_store.constants(weights, q_scales, kv_fp8=kv_fp8, ranks=ranks, rank=rank)
    return launcher(partial(around, norm_rope_store.SOURCE, macros), seed)


def turning(index_heads: int, weights: FrontWeights, rows: int, seed: int = 0) -> Launch:
    """What launches so many rows of queries of so many index heads."""
    macros = rope_quantise.constants(index_heads, weights, rope_quantise.lanes_of(rows))
    return launcher(partial(around, rope_quantise.SOURCE, macros), seed)


def multiplying_early(inner: int, tile: early_products.Tile, gates_dtype: torch.dtype, seed: int = 0) -> Launch:
    """What launches products of few rows of so many values."""
    macros = early_products.constants(inner, tile, gates_dtype)
    return launcher(partial(emulator, early_products.SOURCE, "Products", early_products.SOURCE.stem, **macros, **APART), seed)


def multiplying_tiles(
    inner: int, tile: tile_products.Tile | tile_products.RowTile, gates_dtype: torch.dtype, seed: int = 0
) -> dict[str, Launch | Boxes]:
    """What `tile_products` of rows of so many values takes in place of a GPU, by name."""
    macros = tile_products.constants(inner, tile, gates_dtype)
    macros |= {"CLUSTER": tile.parts, "BLOCKS_AT_ONCE": tile.parts}
    compiled = partial(emulator, tile.source, "Products", tile.source.stem, **macros)
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
