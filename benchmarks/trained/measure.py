"""What is measured of running servers: accept lengths until they are known well enough, and speed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from nsa_backend.benchmarks.generation import Sample, sample_of, spread, summary
from nsa_backend.benchmarks.trained.accept import paired, statistics
from nsa_backend.benchmarks.trained.serving import BATCHES, SideServer, sampling_at

FIRST = BATCHES[-1]
"""Requests of the first wave of a cell, after which its standard error is believed."""
WAVE = 2 * BATCHES[-1]
"""Of every later one: a server that always has the next request waiting is not idle while the slowest ones end."""

Prompts = Callable[[int, int, int], list[list[int]]]
"""(length, first, count) to prompts number first, ..., first + count - 1 of an endless list."""


@dataclass
class AcceptCell:
    """Accept lengths of all servers on the same prompts, one length and temperature."""

    steps: int
    length: int
    temperature: float
    histograms: dict[str, list[list[int]]] = field(default_factory=dict)  # by side, by request

    @property
    def requests(self) -> int:
        return min(map(len, self.histograms.values()), default=0)

    @property
    def error(self) -> float:
        """The largest standard error of a side; infinite before the first wave."""
        if self.requests < FIRST:
            return float("inf")
        return max(statistics(found)["standard_error"] for found in self.histograms.values())

    def row(self, tokens: int) -> dict:
        head = {"steps": self.steps, "length": self.length, "temperature": self.temperature, "tokens": tokens}
        histograms = self.histograms
        sides = {side: statistics(found) for side, found in histograms.items()}
        both = {"ours", "builtin"} <= set(sides)
        gain = {"gain": paired(histograms["ours"], histograms["builtin"])} if both else {}
        return head | {"requests": min(map(len, histograms.values()))} | sides | gain


def measure_accept(
    servers: list[SideServer], cells: list[AcceptCell], prompts: Prompts, *, tokens: int, error: float, most: int,
    deadline: float, keep: Callable[[], None], say: Callable[[str], None],
) -> None:  # fmt: skip
    """Wave after wave for the cell that is known worst, until all are within `error`, have `most` requests, or time is up.

    Args:
        servers: asked at the same time; what they accept does not depend on how fast they are.
        cells: filled in place.
        prompts: where they come from.
        tokens: new ones a request.
        error: standard error of the accept length to reach.
        most: requests of a cell.
        deadline: of time.monotonic(), for the start of a wave.
        keep: called after every wave.
        say: called with a line a wave.
    """
    with ThreadPoolExecutor(len(servers)) as pool:
        while time.monotonic() < deadline:
            open_cells = [c for c in cells if c.error > error and c.requests < most]
            if not open_cells:
                return
            cell = min(open_cells, key=lambda c: (-c.error, c.requests))
            asked = prompts(cell.length, cell.requests, WAVE if cell.requests else FIRST)
            answers = list(pool.map(lambda s: s.sampled(asked, tokens, cell.temperature), servers))  # noqa: B023
            cell.histograms = {  # whole at once: another thread may be writing the report
                server.side: cell.histograms.get(server.side, [])
                + [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in found]
                for server, found in zip(servers, answers, strict=True)
            }
            keep()
            means = ", ".join(f"{side} {statistics(found)['accept']:.3f}" for side, found in cell.histograms.items())
            say(f"N = {cell.steps}, {cell.length} tokens, T = {cell.temperature:g}: {cell.requests} requests, {means}")


def measure_speed(
    servers: list[SideServer], batch: int, prompts: Prompts, *, length: int, tokens: int, repeats: int, temperature: float = 0.0
) -> dict:
    """A row: generations of one batch, server after server on the same prompts, other prompts in every repeat."""
    sampling = sampling_at(temperature)
    found: dict[str, list[Sample]] = {server.side: [] for server in servers}
    for repeat in range(repeats + 1):
        asked = prompts(length, batch * repeat, batch)
        for server in servers:
            one = sample_of(server, asked, tokens, **sampling)
            if repeat:  # the first one warms up
                found[server.side].append(one)
    row = {"steps": servers[0].steps, "batch": batch, "length": length, "temperature": temperature, "tokens": tokens}
    for side, samples in found.items():
        each = summary(samples)
        row[side] = each | {
            "tokens_per_s": round(sum(s.batch * s.tokens for s in samples) / sum(s.seconds for s in samples), 1),
            "tokens_per_s_spread": each["tokens_per_s"],
            "accept": spread([s.accept for s in samples]),  # prompts differ, and with them what is accepted
        }
    return row
