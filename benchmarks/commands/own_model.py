"""A user's own checkpoint and prompts, served by ours and by SGLang's built-in, one server at a time.

One server at a time may take every GPU it is given: real weights do not fit twice. For every N and side a server starts, and
for every batch the prompts go through it in groups of that many, in their order, greedily, each up to its end token.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from nsa_backend.benchmarks.reports.accept import paired, statistics
from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.servers import prompt_file, server_options
from nsa_backend.benchmarks.servers.generation import Sample, compared, counted, sampling_of, spread, summary
from nsa_backend.benchmarks.servers.gpu_memory import weighed
from nsa_backend.benchmarks.servers.server import BACKENDS, Server
from nsa_backend.benchmarks.servers.sides import sides_of

TOKENS, PORT = 256, 25000
STEPS, BATCHES = (0, 1, 3), (1, 8, 32)
GROUPS = 32
"""Most groups of a batch that are measured: a thousand prompts one by one would take half an hour."""
LOADING = 3600.0  # seconds that weights may take to load


@dataclass(frozen=True)
class Group(Sample):
    """One group of prompts; `tokens` is the longest answer of it."""

    new_tokens: int = 0  # of all answers

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds


@dataclass
class Measured:
    """What one server of one N did, by batch."""

    groups: dict[int, list[Group]]
    histograms: dict[int, list[list[int]]]  # of every request; empty without speculation
    memory: list[float]  # GiB that came free on each GPU when it ended


def cells(options: argparse.Namespace, resources: ExitStack) -> list[Cell]:
    """One cell an N and side: the first side gives rows, the second completes them."""
    model = Path(options.model)
    if not (model / "config.json").exists():
        raise SystemExit(f"--model {model} is no folder with a config.json: pass the folder of a checkpoint")
    batches = options.batch or list(BATCHES)
    prompts = prompt_file.read(Path(options.prompts), model)
    fitting = [batch for batch in batches if batch <= len(prompts)]
    if len(fitting) < len(batches):
        raise SystemExit(
            f"{options.prompts} has {len(prompts)} prompts, --batch {max(batches)} needs as many: write more of them"
        )
    folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="nsa-own-")))
    run = OwnModel(
        model,
        prompts,
        batches,
        options.tokens or TOKENS,
        folder,
        options.port or PORT,
        shlex.split(options.server or ""),
        sampling_of(options),
    )
    return [
        Cell(f"{model.name}, N = {steps}, {side}", partial(run.cell, steps, side))
        for steps in (options.steps if options.steps is not None else STEPS)
        for side in sides_of(options.sides)
    ]


@dataclass
class OwnModel:
    """The servers' command and what has been measured."""

    model: Path
    prompts: list[list[int]]
    batches: list[int]
    tokens: int  # new ones of a request, at most
    folder: Path  # for logs
    port: int
    words: list[str]  # of the user, at the end of the command: SGLang takes the last of an option
    sampling: dict[str, float] = field(default_factory=dict)  # sampling parameters, where requests are not greedy

    def __post_init__(self):
        self._found: dict[int, dict[str, Measured]] = {}  # by N and side
        self._rows: dict[int, list[dict]] = {}  # by N, the very rows of the report

    def options(self) -> list[str]:
        """What follows the README's command: the GPU to itself, graphs for the batches, no cache, and the user's words."""
        most = max(self.batches)
        return [
            *server_options.decode_graphs({*self.batches}), "--mem-fraction-static", "0.85", "--disable-radix-cache",
            "--max-running-requests", str(most), *self.words,
        ]  # fmt: skip

    def cell(self, steps: int, side: str) -> list[dict]:
        """Measure one side. The first one's rows are the result, and the second adds itself to them: where no time is left for
        it, or it does not start, the report has what the first one did."""
        log = self.folder / f"n{steps}-{side}.log"
        memory: list[float] = []
        with weighed(Server(side, self.model, self.port, steps, log, *self.options()), memory) as server:
            server.wait(LOADING)
            found = self._found.get(steps, {}) | {side: self.measured(server, memory)}
        self._found[steps] = found
        rows = [row_of(self.model.name, steps, batch, self.length(batch), found) | self.sampling for batch in self.batches]
        if steps not in self._rows:
            self._rows[steps] = rows
            return rows
        for known, row in zip(self._rows[steps], rows, strict=True):
            known.update(row)
        return []

    def measured(self, server: Server, memory: list[float]) -> Measured:
        found = Measured({}, {}, memory)
        for batch in self.batches:
            groups = self.groups(batch)
            self.ask(server, groups[0])  # warms up
            found.groups[batch], found.histograms[batch] = [], []
            for prompts in groups:
                group, histograms = self.ask(server, prompts)
                found.groups[batch].append(group)
                found.histograms[batch] += histograms
        return found

    def groups(self, batch: int) -> list[list[list[int]]]:
        """Whole groups of `batch` prompts, at most GROUPS of them."""
        return [self.prompts[batch * n : batch * (n + 1)] for n in range(min(GROUPS, len(self.prompts) // batch))]

    def length(self, batch: int) -> int:
        """Mean prompt tokens of what a batch size is measured with."""
        lengths = [len(prompt) for group in self.groups(batch) for prompt in group]
        return round(sum(lengths) / len(lengths))

    def ask(self, server: Server, prompts: list[list[int]]) -> tuple[Group, list[list[int]]]:
        answer = server.streamed(prompts, self.tokens, ignore_eos=False, **self.sampling)
        infos = [one["meta_info"] for one in answer.answers]
        new = [info["completion_tokens"] for info in infos]
        histograms = [h for h in (info.get("spec_correct_drafts_histogram") for info in infos) if h]
        rounds, accept = counted(answer.answers, max(new))
        first = max(answer.first_seconds)
        return Group(answer.seconds, first, max(new), len(prompts), rounds, accept, sum(new)), histograms


def row_of(name: str, steps: int, batch: int, length: int, sides: dict[str, Measured]) -> dict:
    """A row as `bench serve` has them, with accept lengths over requests where there is speculation, ratios with both sides."""
    found = {side: measured.groups[batch] for side, measured in sides.items()}
    row = {"checkpoint": name, "steps": steps, "batch": batch, "length": length, "samples": min(map(len, found.values()))}
    row["tokens"] = {side: spread([group.new_tokens / batch for group in groups], 1) for side, groups in found.items()}
    for side, groups in found.items():
        histograms = sides[side].histograms[batch]
        row[side] = summary(groups) | (statistics(histograms) if histograms else {}) | {"memory_gib": sides[side].memory}
    if not set(BACKENDS) <= set(sides):
        return row | compared(found)
    if all(measured.histograms[batch] for measured in sides.values()):
        row["gain"] = paired(*(sides[side].histograms[batch] for side in ("ours", "builtin")))
    return row | compared(found)
