"""Cases that no committed report has seen since a commit: what a change of that commit owes.

    python tests/e2e/owed.py COMMIT [--gpus 1] [--ranks-per-gpu 1]

Prints the names as they follow run_all.py's --cases, of the installed release, one a line; nothing where none is owed. A case
counts as seen where our side of it gave something. The history has to be there, so ask before you go to a machine without it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from workloads import CASES, Case

from nsa_backend.releases import installed

HERE = Path(__file__).resolve().parent

RESULTS = HERE.parents[1] / "benchmarks" / "results"


def seen(reports: Iterable[dict], release: str, newer: Callable[[str], bool]) -> set[str]:
    """Names of the cases that our side ran in a report of this release, of a commit that `newer` is true of."""
    found = set()
    for report in reports:
        environment = report["environment"]
        if environment["packages"].get("sglang") == release and newer(environment["commit"]):
            found |= {row["case"] for row in report["rows"] if any("ours" in given for given in row["workloads"].values())}
    return found


def committed() -> Iterator[dict]:
    """Every end-to-end report in RESULTS, whose files hold one or several."""
    for path in sorted(RESULTS.glob("e2e_*.json")):
        report = json.loads(path.read_text())
        yield from report.get("reports", {"": report}).values()


def owed(cases: Iterable[Case], gpus: int, known: set[str], ranks_per_gpu: int = 1) -> list[str]:
    """Names of the cases for this number of GPUs, and of ranks on each, in their order, that are not known."""
    on_these = [case for case in cases if (case.gpus, case.ranks_per_gpu) == (gpus, ranks_per_gpu) and case.runs_here()]
    return [case.name for case in on_these if case.name not in known]


def is_since(commit: str, where: Path = HERE) -> Callable[[str], bool]:
    """Whether a commit of the repository around `where` has `commit` in its history, or is it.

    Raises:
        SystemExit: `commit` is none of this history.
    """

    def asked(*words: str) -> int:
        return subprocess.run(["git", "-C", str(where), *words], capture_output=True, check=False).returncode

    if asked("cat-file", "-e", f"{commit}^{{commit}}"):
        sys.exit(f"{commit} is no commit of this history: name one of `git log`")
    return lambda other: asked("merge-base", "--is-ancestor", commit, other) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--ranks-per-gpu", type=int, default=1)
    args = parser.parse_args()
    known = seen(committed(), installed(), is_since(args.commit))
    for name in owed(CASES, args.gpus, known, args.ranks_per_gpu):
        print(shlex.quote(name))


if __name__ == "__main__":
    main()
