"""The kernels of one layer and of one forward of real servers, ours beside SGLang's built-in: name, launches, time.

Each side is profiled twice by SGLang's own profiler: a generation of one token, which is prefill, and one of many, whose
captured graphs are decode, or draft, verify and draft-extend, in the order in which a round launches them. Prefill is what runs
besides these graphs: SGLang 0.5.17 and later capture it in pieces. A layer is one period of the kernel that runs once a layer
and takes longest, in the middle of the forward; draft steps, each a forward of one layer, are the layers of a draft round.
`between` is what a round runs outside its graphs.

Kernels overlap, so `path` has what each adds to the span of a forward, and how long nothing ran before it began; period_us is
the time from one replay to the next. A rank of a released model is told by part instead: `rank_serve`.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from nsa_backend.benchmarks.checkpoints.ranks import named
from nsa_backend.benchmarks.commands import rank_serve
from nsa_backend.benchmarks.reports import rank_show, traces
from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.benchmarks.servers import server_options
from nsa_backend.benchmarks.servers.generation import counted, prompts
from nsa_backend.benchmarks.servers.server import BACKENDS, Server
from nsa_backend.benchmarks.servers.sides import Servers, checkpoint_of

TOKENS, PORT = 64, 27000
STEPS, BATCH, LENGTH = (0, 3), 1, 300


def cells(options: argparse.Namespace, resources: ExitStack) -> list[Cell]:
    """One cell a checkpoint, N, batch and length, which gives a row a mode; of a rank, a row a side."""
    if of_ranks := [name for name in options.checkpoint or () if named(name) is not None]:
        rank_serve.check_alone(options, of_ranks)
        return rank_serve.cells(of_ranks, options, resources, rank_serve.by_part, turns=1)
    rank_serve.check_no_rank(options)
    if options.sides:
        raise SystemExit("--sides is for ranks of released models here: other checkpoints are profiled on both sides")
    folder = Path(resources.enter_context(TemporaryDirectory(prefix="nsa-bench-")))
    shapes = [(batch, length) for length in options.length or [LENGTH] for batch in options.batch or [BATCH]]
    servers = Servers(folder, options.port or PORT, shapes, TOKENS)
    resources.callback(servers.close)
    found = []
    for name in options.checkpoint or ["faithful" if options.quick else "wide"]:
        for n in options.steps or STEPS:
            for batch, length in shapes:
                title = f"{name}, N = {n}, {batch} x {length}"
                found.append(Cell(title, partial(measure, servers, folder, name, n, batch, length)))
    return found


def measure(servers: Servers, folder: Path, checkpoint: str, steps: int, batch: int, length: int) -> list[dict]:
    """A row a mode, with both sides."""
    both = servers.of(checkpoint, steps)
    path = checkpoint_of(checkpoint, folder)
    layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    what = {"checkpoint": path.name, "steps": steps, "batch": batch, "length": length}
    sides = {}
    for backend, server in both.items():
        here = folder / f"profile-{backend}-{path.name}-{steps}-{batch}-{length}"
        sides[backend] = modes(*profiled(server, here, batch, length), steps, layers, (batch, length))
    names = dict.fromkeys(mode for side in sides.values() for mode in side)
    return [what | {"mode": mode} | {backend: side[mode] for backend, side in sides.items() if mode in side} for mode in names]


def profiled(server: Server, folder: Path, batch: int, length: int) -> tuple[list[traces.Op], list[traces.Op], int]:
    """(ops of a generation of many tokens, of one token, rounds of the first), warmed up."""
    asked = prompts(batch, length)
    server.generate(asked, TOKENS)
    server.profiled(folder / "one", asked, 1)
    answers = server.profiled(folder / "many", asked, TOKENS)
    many, one = (traces.ops(traces.read_events(folder / name)) for name in ("many", "one"))
    return many, one, counted(answers, TOKENS)[0]


def modes(
    many: list[traces.Op], one: list[traces.Op], rounds: int, steps: int, layers: int, shape: tuple[int, int]
) -> dict[str, dict]:
    """What is reported of each mode of one side. `layers` are the target's, `shape` is (requests, prompt tokens)."""
    forwards = traces.captured_forwards(many, one, rounds)
    wanted = captured_modes(steps, layers)
    if len(forwards) != len(wanted):  # a draft-extend without a graph, say: nothing tells which is which
        wanted = {f"graph {number}": 1 for number in range(1, len(forwards) + 1)}
    found = {
        mode: reported(r, traces.one_layer(r, n, n // 2 - 1)) for (mode, n), r in zip(wanted.items(), forwards, strict=True)
    }
    prefill, rest = traces.outside(one, forwards), traces.outside(many, forwards)
    chunks, in_chunk = len(server_options.chunks(*shape)), layers + (steps > 0)  # the MTP layer prefills each chunk too
    layer = traces.one_layer([prefill], chunks * in_chunk, (chunks - 1) * in_chunk + layers // 2 - 1)
    found["prefill"] = reported([prefill], layer)
    found["between"] = {"kernels": rows(traces.between(rest, prefill, rounds))}
    return found


def captured_modes(steps: int, layers: int) -> dict[str, int]:
    """The captured forwards of N = `steps`, in a round's order, and how many layers each has."""
    if not steps:
        return {"decode": layers}
    draft = {"draft": steps - 1} if steps > 1 else {}
    return draft | {"target_verify": layers, "draft_extend": 1}


def reported(forwards: list[traces.Replay], layer: list[traces.Replay]) -> dict:
    period = traces.period_us(forwards)
    found = {"replays": len(forwards), "span_us": round(traces.span_us(forwards), 2)}
    found["period_us"] = None if period is None else round(period, 2)
    found["forward"] = rows(traces.kernels(forwards))
    found["layer"] = rows(traces.kernels(layer)) if layer else None
    found["path"], found["layer_path"] = rows(traces.path(forwards)), rows(traces.path(layer)) if layer else None
    return found


def rows(found: dict[str, tuple[float, float]]) -> dict[str, list[float]]:
    """By kernel: [launches, microseconds], or of a path [own, gap] microseconds."""
    return {name: [round(value, 2) for value in pair] for name, pair in found.items()}


def show(report: dict) -> None:
    """A table a mode and section: what both launch first, then what only one side does, each by its time."""
    rows = report.get("rows", [])
    if rows and "side" in rows[0]:
        rank_show.show_parts(rows)
        return
    for r in rows:
        for section in ("layer", "forward", "kernels"):
            sides = {backend: (r.get(backend) or {}).get(section) for backend in BACKENDS}
            if not any(sides.values()):
                continue
            what = {"layer": "one layer", "forward": "one forward", "kernels": "a round outside its graphs"}[section]
            print(f"\n{r['checkpoint']}, N = {r['steps']}, {r['batch']} x {r['length']}, {r['mode']}: {what}")
            print_table(("kernel", "ours", "us", "built-in", "us"), table(*(sides[b] or {} for b in BACKENDS)))
        for section, what in {"layer_path": "one layer", "path": "one forward"}.items():
            sides = [(r.get(backend) or {}).get(section) for backend in BACKENDS]
            if all(sides):
                print(f"\n{r['mode']}: where the time of {what} goes, us; {spans(r)}")
                print_table(("kernel", "ours: own", "gap", "built-in: own", "gap", "ours - built-in"), path_table(*sides))


def spans(row: dict) -> str:
    """Span and period of both sides."""
    sides = ((backend, row[backend]) for backend in BACKENDS)
    return "; ".join(f"{name}: span {side['span_us']}, from one replay to the next {side['period_us']}" for name, side in sides)


def path_table(ours: dict[str, list[float]], builtin: dict[str, list[float]]) -> list[tuple]:
    """Rows (kernel, own and gap of ours, of the built-in, difference of both together), the most different first, sums last."""
    nothing = [0.0, 0.0]
    found = [(name, *ours.get(name, nothing), *builtin.get(name, nothing)) for name in {**ours, **builtin}]
    found.append(("sum", *(sum(row[i] for row in found) for i in range(1, 5))))
    told = [(*row, row[1] + row[2] - row[3] - row[4]) for row in found]
    return [*sorted(told[:-1], key=lambda row: -abs(row[-1])), told[-1]]


def table(ours: dict[str, list[float]], builtin: dict[str, list[float]]) -> list[tuple]:
    """Rows (kernel, launches, microseconds of ours, of the built-in), the sums last."""

    def weight(name: str) -> tuple:
        return (name in ours) + (name in builtin), ours.get(name, builtin.get(name))[1]

    names = sorted({**ours, **builtin}, key=weight, reverse=True)
    found = [(name, *ours.get(name, (None, None)), *builtin.get(name, (None, None))) for name in names]
    return [*found, ("sum", *(float(sum(pair[i] for pair in side.values())) for side in (ours, builtin) for i in (0, 1)))]
