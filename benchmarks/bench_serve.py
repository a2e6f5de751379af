"""Real servers over HTTP, ours and SGLang's built-in: tokens per second, time per output token, accept length.

Same checkpoint, same prompts, greedy; N draft steps from 0 (no speculation) to 5, batches from 1 to 32. Both servers of a
comparison live on the same GPU and answer in turns. Two checkpoints are made up on the spot, both with an MTP layer that equals
the target, so that every draft is right if it attends to the right tokens: `faithful`, two layers of 64 heads, shows what the
host and the backend cost; `wide`, twelve layers of 128 heads with 64 experts, 8 a token, gives the GPU work to do.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from nsa_backend.benchmarks import faithful_checkpoint
from nsa_backend.benchmarks.bench_common import print_table
from nsa_backend.benchmarks.cells import Cell
from nsa_backend.benchmarks.generation import Servers, in_turns, spread
from nsa_backend.benchmarks.servers import BACKENDS

TOKENS, LENGTH, PORT = 256, 300, 35000


def cells(options: argparse.Namespace, resources: ExitStack) -> list[Cell]:
    """One cell a checkpoint, N and batch; the servers of a checkpoint and N stay for all batches."""
    servers = Servers(Path(tempfile.mkdtemp(prefix="nsa-bench-")), PORT)
    resources.callback(servers.close)
    length, repeats = (options.length or [LENGTH])[0], 2 if options.quick else 5
    return [
        Cell(f"{name}, N = {n}, batch {batch}", partial(measure, servers, name, n, batch, length, repeats))
        for name in options.checkpoint or (["faithful"] if options.quick else list(faithful_checkpoint.SHAPES))
        for n in options.steps or ([0, 3] if options.quick else [0, 1, 3, 5])
        for batch in options.batch or ([1, 8] if options.quick else [1, 8, 32])
    ]


def measure(servers: Servers, checkpoint: str, steps: int, batch: int, length: int, repeats: int) -> list[dict]:
    row = {"checkpoint": checkpoint, "steps": steps, "batch": batch, "length": length, "tokens": TOKENS}
    for backend, found in in_turns(servers.of(checkpoint, steps), batch, length, TOKENS, repeats).items():
        row[backend] = {
            "tokens_per_s": spread([one.tokens_per_s for one in found], 1),
            "tpot_ms": spread([one.tpot_ms for one in found]),
            "accept": spread([one.accept for one in found])["median"],
        }
    row["speedup"] = round(row["ours"]["tokens_per_s"]["median"] / row["builtin"]["tokens_per_s"]["median"], 3)
    return [row]


def show(report: dict) -> None:
    """Medians; the spread is min to max over the repeats."""
    columns = ("checkpoint", "N", "batch", "backend", "tokens/s", "min-max", "ms per token", "min-max", "accept", "speed-up")
    table = []
    for r in report["rows"]:
        for backend in BACKENDS:
            side = r[backend]
            rate, time = side["tokens_per_s"], side["tpot_ms"]
            speed = (rate["median"], "{:.0f}-{:.0f}".format(*rate["min_max"]))
            latency = (f"{time['median']:.3f}", "{:.3f}-{:.3f}".format(*time["min_max"]))
            ratio = f"{r['speedup']:.2f}" if backend == "ours" else ""
            table.append((r["checkpoint"], r["steps"], r["batch"], backend, *speed, *latency, f"{side['accept']:.2f}", ratio))
    print_table(columns, table)
