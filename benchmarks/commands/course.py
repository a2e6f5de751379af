"""The section `course` of bench profile: the time per token while a generation goes on, without a profiler.

`bench serve` divides the time from the first token to the last by the tokens between, so that what a side does once, as
decoding begins, is spread over all of them. Here the stream tells every so many tokens how far the slowest request is.
"""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise
from pathlib import Path

from nsa_backend.benchmarks.commands import course_servers
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.benchmarks.servers.generation import prompts
from nsa_backend.benchmarks.servers.server import BACKENDS, Server, Streamed, side_of
from nsa_backend.benchmarks.servers.sides import Servers

TOKENS, EVERY = 256, 32
FORCED, BIAS = 1000, 1e4  # a token, and what is added to its logit


def samples(batch: int, length: int, servers: int) -> int:
    """Generations a server: fewer where the prefill takes seconds, and where each side has more than one of `servers`."""
    short = batch * length <= 1 << 16
    if servers > len(BACKENDS):
        return 3 if short else 2
    return 5 if short else 3


def measure(servers: Servers, checkpoint: str, steps: int, batch: int, length: int) -> list[dict]:
    """Two rows, of greedy answers and of forced ones: milliseconds per token of each stretch, of servers that answer in turns.

    With one server a side a row has them under the names of the sides; with more of them under `servers`, and under `sides`
    what they tell of the sides (`course_servers`).
    """
    running, asked = servers.of(checkpoint, steps), prompts(batch, length)
    for server in running.values():
        server.generate(asked, EVERY)
    shape = {"checkpoint": Path(checkpoint).name, "steps": steps, "batch": batch, "length": length}
    rows = []
    for forced in (False, True):
        rows.append(shape | of_answers(running, asked, forced))
        print(f"{title(rows[-1])}: {told(rows[-1])}", file=sys.stderr)  # at once, for a run that is cut
    return rows


def of_answers(running: dict[str, Server], asked: list[list[int]], forced: bool) -> dict:
    """Median, least and most of each stretch, by server, and how many tokens are alike.

    Greedy answers of the sides part at ties, and other tokens go to other experts of a mixture: more of them or fewer, whose
    weights take longer to read than anything here. Forced answers are FORCED over and over on both sides.
    """
    options = {"logit_bias": {str(FORCED): BIAS}} if forced else {}
    found: dict[str, list[list[float]]] = {name: [] for name in running}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(samples(len(asked), len(asked[0]), len(running))):
        for name, server in running.items():
            streamed = server.streamed(asked, TOKENS, stream_interval=EVERY, **options)
            found[name].append(stretches(streamed))
            tokens[name] = [answer["output_ids"] for answer in streamed.answers]
    row = {"forced": forced, "tokens": ends(), "equal_tokens": round(equal_share(*tokens.values()), 3)}
    of_each = {name: summary(of_one) for name, of_one in found.items()}
    if all(name == side_of(name) for name in running):
        return row | of_each
    return row | {"servers": of_each, "sides": course_servers.compared(of_each, row["tokens"])}


def equal_share(*sides: list[list[int]]) -> float:
    """Share of the new tokens that all servers have alike."""
    alike = [len(set(found)) == 1 for answers in zip(*sides, strict=True) for found in zip(*answers, strict=True)]
    return sum(alike) / len(alike)


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


def title(row: dict) -> str:
    return f"{row['checkpoint']}, N = {row['steps']}, {row['batch']} x {row['length']}" + ", forced" * row["forced"]


def told(row: dict) -> str:
    """One line of what a row comes to."""
    if "servers" in row:
        return course_servers.told(row)
    us = {side: course_servers.mean_us(row[side]["ms_per_token"], row["tokens"]) for side in BACKENDS if side in row}
    return ", ".join(f"{side} {mean:.1f} us per token" for side, mean in us.items())


def show(rows: list[dict]) -> None:
    """A line a server, a column a stretch, in microseconds per token; then ours less the built-in's."""
    for row in rows:
        print(f"\n{title(row)}: us per token up to token ...; {row['equal_tokens']:.1%} of the tokens are alike")
        if "servers" in row:
            course_servers.show(row)
            continue
        sides = {side: row[side]["ms_per_token"] for side in BACKENDS if side in row}
        table = [(side, *(1e3 * ms for ms in found)) for side, found in sides.items()]
        if len(sides) == len(BACKENDS):
            table.append(("ours - builtin", *(1e3 * (a - b) for a, b in zip(sides["ours"], sides["builtin"], strict=True))))
        print_table(("side", *map(str, row["tokens"])), table)
