"""Rows of ranks, which are of one side and turn, as cells: what a side took over all of its turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple


class Cell(NamedTuple):
    """What both sides were asked."""

    checkpoint: str
    steps: int
    batch: int
    length: int

    @classmethod
    def of(cls, row: dict) -> Cell:
        return cls(*(row[field] for field in cls._fields))


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
