"""Result files of benchmarks/results, and the small words of tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

PRIMARY = "0.5.23"
"""The release of SGLang that pages are about first."""
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


FIRST_GPU, OTHER_GPU = "_h200", "_h100"
"""How files end of runs on the GPU that pages are about, and of others, whose names keep it."""


@cache
def result(name: str, part: str | None = None) -> dict:
    """The report in the file called `name`, or of one that holds several the one of this name."""
    report = json.loads(path_of(name).read_text())
    return report["reports"][part] if part else report


def path_of(name: str) -> Path:
    """The result file called `name`, which leaves out the first GPU."""
    return RESULTS / f"{name}{'' if name.endswith(OTHER_GPU) else FIRST_GPU}.json"


def reports(topic: str) -> dict[str, dict]:
    """Every report of every file of this topic, by file and name."""
    found = {}
    for path in sorted(RESULTS.glob(f"{topic}_*.json")):
        report = json.loads(path.read_text())
        parts = report.get("reports", {"": report})
        found |= {f"{path.stem.removesuffix(FIRST_GPU)}/{name}".rstrip("/"): part for name, part in parts.items()}
    return found


def release(report: dict) -> str:
    """SGLang's, that the report is of."""
    return report["environment"]["packages"]["sglang"]


def spread(values: Iterable[float], form: str = "{:.2f}") -> str:
    """Least to most."""
    values = list(values)
    if not values:
        return "-"
    least, most = form.format(min(values)), form.format(max(values))
    return least if least == most else f"{least} to {most}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


class Parts(dict[str, Callable[[], str]]):
    """Functions that write a part of a page, by name: `@PARTS.part` adds one."""

    def part(self, write: Callable[[], str]) -> Callable[[], str]:
        self[write.__name__] = write
        return write
