"""A speculative round (draft, verify, draft-extend) of real servers, ours beside SGLang's built-in, in one run.

Both servers live on the same GPU and answer in turns, so that noise of the machine meets both. A round is timed from the
outside: from the last request's first token to the last answer, over the rounds that the accept histogram counts. One profiled
generation each gives launches, kernel time and the spans of the captured graphs; `outside_graphs_ms` is the time of a round
less those spans: what the host and uncaptured kernels take.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.benchmarks.reports.traces import ON_DEVICE, calls_a_round, graph_launches, host_calls, read_events
from nsa_backend.benchmarks.servers.generation import counted, in_turns, prompts, spread
from nsa_backend.benchmarks.servers.server import ENVIRONMENTS
from nsa_backend.benchmarks.servers.sides import Servers

TOKENS, LENGTH, PORT = 256, 300, 23000
PROFILED_TOKENS = 64  # a trace of more takes longer to write than everything else


def cells(options: argparse.Namespace, resources: ExitStack) -> list[Cell]:
    """One cell a checkpoint, N and batch; the servers of a checkpoint and N stay for all batches."""
    steps = options.steps or [3]
    if 0 in steps:
        raise SystemExit("bench draft measures speculative rounds: --steps must be at least 1")
    batches = options.batch or ([1] if options.quick else [1, 8, 32])
    shapes = [(batch, length) for length in options.length or [LENGTH] for batch in batches]
    folder = Path(resources.enter_context(TemporaryDirectory(prefix="nsa-bench-")))
    servers = Servers(folder, options.port or PORT, shapes, TOKENS, options.sides)
    resources.callback(servers.close)
    repeats = 2 if options.quick else 7
    return [
        Cell(f"{name}, N = {n}, {batch} x {length}", partial(measure, servers, folder, name, n, batch, length, repeats))
        for name in options.checkpoint or ["faithful"]
        for n in steps
        for batch, length in shapes
    ]


def measure(servers: Servers, folder: Path, checkpoint: str, steps: int, batch: int, length: int, repeats: int) -> list[dict]:
    both = servers.of(checkpoint, steps)
    row = {"checkpoint": Path(checkpoint).name, "steps": steps, "batch": batch, "length": length, "tokens": TOKENS}
    for backend, found in in_turns(both, batch, length, TOKENS, repeats).items():
        traces = folder / f"profile-{backend}-{row['checkpoint']}-{steps}-{batch}-{length}"
        answers = both[backend].profiled(traces, prompts(batch, length), PROFILED_TOKENS)
        profile = read_profile(traces, counted(answers, PROFILED_TOKENS)[0])
        round_ms = spread([one.round_ms for one in found])
        row[backend] = {
            "round_ms": round_ms["median"],
            "round_ms_min_max": round_ms["min_max"],
            "outside_graphs_ms": round(round_ms["median"] - profile["in_graphs_us"] / 1e3, 3),
            "accept": spread([one.accept for one in found])["median"],
            "tokens_per_s": spread([one.tokens_per_s for one in found], 1)["median"],
            "profile": profile,
        }
    return [row]


def read_profile(folder: Path, rounds: int) -> dict:
    """What a trace of SGLang's profiler holds, a round.

    A graph's kernels carry the correlation of the call that launched it; its span runs from the begin of the first to the end
    of the last of them.
    """
    events = read_events(folder)
    calls = host_calls(events)
    kernels = [e for e in events if e.get("cat") == "kernel"]
    names = Counter(e["name"] for e in calls)
    of_graph = graph_launches(calls)
    replays = defaultdict(list)
    for event in events:
        if event.get("cat") in ON_DEVICE and event["args"].get("correlation") in of_graph:
            replays[event["args"]["correlation"]].append(event)
    by_size = defaultdict(list)
    for replay in replays.values():
        by_size[len(replay)].append(max(e["ts"] + e["dur"] for e in replay) - min(e["ts"] for e in replay))

    def share(word: str) -> float:
        return round(sum(count for name, count in names.items() if word in name) / rounds, 1)

    return {
        "kernels": round(len(kernels) / rounds, 1),
        "kernel_us": round(sum(e["dur"] for e in kernels) / rounds, 1),
        "launch_calls": share("LaunchKernel"),
        "graph_launches": share("GraphLaunch"),
        "synchronisations": share("Synchronize"),
        "copies": share("Memcpy"),
        "calls_a_round": calls_a_round(events),
        "in_graphs_us": round(sum(map(sum, by_size.values())) / rounds, 1),
        "graphs": [
            {"nodes": size, "replays": round(len(spans) / rounds, 2), "span_us": round(statistics.median(spans), 1)}
            for size, spans in sorted(by_size.items())
        ],
    }


def show(report: dict) -> None:
    """Medians; the spread of a round is min to max over the repeats."""
    columns = (
        "checkpoint", "N", "batch", "backend", "round ms", "min-max", "outside graphs ms", "kernel us", "launches",
        "graph launches", "accept", "tokens/s",
    )  # fmt: skip
    table = []
    for r in report["rows"]:
        for backend in filter(r.__contains__, ENVIRONMENTS):
            side, profile = r[backend], r[backend]["profile"]
            low_high = "{:.2f}-{:.2f}".format(*side["round_ms_min_max"])
            times = (f"{side['round_ms']:.2f}", low_high, f"{side['outside_graphs_ms']:.2f}", profile["kernel_us"])
            calls = (profile["launch_calls"], profile["graph_launches"], f"{side['accept']:.2f}", side["tokens_per_s"])
            table.append((r["checkpoint"], r["steps"], r["batch"], backend, *times, *calls))
    print_table(columns, table)
