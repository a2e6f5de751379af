"""Draw figures from result files: attention by rows. SVG and PNG.

Needs matplotlib: pip install 'sglang-nsa-backend[plot]'.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

EXAMPLE = "python -m nsa_backend plot --results benchmarks/results --out docs/figures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder with *_h200.json")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder for the figures")


def run(args: argparse.Namespace) -> int:
    if find_spec("matplotlib") is None:
        raise SystemExit("plot needs matplotlib: pip install 'sglang-nsa-backend[plot]'")
    from nsa_backend.benchmarks.reports.figures import draw_all

    for path in draw_all(args.results, args.out):
        print(path)  # noqa: T201 (the command's output)
    return 0
