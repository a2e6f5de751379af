"""Rows of ranks, which are of one side and turn, as cells: what a side took over all of its turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nsa_backend.benchmarks.servers.parallel import NCCL, ONE_GPU, Parallel, parsed
from nsa_backend.benchmarks.servers.server import BF16

ONE_RANK = str(ONE_GPU)


class Cell(NamedTuple):
    """What both sides were asked."""

    checkpoint: str
    steps: int
    batch: int
    length: int
    parallel: str = ONE_RANK  # of how many ranks a server is
    kv: str = BF16  # of its KV cache
    cached: int = 0  # tokens before each prompt, whose KV the server had kept
    all_reduce: str = NCCL  # of ranks of one server

    @classmethod
    def of(cls, row: dict) -> Cell:
        """That of a row; one without `parallel` is of one rank, one without `kv` in bfloat16."""
        return cls(**{field: row[field] for field in cls._fields if field in row})

    @property
    def name(self) -> str:
        """As `title_of`."""
        return title_of(self.checkpoint, self.parallel, self.kv, self.all_reduce)

    @property
    def shape(self) -> str:
        """Requests and tokens of each prompt."""
        return shape_of(self.batch, self.length, self.cached)


def title_of(checkpoint: str, parallel: Parallel | str, kv: str = BF16, all_reduce: str = NCCL) -> str:
    """A rank; the deployment and SGLang's own all-reduce where a server is several, the KV cache where it is not bfloat16."""
    several = str(parallel) != ONE_RANK
    words = [str(parallel)] * several + [f"{kv} KV"] * (kv != BF16)
    return ", ".join([checkpoint, *words, *["SGLang's all-reduce"] * (several and all_reduce != NCCL)])


def shape_of(batch: int, length: int, cached: int = 0) -> str:
    """Requests and tokens of each prompt, and how many are cached before it."""
    return f"{batch} x {length}" + (f" behind {cached}" if cached else "")


class Spread(NamedTuple):
    """Of one side in one cell: the median over its turns, least and most of all samples."""

    median: float
    least: float
    most: float


def by_cell(rows: Iterable[dict]) -> dict[Cell, dict[str, list[dict]]]:
    """Rows of every cell and side, one a turn, in the order of the rows."""
    found: dict[Cell, dict[str, list[dict]]] = {}
    for row in rows:
        found.setdefault(Cell.of(row), {}).setdefault(row["side"], []).append(row)
    return found


def together(rows: Iterable[dict], key: str = "round_ms") -> dict[Cell, dict[str, Spread]]:
    """By cell and side, what `key` is over the turns."""
    return {
        cell: {
            side: Spread(
                statistics.median(one[key]["median"] for one in turns),
                min(one[key]["min_max"][0] for one in turns),
                max(one[key]["min_max"][1] for one in turns),
            )
            for side, turns in sides.items()
        }
        for cell, sides in by_cell(rows).items()
    }


def undivided(cell: Cell) -> Cell:
    """The same on as many ranks of tensor parallel, which do not divide the KV."""
    return cell._replace(parallel=str(Parallel(tp=parsed(cell.parallel).gpus)))


def over_tensor_parallel(found: Mapping[Cell, Mapping[str, Spread]], cell: Cell, side: str, other: str) -> float | None:
    """Median of `side` in a cell of decode context parallel over that of the `other` one, KV not divided, on as many GPUs.

    None where the cell is of another deployment, or the run has no such cell.
    """
    whole = found.get(undivided(cell), {})
    return found[cell][side].median / whole[other].median if parsed(cell.parallel).dcp > 1 and other in whole else None
