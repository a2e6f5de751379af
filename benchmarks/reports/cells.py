"""A benchmark as a list of cells: run them under a time limit with progress, and keep what was measured as one report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

FIRST_START = 4
"""Times that the first server of a rank takes to start on a new machine, where it compiles kernels, over a later one: 178 to
507 s where others took 46 to 131 (`seconds_to_ready` in benchmarks/results/rank_v32_tp8_0_5_23_h200.json)."""


class LostCellError(RuntimeError):
    """One cell has nothing to show, and what it was to be measured on still stands."""


@dataclass
class Prepared:
    """What cells need before they measure, as servers that run: the key of what stands now, and the seconds of all so far."""

    key: Any = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Cell:
    """One thing to measure. `measure` returns rows for the report's section of that name."""

    name: str
    measure: Callable[[], list[dict]]
    section: str = "rows"
    prepared: Prepared | None = None  # what this cell and others measure on,
    key: Any = None  # and what that must be; `measure` prepares it where it is not
    kind: str = ""  # of cells that take about as long


def run_cells(cells: list[Cell], seconds: float, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure cell after cell as long as the longest one so far of its kind, or of all, would still end in time.

    The first cell compiles kernels for all others, so it counts only until a second one has run. What preparing takes counts
    for cells that have to prepare too; of the first time a part does, until there was a second.

    Args:
        cells: in the order to measure.
        seconds: the bound; the first cell runs in any case.
        keep: called with the report after every cell, so that a run that is cut leaves what it has.

    Returns:
        Rows by section, `seconds`, and under `not_measured` the names of cells that found no time, or not yet; where a cell
        raised LostCellError, its name and why under `lost`.
    """
    left = [cell.name for cell in cells]
    report: dict[str, Any] = {cell.section: [] for cell in cells} | {"not_measured": left, "seconds": 0.0}
    began, took, preparing = time.monotonic(), list[tuple[str, float]](), list[float]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not cells) as progress:
        task = progress.add_task("", total=len(cells))
        for cell in cells:
            started = time.monotonic()
            prepared = cell.prepared or Prepared()
            alike = [lasted for kind, lasted in took[1:] if kind == cell.kind] or [lasted for _, lasted in took[1:] or took]
            again = max(preparing[1:] or (one / FIRST_START for one in preparing), default=0.0)
            expected = max(alike, default=0.0) + (again if prepared.key != cell.key else 0.0)
            if took and started - began + expected > seconds:
                progress.advance(task)
                continue
            progress.update(task, description=cell.name)
            before = prepared.seconds
            try:
                report[cell.section] += cell.measure()
            except LostCellError as error:
                report.setdefault("lost", []).append(f"{cell.name}: {error}")
            left.remove(cell.name)
            whole = time.monotonic() - started
            of_preparing = prepared.seconds - before
            preparing += [of_preparing] if of_preparing else []
            took.append((cell.kind, whole - of_preparing))
            progress.console.print(f"{cell.name}: {whole:.1f} s", highlight=False)  # a log file shows no bar
            report["seconds"] = round(time.monotonic() - began, 1)
            keep(report)
            progress.advance(task)
    return report
