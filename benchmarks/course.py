"""The section `course` of bench profile: the time per token while a generation goes on, without a profiler.

`bench serve` divides the time from the first token to the last by the tokens between, so that what a side does once, as
decoding begins, is spread over all of them. Here the stream tells every so many tokens how far the slowest request is.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

from nsa_backend.benchmarks.generation import Servers, prompts
from nsa_backend.benchmarks.report import print_table
from nsa_backend.benchmarks.servers import BACKENDS, Streamed

TOKENS, EVERY = 256, 32


def samples(batch: int, length: int) -> int:
    """Generations a side: fewer where the prefill takes seconds."""
    return 5 if batch * length <= 1 << 16 else 3


def measure(servers: Servers, checkpoint: str, steps: int, batch: int, length: int) -> list[dict]:
    """One row: milliseconds per token of each stretch, median and least and most, of both sides, which answer in turns."""
    both, asked = servers.of(checkpoint, steps), prompts(batch, length)
    for server in both.values():
        server.generate(asked, EVERY)
    found: dict[str, list[list[float]]] = {side: [] for side in both}
    for _ in range(samples(batch, length)):
        for side, server in both.items():
            found[side].append(stretches(server.streamed(asked, TOKENS, stream_interval=EVERY)))
    row = {"checkpoint": Path(checkpoint).name, "steps": steps, "batch": batch, "length": length, "tokens": ends()}
    return [row | {side: summary(of_side) for side, of_side in found.items()}]


def ends() -> list[int]:
    """New tokens of a request at the end of each stretch; the first begins with the first token."""
    return [*range(1 + EVERY, TOKENS, EVERY), TOKENS]


def stretches(streamed: Streamed) -> list[float]:
    """Milliseconds per token of each stretch, by when the last of all requests got to its end.

    Raises:
        RuntimeError: an answer ended before TOKENS tokens.
    """

    def reached(tokens: int) -> float:
        times = [next((at for count, at in of_one if count >= tokens), None) for of_one in streamed.progress]
        if None in times:
            raise RuntimeError(f"a request of {TOKENS} new tokens ended before token {tokens}")
        return max(times)

    marks = [1, *ends()]
    return [1e3 * (reached(end) - reached(begin)) / (end - begin) for begin, end in pairwise(marks)]


def summary(found: list[list[float]]) -> dict:
    """Of each stretch the median of the samples, and the least and the most."""
    by_stretch = list(zip(*found, strict=True))
    return {
        "ms_per_token": [round(statistics.median(times), 4) for times in by_stretch],
        "min_max": [[round(min(times), 4), round(max(times), 4)] for times in by_stretch],
    }


def show(rows: list[dict]) -> None:
    """A line a side, a column a stretch, in microseconds per token; then ours less the built-in's."""
    for row in rows:
        print(f"\n{row['checkpoint']}, N = {row['steps']}, {row['batch']} x {row['length']}: us per token up to token ...")
        sides = {side: row[side]["ms_per_token"] for side in BACKENDS if side in row}
        table = [(side, *(1e3 * ms for ms in found)) for side, found in sides.items()]
        if len(sides) == len(BACKENDS):
            table.append(("ours - builtin", *(1e3 * (a - b) for a, b in zip(sides["ours"], sides["builtin"], strict=True))))
        print_table(("side", *map(str, row["tokens"])), table)
