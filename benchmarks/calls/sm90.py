"""The section `sm90` of bench attention: SGLang's kernels for SM90 beside those that are served, shape by shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import product

import torch

from nsa_backend.benchmarks.calls.attention_case import COLD_ROWS
from nsa_backend.benchmarks.calls.sm90_case import Shape, Sm90Case
from nsa_backend.benchmarks.calls.sm90_kernels import Variant, variants
from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved
from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.report import print_table

HEADS = (128, 16, 64, 8, 32)  # what a run that is cut should have first
DECODE_ROWS = (1, 8, 32, 128, 512)
PREFILL_ROWS = (300, 4096)
LONGEST_ERROR = 300  # characters of an exception that a report keeps


def shapes(heads: Iterable[int] | None, quick: bool) -> list[Shape]:
    """Prefill first, one KV dtype after the other: a pool of a million tokens is made once for each."""
    found = []
    for kv, count in product(("bf16", "fp8"), heads or (HEADS[:2] if quick else HEADS)):
        found += [Shape("prefill", kv, count, n, kind) for n in PREFILL_ROWS for kind in ("growing", "full")]
        kinds = ("full", "short") if kv == "bf16" else ("full",)  # flashmla_kv schedules every row as a full one
        found += [Shape("decode", kv, count, n, kind) for kind in kinds for n in DECODE_ROWS]
    return found


def cells(heads: Iterable[int] | None, quick: bool, samples: int) -> list[Cell]:
    """One cell a shape."""
    return [
        Cell(
            f"sm90 {s.phase}, {s.kv}, {s.heads} heads, {s.rows} {s.lengths} rows",
            functools.partial(measure, s, samples),
            "sm90",
        )
        for s in shapes(heads, quick)
    ]


def measure(shape: Shape, samples: int) -> list[dict]:
    """One row: median microseconds, least and most, and error of each variant, or what it raised under `cannot_run`."""
    case, repeats = Sm90Case(shape), max(4, -(-COLD_ROWS // shape.rows))
    replays, errors, cannot_run = {}, {}, {}
    for name, variant in variants(shape).items():
        # A release without a kernel and a shape that it refuses are what this comparison has to show.
        try:
            replays[name], error = _prepared(case, variant, repeats)
        except Exception as problem:
            cannot_run[name] = f"{type(problem).__name__}: {problem}"[:LONGEST_ERROR]
            continue
        if error is not None:
            errors[name] = float(f"{error:.2e}")
    times = interleaved(replays, repeats, samples)
    row = {"phase": shape.phase, "kv": shape.kv, "heads": shape.heads, "rows": shape.rows, "lengths": shape.lengths}
    row["us"] = {name: round(us, 2) for name, (us, _) in times.items()}
    row["min_max"] = {name: [round(x, 2) for x in spread] for name, (_, spread) in times.items()}
    return [row | {"relative_error": errors, "cannot_run": cannot_run}]


def _prepared(case: Sm90Case, variant: Variant, repeats: int) -> tuple[Callable[[], object], float | None]:
    """(what runs `repeats` calls, relative error or None); called once, so that a kernel's own errors come here."""
    call = variant.make(case)
    out = call(0)
    error = case.error(out) if variant.attends else None
    torch.cuda.synchronize()

    def run() -> None:
        for i in range(repeats):
            call(i)

    return captured_graph(run).replay if variant.captured else run, error


def show(rows: list[dict]) -> None:
    """A line a variant, and one for each that cannot run."""
    columns = ("phase", "kv", "heads", "rows", "lengths", "kernel", "us", "error %")
    table = []
    for row in rows:
        shape = [row[name] for name in columns[:5]]
        for name, us in row["us"].items():
            error = row["relative_error"].get(name)
            table.append((*shape, name, us, None if error is None else f"{100 * error:.2f}"))
        table += [(*shape, name, f"cannot run: {why}", None) for name, why in row["cannot_run"].items()]
    print_table(columns, table)
