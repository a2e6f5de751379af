"""The trained checkpoint served: accept lengths by draft position, speed, and the best N, ours beside SGLang's built-in.

    python -m nsa_backend.benchmarks.bench_trained RUN --steps 0 1 2 3 5 7 --out OUT.json [--minutes 20] [--port 16000]
    python -m nsa_backend.benchmarks.bench_trained --merge N1.json N3.json --out OUT.json

RUN is the folder of train_checkpoint. Prompts are stretches of packages that the model was not trained on. The servers of
every N and side start at the same time on the GPU that CUDA_VISIBLE_DEVICES names; `shared` is our backend with draft steps
that all attend to L + 1 tokens (so they see the first draft, and the first one sees itself). First every accept length is
measured with a few requests, all servers at once, then speed, one server at a time with those of every other N stopped, greedy
rows of every N before sampled ones, then accept lengths again until each has a standard error below 0.02. OUT.json is written
after every step. A server that does not answer when half of the minutes are over is ended; it, or an N that fails, is named
under `problems`, and the rest goes on. Exits with 0 where all was measured, else 1.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from threading import Lock

from nsa_backend.benchmarks.report import environment, print_table, write_report
from nsa_backend.benchmarks.trained.bar import Clock
from nsa_backend.benchmarks.trained.gpu_lock import alone
from nsa_backend.benchmarks.trained.measure import FIRST, AcceptCell, measure_accept, measure_speed
from nsa_backend.benchmarks.trained.pausing import paused
from nsa_backend.benchmarks.trained.prompts import held_out_prompts
from nsa_backend.benchmarks.trained.serving import SIDES, START_SECONDS, Started, started

TOKENS = 256
REPEATS = {1: 12, 8: 4, 32: 3}
"""Timed generations by batch: one request alone says little of the others."""
SPEED_ORDER = (0, 3, 1, 2, 5, 7)
"""Values of N, the ones that say most first (what all others are compared with is 0); those that are not here come last."""
STARTING_SHARE = 0.5
"""Of the minutes, the most that servers may take to start: with those that answer then the rest is measured."""


def main() -> int:
    args = parsed()
    if args.merge:
        report = merged([json.loads(path.read_text()) for path in args.merge])
        write_report(args.out, report)
        show(report)
        return 1 if report["problems"] else 0
    training = json.loads((args.run / "training.json").read_text())
    report = {
        "environment": environment(),
        "command": shlex.join(["python", "-m", "nsa_backend.benchmarks.bench_trained", *sys.argv[1:]]),
        "training": {key: value for key, value in training.items() if key not in ("log", "packages")},
        "held_out_packages": training["packages"]["held_out"],
        "accept": [],
        "speed": [],
        "problems": [],
    }
    wanted = [(side, n) for n in args.steps for side in args.sides if side in sides_of(n)]
    say = Clock()
    with ExitStack() as stack:
        patience = min(START_SECONDS, STARTING_SHARE * 60 * args.minutes)
        servers = started(stack, args.run, wanted, args.port, args.logs, say, seconds=patience)
        say(f"{len(servers.servers)} of {len(wanted)} servers answer")
        report["problems"] += servers.problems
        Bench(args, servers, report, say).run()
    show(report)
    return 1 if report["problems"] else 0


def sides_of(steps: int) -> list[str]:
    """Sides that differ: with one draft there are no draft steps, so one length for all of them changes nothing."""
    return [side for side in SIDES if steps > 1 or side != "shared"]


class Bench:
    """The measurements of running servers, and the report that grows."""

    def __init__(self, args: argparse.Namespace, servers: Started, report: dict, say: Clock):
        self.args, self.servers, self.report, self.say = args, servers, report, say
        self.steps = [n for n in args.steps if servers.of(n)]
        self.cells = [AcceptCell(n, length, t) for n in self.steps if n for t in args.temperature for length in args.length]
        self._lock = Lock()
        self.deadline = say.began + 60 * args.minutes

    def run(self) -> None:
        self.accept(most=FIRST)
        if self.args.batch:
            self.speed()
        self.accept(most=self.args.requests)
        for cell in self.cells:
            if cell.error > self.args.error:
                self.say(f"N = {cell.steps}, {cell.length} tokens, T = {cell.temperature:g}: known to {cell.error:.3f}")
        self.keep()

    def accept(self, most: int) -> None:
        """All values of N at once, each for its own cells; one that fails leaves the others alone."""
        with ThreadPoolExecutor(max(1, len(self.steps))) as pool:
            list(pool.map(lambda n: self.guarded(f"accept lengths of N = {n}", lambda: self.accept_of(n, most)), self.steps))

    def accept_of(self, steps: int, most: int) -> None:
        measure_accept(
            self.servers.of(steps), [c for c in self.cells if c.steps == steps], self.prompts, tokens=TOKENS,
            error=self.args.error, most=most, deadline=self.deadline, keep=self.keep, say=self.say,
        )  # fmt: skip

    def speed(self) -> None:
        """One server after another, while nobody else uses the GPU and the servers of every other N stand still."""
        with alone(self.deadline - 60) as free:
            if not free:
                self.problem("another program was busy on this GPU until the end: speed was not measured")
                return
            order = sorted(self.steps, key=lambda n: [*SPEED_ORDER, n].index(n))
            for temperature, steps in product(self.args.speed_temperature, order):  # greedy rows of every N come first
                with paused(server.pid for server in self.servers.servers if server.steps != steps):
                    for batch in self.args.batch:
                        what = f"speed of N = {steps}, batch {batch}, T = {temperature:g}"
                        self.guarded(what, lambda: self.speed_of(steps, batch, temperature, what))  # noqa: B023

    def speed_of(self, steps: int, batch: int, temperature: float, what: str) -> None:
        if time.monotonic() > self.deadline:
            self.problem(f"{what}: no time was left")
            return
        servers, repeats = self.servers.of(steps), REPEATS.get(batch, 3)
        row = measure_speed(servers, batch, self.prompts, length=300, tokens=TOKENS, repeats=repeats, temperature=temperature)
        self.report["speed"].append(row)
        self.keep()
        self.say(f"{what}: " + ", ".join(f"{one.side} {row[one.side]['tokens_per_s']:.0f}" for one in servers) + " tokens/s")

    def guarded(self, what: str, doing) -> None:
        try:
            doing()
        except Exception as error:  # whatever one server does, the others are measured, and the report says so
            self.problem(f"{what}: {type(error).__name__}: {error}")

    def problem(self, text: str) -> None:
        self.report["problems"].append(text)
        self.say(text)
        self.keep()

    def keep(self) -> None:
        with self._lock:
            self.report["accept"] = [cell.row(TOKENS) for cell in self.cells if cell.requests]
            write_report(self.args.out, self.report)

    def prompts(self, length: int, first: int, count: int) -> list[list[int]]:
        return held_out_prompts(self.args.run, length, first + count, first=first)


def merged(reports: list[dict]) -> dict:
    """Rows of all reports, by N; of an accept length that was measured twice the one with more requests.

    Raises:
        ValueError: they are not of one training run.
    """
    if any(report["training"] != reports[0]["training"] for report in reports):
        raise ValueError("these files measure different checkpoints: merge only what came of one training run")
    rows = {
        name: sorted((row for r in reports for row in r[name]), key=lambda row: row["steps"]) for name in ("accept", "speed")
    }
    known: dict[tuple, dict] = {}
    for row in rows["accept"]:
        place = (row["steps"], row["length"], row["temperature"])
        known[place] = max(row, known.get(place, row), key=lambda one: one["requests"])
    rows["accept"] = list(known.values())
    together = {"command": [r["command"] for r in reports], "problems": [text for r in reports for text in r["problems"]]}
    return reports[0] | together | rows


def show(report: dict) -> None:
    """Two tables: accept lengths with standard errors and the share of rounds that accept each draft; tokens per second."""
    table = []
    for row in report["accept"]:
        for side in filter(row.__contains__, SIDES):
            found = row[side]
            accept = known(found["accept"], found["standard_error"])
            shares = " ".join(f"{share:.2f}" for share in found["accepted"])
            table.append((row["steps"], row["length"], f"{row['temperature']:g}", row["requests"], side, accept, shares))
        if "gain" in row:
            table.append((None, None, None, None, "ours / builtin", known(*row["gain"].values()), None))
    print_table(("N", "prompt", "temperature", "requests", "side", "accept length", "accepted by position"), table)
    table = []
    for row in report["speed"]:
        for side in filter(row.__contains__, SIDES):
            found = row[side]
            temperature = row.get("temperature", 0.0)
            mark = "best N" if best(report, row["batch"], side, temperature) == row["steps"] else ""
            speed = (f"{found['tokens_per_s']:.0f}", f"{found['tpot_ms']['median']:.3f}")
            table.append((f"{temperature:g}", row["batch"], side, row["steps"], *speed, mark))
    print_table(("temperature", "batch", "side", "N", "tokens/s", "ms per token", ""), sorted(table, key=lambda r: r[:4]))


def known(value: float, error: float | None) -> str:
    """A value with its standard error, of which one request has none."""
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def best(report: dict, batch: int, side: str, temperature: float = 0.0) -> int:
    """The N with the most tokens per second of `side`."""
    wanted = (batch, temperature)
    rows = [row for row in report["speed"] if (row["batch"], row.get("temperature", 0.0)) == wanted and side in row]
    return max(rows, key=lambda row: row[side]["tokens_per_s"])["steps"]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="the folder that train_checkpoint wrote to")
    parser.add_argument("--merge", type=Path, nargs="+", help="reports to put together instead of measuring")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 1, 2, 3, 5, 7], help="draft steps N; 0: no speculation")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument(
        "--length", type=int, nargs="*", default=[300, 1500, 3500], help="tokens of a prompt; none: no accept lengths"
    )
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="0 is greedy; above, top-p is 0.95"
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="of the speed rows; none: no speed rows")
    parser.add_argument("--speed-temperature", type=float, nargs="+", default=[0.0], help="the same of the speed rows")
    parser.add_argument("--error", type=float, default=0.02, help="standard error of an accept length to reach")
    parser.add_argument("--requests", type=int, default=8192, help="most requests of one accept length")
    parser.add_argument("--minutes", type=float, default=20.0, help="bound on the run time, starting included")
    parser.add_argument(
        "--port", type=int, default=16000, help="of the first server; runs at the same time need ports 2000 apart"
    )
    parser.add_argument("--logs", type=Path, default=None, help="folder for the servers' logs")
    args = parser.parse_args()
    if (args.run is None) == (args.merge is None):
        parser.error("pass either RUN, the folder of train_checkpoint, or --merge FILE...")
    args.logs = args.logs or Path(tempfile.mkdtemp(prefix="nsa-trained-"))
    return args


if __name__ == "__main__":
    sys.exit(main())
