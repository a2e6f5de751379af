"""What it takes to be ready: seconds until a server answers, and seconds and memory of each capture, as its log tells them.

Servers capture what they capture by default for so many running requests at once (--batch; SGLang allows 48 with drafts unless
told otherwise), rounds in one graph of every kind included: nothing is captured in traffic. `three_graphs` beside `ours` is
what rounds add, `builtin` what SGLang takes by itself. One server runs at a time: each tells what its captures take from what
is free on the GPU. `deep` has as many layers as DeepSeek-V3.2, small ones, since captures grow with the number of kernels and
not with their work; a rank has real ones.

Of each side a first server, which nobody records, compiles what the recorded ones find compiled. With --quick there is none,
and what a machine has yet to compile counts. A server has answered one request when its memory is taken down.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.commands import rank_serve
from nsa_backend.benchmarks.reports.captures import captures
from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.benchmarks.servers import server_options
from nsa_backend.benchmarks.servers.generation import prompts
from nsa_backend.benchmarks.servers.gpu_memory import weighed
from nsa_backend.benchmarks.servers.pairs import started
from nsa_backend.benchmarks.servers.parallel import ONE_GPU
from nsa_backend.benchmarks.servers.server import STARTING, THREE_GRAPHS, WITH_DRAFTS
from nsa_backend.benchmarks.servers.sides import checkpoint_of, sides_of

CHECKPOINT, STEPS, REQUESTS, PORT = "deep", (3,), (48, 256), 27000
LENGTH, TOKENS = 300, 65
SIDES = ("ours", THREE_GRAPHS, "builtin")


def cells(options: argparse.Namespace, resources: ExitStack) -> list[Cell]:
    """One cell a checkpoint, N, number of running requests and side."""
    requests = options.batch or (REQUESTS[:1] if options.quick else REQUESTS)
    for name in options.checkpoint or ():
        if ranks.named(name) is not None:
            rank_serve.check_room(name, [(max(requests), LENGTH)])
    folder, compiled = Path(resources.enter_context(TemporaryDirectory(prefix="nsa-bench-"))), None if options.quick else set()
    return [
        Cell(
            f"{name}, N = {n}, {most} requests, {side}",
            partial(measure, folder, options.port or PORT, compiled, name, n, most, side),
        )
        for name in options.checkpoint or [CHECKPOINT]
        for n in options.steps or STEPS
        for most in requests
        for side in (sides_of(options.sides) if options.sides else SIDES)
        if n or side not in WITH_DRAFTS
    ]


def measure(
    folder: Path, port: int, compiled: set[tuple] | None, checkpoint: str, steps: int, requests: int, side: str
) -> list[dict]:
    """One row; `compiled` has those (checkpoint, N, side) of which a server has run, None where none is to compile."""
    path = checkpoint_of(checkpoint, folder)
    if compiled is not None and (path, steps, side) not in compiled:
        served(folder, port, path, steps, requests, side)
        compiled.add((path, steps, side))
    return [{"checkpoint": path.name} | served(folder, port, path, steps, requests, side)]


def served(folder: Path, port: int, path: Path, steps: int, requests: int, side: str) -> dict:
    """What a server tells from its start to its end, alone on the GPU."""
    log, memory = folder / f"{path.name}-n{steps}-{requests}-{side}.log", []
    began = time.perf_counter()
    of_rank = ranks.rank_in(path) is not None
    alone = rank_serve.alone(rank_serve.bytes_there()) if of_rank else ()
    server = started(ONE_GPU, side, path, port, steps, log, *options_for(requests), *alone)
    with weighed(server, memory):
        server.wait(rank_serve.STARTING if of_rank else STARTING)
        ready = time.perf_counter() - began
        server.generate(prompts(1, LENGTH), TOKENS)
        host = host_gib(server.pid)
    found = captures(log.read_text(errors="replace"))
    of_rounds = [one for one in found if one["what"].startswith("whole rounds")]
    return {
        "steps": steps,
        "requests": requests,
        "side": side,
        "ready_s": round(ready, 1),
        "captures": found,
        "rounds_s": round(sum(one["seconds"] for one in of_rounds), 1),
        "rounds_gib": round(sum(one["gib"] for one in of_rounds), 3),
        "memory_gib": memory,
        "host_gib": host,
    }


def options_for(requests: int) -> list[str]:
    """Options beyond the README's command: a pool for so many requests, and no list of sizes to capture."""
    return server_options.pool([(requests, LENGTH)], TOKENS)


def host_gib(pid: int) -> float:
    """Memory that a process and all beneath it have to themselves."""
    parent, own = psutil.Process(pid), 0
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # a compiler, for one, may have ended
            own += process.memory_full_info().uss
    return round(own / 2**30, 2)


def show(report: dict) -> None:
    """A line a server, and beneath it one a capture."""
    columns = ("checkpoint", "N", "requests", "side", "ready s", "rounds s", "rounds GiB", "GiB GPU", "GiB host")
    lines = []
    for r in report["rows"]:
        cell = (r["checkpoint"], r["steps"], r["requests"], r["side"])
        of_all = (max(r["memory_gib"], default=0), r["host_gib"])
        lines.append((*cell, r["ready_s"], r["rounds_s"], *(f"{gib:.2f}" for gib in (r["rounds_gib"], *of_all))))
        for one in r["captures"]:
            what = one["what"] + (f", {one['sizes']} sizes" if "sizes" in one else "")
            lines.append((None, None, None, what, None, one["seconds"], f"{one['gib']:.2f}", None, None))
    print_table(columns, lines)
