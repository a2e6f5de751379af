"""Result files of benchmarks/results, and the small words of tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

PRIMARY = "0.5.23"
"""The release of SGLang that pages are about first."""
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@cache
def result(name: str, part: str | None = None) -> dict:
    """The report in `name`_h200.json, or of a file that holds several the one of this name."""
    report = json.loads((RESULTS / f"{name}_h200.json").read_text())
    return report["reports"][part] if part else report


def reports(topic: str) -> dict[str, dict]:
    """Every report of every file of this topic, by file and name."""
    found = {}
    for path in sorted(RESULTS.glob(f"{topic}_*h200.json")):
        report = json.loads(path.read_text())
        parts = report.get("reports", {"": report})
        found |= {f"{path.name.removesuffix('_h200.json')}/{name}".rstrip("/"): part for name, part in parts.items()}
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
