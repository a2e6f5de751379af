"""`serve` and `profile` of a rank of a released model: one server a GPU, since two do not fit, and every side in both orders.

On one GPU the sides follow one another, then once more in the opposite order; on two each has one, then the other. So no side
always has the cooler GPU or the emptier machine, and two processes of a side tell how much a process matters. Rows are of one
side and turn. Drafts of random weights are not accepted: rounds are compared, and a round over the accept length of a trained
model is its time a token."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.reports import parts, traces
from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.rank_rows import by_cell, together
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.benchmarks.servers import server_options
from nsa_backend.benchmarks.servers.generation import in_turns, prompts, summary
from nsa_backend.benchmarks.servers.server import APART_SECONDS, WITH_DRAFTS, Server
from nsa_backend.benchmarks.servers.sides import PORTS_APART, checkpoint_of, options_for, sides_of

TOKENS, PROFILED_TOKENS, SAMPLES, PORT = 128, 32, 3, 25000
STEPS, LENGTHS, LONG = (0, 3, 1, 5), (300, 4096, 32768, 131072), 65536
CONTEXT = 163840
"""Tokens of a request that every server has tables for; GLM-5.2 would have them for a million otherwise."""
ALONE = ("--mem-fraction-static", "0.92", "--context-length", str(CONTEXT))
"""Options of a server that has a GPU to itself."""
TURNS = 2
STARTING = 900.0
"""Seconds that a first start may take: 190 on an H200, of which most compile kernels for one prefill."""

Stage = tuple[tuple[str, str], ...]
"""(side, GPU) of the servers that run at the same time."""


def stages(sides: Sequence[str], gpus: Sequence[str], turns: int = TURNS) -> list[tuple[int, Stage]]:
    """(turn, what runs at the same time), in order: as many sides at once as there are GPUs, every other turn in reverse."""
    found = []
    for turn in range(turns):
        order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
        groups = [order[at : at + len(gpus)] for at in range(0, len(order), len(gpus))]
        found += [(turn, tuple(zip(group, gpus, strict=False))) for group in groups]
    return found


def tokens_of(shapes: Sequence[tuple[int, int]]) -> int:
    """Room that a server needs for the largest of `shapes`, as `server_options.pool` gives it."""
    words = server_options.pool(shapes, TOKENS)
    return int(words[words.index("--max-total-tokens") + 1])


@dataclass
class RankServers:
    """The servers of one rank, N and stage, kept running until others are asked for."""

    folder: Path
    port: int
    shapes: dict[str, list[tuple[int, int]]]  # by rank, all that fit
    _open: ExitStack = field(default_factory=ExitStack)
    _key: tuple | None = None
    _found: dict[str, Server] = field(default_factory=dict)
    ready: dict[str, float] = field(default_factory=dict)
    """Seconds from the start of each side's server until it answered; with two at once each waits for the other too."""

    def of(self, name: str, steps: int, turn: int, stage: Stage) -> dict[str, Server]:
        """Servers by side, ready."""
        if self._key != (name, steps, turn, stage):
            self.close()
            path = checkpoint_of(name, self.folder)
            options = [*options_for(self.shapes[name], TOKENS), *ALONE]
            began = {}
            for number, (side, gpu) in enumerate(stage):
                time.sleep(APART_SECONDS * (number > 0))
                log = self.folder / f"{name}-n{steps}-{turn}-{side}.log"
                environment, began[side] = {"CUDA_VISIBLE_DEVICES": gpu}, time.perf_counter()
                server = Server(side, path, self.port + PORTS_APART * number, steps, log, *options, environment=environment)
                self._found[side] = self._open.enter_context(server)
            for side, server in self._found.items():
                server.wait(STARTING)
                self.ready[side] = round(time.perf_counter() - began[side], 1)
            self._key = name, steps, turn, stage
        return self._found

    def close(self) -> None:
        """End what runs."""
        self._open.close()
        self._found, self._key = {}, None


Measure = Callable[[RankServers, str, int, int, Stage, int, int], list[dict]]
"""Rows of (servers, rank, N, turn, stage, requests, prompt tokens)."""


def cells(
    names: Sequence[str], options: argparse.Namespace, resources: ExitStack, measure: Measure, turns: int = TURNS
) -> list[Cell]:
    """One cell a rank, N, stage, batch and length; what does not fit is told in the section `left_out`.

    Raises:
        SystemExit: not even the smallest of the shapes fits the GPU.
    """
    import torch

    there = torch.cuda.get_device_properties(0).total_memory
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    wanted = {name: shapes(name, options) for name in names}
    fitting = {
        name: [s for s in of_rank if ranks.needed_bytes(name, tokens_of([s])) <= there] for name, of_rank in wanted.items()
    }
    for name, of_rank in wanted.items():
        if not fitting[name]:
            ranks.check_fits(name, tokens_of(of_rank[:1]), there)
    folder = Path(resources.enter_context(TemporaryDirectory(prefix="nsa-bench-")))
    servers = RankServers(folder, options.port or PORT, fitting)
    resources.callback(servers.close)
    sides = sides_of(options.sides)
    found = []
    for name in names:
        for steps in STEPS[:2] if options.steps is None else options.steps:
            of_steps = [side for side in sides if steps or side not in WITH_DRAFTS]
            for turn, stage in stages(of_steps, gpus, 1 if options.quick else turns):
                told = " and ".join(f"{side} on {gpu}" for side, gpu in stage)
                for batch, length in fitting[name]:
                    title = f"{name}, N = {steps}, {batch} x {length}, {told}"
                    found.append(Cell(title, partial(measure, servers, name, steps, turn, stage, batch, length)))
                for batch, length in fitting[name]:
                    if batch in (getattr(options, "parts", None) or ()):
                        title = f"{name}, N = {steps}, {batch} x {length} by part, {told}"
                        found.append(Cell(title, partial(by_part, servers, name, steps, turn, stage, batch, length)))
        for batch, length in wanted[name]:
            if (batch, length) not in fitting[name]:
                row = {"checkpoint": name, "batch": batch, "length": length, "gpu_gib": round(there / ranks.GIB, 1)}
                row["needs_gib"] = round(ranks.needed_bytes(name, tokens_of([(batch, length)])) / ranks.GIB, 1)
                found.append(Cell(f"{name}, {batch} x {length} does not fit", partial(list, [row]), "left_out"))
    return found


def check_alone(options: argparse.Namespace, names: Sequence[str]) -> None:
    """End where ranks are asked for with what is no rank, on more GPUs, or of a release that cannot run them.

    Raises:
        SystemExit: with what to change.
    """
    others = [name for name in options.checkpoint if name not in names]
    if others:
        raise SystemExit(f"--checkpoint {names[0]} fills a GPU and {others[0]} shares one: measure them in two runs")
    if getattr(options, "parallel", None):
        raise SystemExit(f"--checkpoint {names[0]} is one rank already: leave --parallel out")
    for name in names:
        ranks.check_release(name)


def check_room(name: str, wanted: Sequence[tuple[int, int]]) -> None:
    """End before any weight is made where the release or the GPU cannot hold the largest of these shapes.

    Raises:
        SystemExit: with what the rank needs and what there is.
    """
    import torch

    ranks.check_release(name)
    ranks.check_fits(name, tokens_of(wanted), torch.cuda.get_device_properties(0).total_memory)


def shapes(name: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    """(requests, prompt tokens) that are asked for, the fewest tokens first; a single request of the longest prompt."""
    lengths = options.length or (LENGTHS[:1] if options.quick else LENGTHS)
    batches = options.batch or ranks.RANKS[name].batches
    found = {(1 if length > LONG and not options.batch else batch, length) for length in lengths for batch in batches}
    most = getattr(options, "prompt_tokens", None)
    return sorted((s for s in found if not most or s[0] * s[1] <= most), key=lambda s: (s[0] * s[1], s))


def times(
    servers: RankServers, name: str, steps: int, turn: int, stage: Stage, batch: int, length: int, *, samples: int = SAMPLES
) -> list[dict]:
    """A row a side: milliseconds of a round and a token, time to first token, tokens a second."""
    running = servers.of(name, steps, turn, stage)
    found = in_turns(running, batch, length, TOKENS, samples)
    shape = {"checkpoint": name, "steps": steps, "batch": batch, "length": length, "tokens": TOKENS, "samples": samples}
    return [
        shape | {"side": side, "turn": turn, "gpu": gpu, "seconds_to_ready": servers.ready[side]} | summary(found[side])
        for side, gpu in stage
    ]


def by_part(servers: RankServers, name: str, steps: int, turn: int, stage: Stage, batch: int, length: int) -> list[dict]:
    """A row a side: a round's kernels by part, launches a layer, idle time of the GPU, time of the host in graph launches."""
    asked, rows = prompts(batch, length), []
    for side, server in servers.of(name, steps, turn, stage).items():
        folder = servers.folder / f"parts-{name}-{steps}-{batch}-{length}-{side}-{turn}"
        server.generate(asked, PROFILED_TOKENS)
        server.profiled(folder, asked, PROFILED_TOKENS)
        layers = ranks.RANKS[name].config["num_hidden_layers"] + steps
        found = parts.of_rounds(traces.read_events(folder), layers)
        rows.append({"checkpoint": name, "steps": steps, "batch": batch, "length": length, "side": side} | found)
    return rows


def show(rows: Sequence[dict]) -> None:
    """A line a cell and side with the ratio of rounds to the built-in's; then how a round becomes tokens."""
    told, rows = [r for r in rows if "parts" in r], [r for r in rows if "round_ms" in r]
    first, table = together(rows, "ttft_ms"), []
    for cell, sides in together(rows).items():
        for side, (median, least, most) in sides.items():
            ratio = f"{median / sides['builtin'][0]:.3f}" if "builtin" in sides and side != "builtin" else None
            spread = f"{median:.2f} ({least:.2f}-{most:.2f})"
            table.append((*cell[:2], f"{cell[2]} x {cell[3]}", side, spread, ratio, f"{first[cell][side][0]:.0f}"))
    print_table(("rank", "N", "prompts", "side", "round ms", "over the built-in's", "first token ms"), table)
    print("random weights accept no drafts: milliseconds a token are a round's over the accept length of a trained model")
    show_parts(told)


def show_parts(rows: Sequence[dict]) -> None:
    """A table a cell: a line a part with launches and microseconds of each side, then what a round is besides."""
    for cell, turns in by_cell(rows).items():
        title = f"{cell.checkpoint}, N = {cell.steps}, {cell.batch} x {cell.length}"
        sides = {side: of_side[-1] for side, of_side in turns.items()}
        print(f"\n{title}: kernels of a round by part")
        table = [(part, *(v for row in sides.values() for v in row["parts"][part])) for part in [*parts.PARTS, parts.REST]]
        table.append(("all kernels", *(v for row in sides.values() for v in (row["launches"], row["kernel_us"]))))
        for key, text in {
            "launches_a_layer": "launches a layer", "period_us": "from one round to the next", "idle_us": "GPU idle",
            "graph_launch_us": "host in graph launches",
        }.items():  # fmt: skip
            table.append((text, *(v for row in sides.values() for v in (None, row[key]))))
        print_table(("part", *(word for side in sides for word in (f"{side}: launches", "us"))), table)
