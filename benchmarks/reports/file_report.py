"""Put what one or several runs gave into the result file of its topic and release, beside the reports that the file has.

python -m nsa_backend.benchmarks.reports.file_report benchmarks/results/serve_0_5_23_h200.json rounds OUT.json

Runs of one code on one kind of machine are one report: name their files one after another. `--checkpoint` takes the rows of one
model from runs of several. A file that is one report without a name keeps it under `--first NAME`. Commands and what failed
engines said name files without the folders of the machine that they lay in.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa_backend.benchmarks.reports.report import dumped

ALIKE = ("gpu", "packages", "commit")
"""Of `environment`, what the runs of one report have in common."""

OF_A_MACHINE = ("command", "failures")
"""Of a report, what may name files by where they lay."""
ABSOLUTE = re.compile(r"(?<![\w.:/~-])(?:/[\w.+-]+){2,}")
TOPS = ("sglang", "nsa_backend", "kernels", "benchmarks", "tests")
"""Folders by which a reader knows a file."""


def joined(reports: Sequence[dict], checkpoint: str | None = None) -> dict:
    """One report of all runs: their rows by section, their commands, the date of the last one.

    Args:
        reports: as benchmarks wrote them.
        checkpoint: rows of others are left out.

    Raises:
        SystemExit: a report says nothing of where or on which commit it ran, or they ran on different ones.
    """
    for report in reports:
        if "environment" not in report:
            raise SystemExit("the report has no environment: give one that a benchmark or an end-to-end run wrote")
        if not report["environment"].get("commit"):
            raise SystemExit('the report names no commit: run with NSA_BENCH_COMMIT, or write "commit" into its environment')
    first, *others = reports
    for report in others:
        if differ := [key for key in ALIKE if report["environment"].get(key) != first["environment"].get(key)]:
            raise SystemExit(f"the runs differ in {' and '.join(differ)}: put each into the file under a name of its own")
    found = dict(first)
    for report in others:
        for key, value in report.items():
            if isinstance(value, list):
                found[key] = [*found.get(key, []), *value]
    if others:
        date = max(report["environment"]["date"] for report in reports)
        found |= {"environment": first["environment"] | {"date": date}}
        found |= {"command": [report["command"] for report in reports if "command" in report]}
        found |= {"seconds": sum(report["seconds"] for report in reports)} if all("seconds" in r for r in reports) else {}
    if checkpoint is not None:
        of_rows = {key for key, value in found.items() if value and isinstance(value, list) and isinstance(value[0], dict)}
        found |= {key: [row for row in found[key] if row.get("checkpoint") == checkpoint] for key in of_rows}
        if not any(found[key] for key in of_rows):
            raise SystemExit(f"no row is of --checkpoint {checkpoint}")
    return found


def placeless(value: Any) -> Any:
    """`value`, texts in lists and dicts alike, without the folders of absolute paths.

    A path keeps what follows the last folder above one of TOPS, else its last folder and name.
    """
    if isinstance(value, dict):
        return {key: placeless(one) for key, one in value.items()}
    if isinstance(value, list):
        return [placeless(one) for one in value]
    return ABSOLUTE.sub(lambda found: _relative(found[0].split("/")[1:]), value) if isinstance(value, str) else value


def _relative(parts: list[str]) -> str:
    known = next((at for at, part in enumerate(parts) if part in TOPS), max(1, len(parts) - 2))
    return "/".join(parts[known:])


def put(file: Path, name: str, report: dict, first: str | None = None) -> None:
    """Write `report` into `file` under this name, in place of one that has it, else as the last.

    Raises:
        SystemExit: the file holds one report, and `first` does not say what to call it.
    """
    reports = {}
    if file.exists():
        found = json.loads(file.read_text())
        if "reports" not in found:
            if first is None:
                raise SystemExit(f"{file} is one report without a name: --first NAME gives it one")
            found = {"reports": {first: found}}
        reports = found["reports"]
    reports[name] = report | {key: placeless(report[key]) for key in OF_A_MACHINE if key in report}
    bodies = [f"{json.dumps(key)}: {dumped(value).rstrip()}" for key, value in reports.items()]
    file.write_text('{"reports": {\n' + ",\n".join(bodies) + "\n}}\n")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("name")
    parser.add_argument("report", type=Path, nargs="+")
    parser.add_argument("--checkpoint", help="take its rows alone")
    parser.add_argument("--first", metavar="NAME", help="of the one report that the file has so far")
    args = parser.parse_args(words)
    report = joined([json.loads(path.read_text()) for path in args.report], args.checkpoint)
    put(args.file, args.name, report, args.first)


if __name__ == "__main__":
    main()
