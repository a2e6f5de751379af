"""The trained checkpoint served: accept lengths by draft position, speed, and the best N, ours beside SGLang's built-in.

    python -m nsa_backend.benchmarks.bench_trained RUN --steps 1 2 3 5 7 --out OUT.json [--minutes 20] [--port 36000]
    python -m nsa_backend.benchmarks.bench_trained --merge N1.json N3.json --out OUT.json

RUN is the folder of train_checkpoint. Prompts are stretches of packages that the model was not trained on. For every N the
servers of all sides run at the same time on the GPU that CUDA_VISIBLE_DEVICES names; `shared` is our backend with draft steps
that all attend to L + 1 tokens (so they see the first draft, and the first one sees itself). Speed is measured first, in turns;
then accept lengths, all servers at once, until each has a standard error below 0.02. OUT.json is written after every step.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from nsa_backend.benchmarks.bench_common import environment, print_table
from nsa_backend.benchmarks.cells import write_report
from nsa_backend.benchmarks.trained.measure import AcceptCell, measure_accept, measure_speed
from nsa_backend.benchmarks.trained.prompts import held_out_prompts
from nsa_backend.benchmarks.trained.serving import SIDES, started

TOKENS = 256
REPEATS = {1: 12, 8: 4, 32: 3}
"""Timed generations by batch: one request alone says little of the others."""


def main() -> int:
    args = parsed()
    if args.merge:
        report = merged([json.loads(path.read_text()) for path in args.merge])
        write_report(args.out, report)
        show(report)
        return 0
    began = time.monotonic()
    training = json.loads((args.run / "training.json").read_text())
    report = {
        "environment": environment(),
        "command": shlex.join(["python", "-m", "nsa_backend.benchmarks.bench_trained", *sys.argv[1:]]),
        "training": {key: value for key, value in training.items() if key not in ("log", "packages")},
        "held_out_packages": training["packages"]["held_out"],
        "accept": [],
        "speed": [],
    }
    for number, steps in enumerate(args.steps):
        left = began + 60 * args.minutes - time.monotonic()
        run_steps(args, steps, time.monotonic() + left / (len(args.steps) - number), report, began)
    show(report)
    return 0


def run_steps(args: argparse.Namespace, steps: int, deadline: float, report: dict, began: float) -> None:
    """Everything of one N, with servers of its own; `report` grows and is written."""
    sides = [side for side in args.sides if steps > 1 or side != "shared"]

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    def prompts(length: int, count: int) -> list[list[int]]:
        return held_out_prompts(args.run, length, count)

    with ExitStack() as stack:
        say(f"N = {steps}: starting {', '.join(sides)}")
        servers = started(stack, args.run, [(side, steps) for side in sides], args.port, args.logs)
        say(f"N = {steps}: all servers answer")
        for batch in args.batch:
            row = measure_speed(servers, batch, prompts, length=300, tokens=TOKENS, repeats=REPEATS.get(batch, 3))
            report["speed"].append(row)
            write_report(args.out, report)
            rates = ", ".join(f"{side} {row[side]['tokens_per_s']:.0f}" for side in sides)
            say(f"N = {steps}, batch {batch}: {rates} tokens/s")
        if steps == 0:
            return
        earlier = report["accept"]
        cells = [AcceptCell(steps, length, t) for t in args.temperature for length in args.length]

        def keep() -> None:
            report["accept"] = earlier + [cell.row(TOKENS) for cell in cells if cell.requests]
            write_report(args.out, report)

        measure_accept(
            servers, cells, prompts, tokens=TOKENS, error=args.error, most=args.requests, deadline=deadline, keep=keep, say=say
        )


def merged(reports: list[dict]) -> dict:
    """Rows of all reports, by N. Raises ValueError where they are not of one training run."""
    if any(report["training"] != reports[0]["training"] for report in reports):
        raise ValueError("these files measure different checkpoints: merge only what came of one training run")
    rows = {
        name: sorted((row for r in reports for row in r[name]), key=lambda row: row["steps"]) for name in ("accept", "speed")
    }
    return reports[0] | {"command": [report["command"] for report in reports]} | rows


def show(report: dict) -> None:
    """Two tables: accept lengths with standard errors and the share of rounds that accept each draft; tokens per second."""
    table = []
    for row in report["accept"]:
        for side in filter(row.__contains__, SIDES):
            found = row[side]
            accept = f"{found['accept']:.3f} ± {found['standard_error'] or float('nan'):.3f}"
            shares = " ".join(f"{share:.2f}" for share in found["accepted"])
            table.append((row["steps"], row["length"], row["temperature"], row["requests"], side, accept, shares))
    print_table(("N", "prompt", "temperature", "requests", "side", "accept length", "accepted by position"), table)
    table = []
    for row in report["speed"]:
        for side in filter(row.__contains__, SIDES):
            found = row[side]
            mark = "best N" if best(report, row["batch"], side) == row["steps"] else ""
            speed = (f"{found['tokens_per_s']:.0f}", f"{found['tpot_ms']['median']:.3f}")
            table.append((row["batch"], row["steps"], side, *speed, mark))
    print_table(("batch", "N", "side", "tokens/s", "ms per token", ""), sorted(table, key=lambda r: (r[0], r[2], r[1])))


def best(report: dict, batch: int, side: str) -> int:
    """The N with the most tokens per second of `side`."""
    rows = [row for row in report["speed"] if row["batch"] == batch and side in row]
    return max(rows, key=lambda row: row[side]["tokens_per_s"])["steps"]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="the folder that train_checkpoint wrote to")
    parser.add_argument("--merge", type=Path, nargs="+", help="reports to put together instead of measuring")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 3, 5, 7], help="draft steps N; 0: no speculation")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--length", type=int, nargs="+", default=[300, 1500, 3500], help="tokens of a prompt")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="0 is greedy; above, top-p is 0.95"
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="of the speed rows; none: no speed rows")
    parser.add_argument("--error", type=float, default=0.02, help="standard error of an accept length to reach")
    parser.add_argument("--requests", type=int, default=2048, help="most requests of one accept length")
    parser.add_argument("--minutes", type=float, default=20.0, help="bound on the run time, shared between the values of N")
    parser.add_argument(
        "--port", type=int, default=36000, help="of the first server; runs at the same time need ports 2000 apart"
    )
    parser.add_argument("--logs", type=Path, default=None, help="folder for the servers' logs")
    args = parser.parse_args()
    if (args.run is None) == (args.merge is None):
        parser.error("pass either RUN, the folder of train_checkpoint, or --merge FILE...")
    args.logs = args.logs or Path(tempfile.mkdtemp(prefix="nsa-trained-"))
    return args


if __name__ == "__main__":
    sys.exit(main())
