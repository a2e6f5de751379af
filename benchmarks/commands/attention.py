"""Every attention implementation this GPU runs, by rows and heads: bare kernel, ours around it, SGLang's built-in around it.

`decode` has the time of our forward_decode, its floor and its error against float32; `wrapper` puts the bare kernel call, our
forward_decode and the built-in backend's side by side; `by_rows` has a hundred row counts, twice, for auto_table.py;
`layer_front` has both launches in front of a layer beside the kernels that they replace, `whole_front` a layer up to its index
scores.
Every call picks 2048 of a million tokens of its own, so that no KV is found in the L2 cache. Calls repeat inside a captured
graph, variants interleaved; the KV write is left out everywhere, since both backends leave it to SGLang's pool.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from contextlib import ExitStack

from nsa_backend.adapters.options import OWN_DECODE_VALUES
from nsa_backend.benchmarks.calls import layer_front, whole_front
from nsa_backend.benchmarks.calls.attention_case import COLD_ROWS, KV_DTYPES, MAX_ROWS, Case
from nsa_backend.benchmarks.calls.h200 import BF16_FLOPS, MEMORY_BYTES_PER_S
from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved
from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.testing.process import start_sglang
from nsa_backend.testing.shape import LATENT, QK_DIM, TOPK

HEADS = (8, 16, 32, 64, 128)
WRAPPER_HEADS, WRAPPER_ROWS = (16, 64, 128), (1, 8, 32, 128)
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ROW_COUNTS = (*range(1, 73), *range(80, 161, 8), *range(176, MAX_ROWS + 1, 16))


def cells(options: argparse.Namespace, resources: ExitStack) -> list[Cell]:
    """Every KV dtype and head count; --heads, --batch (query rows) and --section choose among them."""
    start_sglang()
    samples = 3 if options.quick else 9
    chosen_rows = options.batch or DECODE_ROWS
    if max(chosen_rows) > MAX_ROWS:
        raise SystemExit(
            f"bench attention draws the top-k of at most {MAX_ROWS} query rows: --batch {max(chosen_rows)} is more"
        )
    found = []
    for kv in KV_DTYPES:
        for heads in options.heads or HEADS:
            make = functools.cache(functools.partial(Case, kv, heads))
            name = f"{kv}, {heads} heads"
            found.append(Cell(name, functools.partial(decode_rows, make, chosen_rows, samples), "decode"))
            if options.batch:
                continue
            if heads in WRAPPER_HEADS:
                found.append(Cell(f"{name}, wrapper", functools.partial(wrapper_rows, make, 3 * samples), "wrapper"))
            if not options.quick:
                found.append(Cell(f"{name}, 1 to {MAX_ROWS} rows", functools.partial(many_row_counts, make, 5), "by_rows"))
    found += layer_front.cells(options.batch, samples) + whole_front.cells(options.batch, samples)
    return of_sections(found, options.section)


def of_sections(found: list[Cell], wanted: list[str] | None) -> list[Cell]:
    """The cells of the sections `wanted`, all where None; raises SystemExit where a section has none."""
    known = list(dict.fromkeys(cell.section for cell in found))
    for section in wanted or ():
        if section not in known:
            raise SystemExit(f"bench attention has no section {section} here: choose among {', '.join(known)}")
    return [cell for cell in found if not wanted or cell.section in wanted]


def floor_us(heads: int, rows: int, bytes_per_token: int) -> float:
    """The larger of the time to read the KV once and the time of the multiplications."""
    read = rows * TOPK * bytes_per_token / MEMORY_BYTES_PER_S
    return 1e6 * max(read, 2 * rows * heads * TOPK * (QK_DIM + LATENT) / BF16_FLOPS)


def timed(calls: dict[str, Callable[[int], object]], rows: int, samples: int) -> dict[str, tuple[float, list[float]]]:
    """Median microseconds of one call, and the least and the most, of each variant; one replay of each in turn."""
    repeats = max(4, -(-COLD_ROWS // rows))
    graphs = {name: captured_graph(lambda call=call: [call(i) for i in range(repeats)]) for name, call in calls.items()}
    return interleaved({name: graph.replay for name, graph in graphs.items()}, repeats, samples)


def decode_row(case: Case, rows: int, samples: int, with_error: bool) -> dict:
    times = timed({name: case.ours(name, rows) for name in case.names}, rows, samples)
    row = {
        "kv": case.kv,
        "heads": case.heads,
        "rows": rows,
        "us": {name: round(us, 2) for name, (us, _) in times.items()},
        "min_max": {name: [round(x, 2) for x in spread] for name, (_, spread) in times.items()},
        "floor_us": round(floor_us(case.heads, rows, case.bytes_per_token), 2),
    }
    if with_error:
        row["relative_error"] = {name: float(f"{case.error(name, rows):.2e}") for name in case.names}
    return row


def decode_rows(make: Callable[[], Case], rows: list[int], samples: int) -> list[dict]:
    return [decode_row(make(), n, samples, with_error=n <= 32) for n in rows]


def wrapper_rows(make: Callable[[], Case], samples: int) -> list[dict]:
    names = [name for name in make().names if name not in OWN_DECODE_VALUES]  # the others SGLang's own backend has too
    return [wrapper_row(make(), name, rows, samples) for name in names for rows in WRAPPER_ROWS]


def many_row_counts(make: Callable[[], Case], samples: int) -> list[dict]:
    """Medians of many row counts, in two passes a while apart: at hundreds of rows the clock wanders by several percent."""
    case, passes = make(), []
    for _ in range(2):
        times = [timed({name: case.ours(name, rows) for name in case.names}, rows, samples) for rows in ROW_COUNTS]
        passes.append({name: [round(t[name][0], 2) for t in times] for name in case.names})
    return [{"kv": case.kv, "heads": case.heads, "rows": list(ROW_COUNTS), "passes": passes}]


def wrapper_row(case: Case, name: str, rows: int, samples: int) -> dict:
    calls = {"bare": case.bare(name, rows), "ours": case.ours(name, rows), "builtin": case.builtin(name, rows)}
    times = timed(calls, rows, samples)
    return {
        "kv": case.kv,
        "implementation": name,
        "heads": case.heads,
        "rows": rows,
        "us": {variant: round(us, 2) for variant, (us, _) in times.items()},
        "min_max": {variant: [round(x, 2) for x in spread] for variant, (_, spread) in times.items()},
    }


def show(report: dict) -> None:
    """Medians and errors of every implementation, then what wrapping a bare kernel call costs."""
    decode, wrapper = report.get("decode", []), report.get("wrapper", [])
    names = sorted({name for row in decode for name in row["us"]})
    table = []
    for r in decode:
        errors = r.get("relative_error", {})
        shown = (f"{100 * errors[n]:.2f}" if n in errors else None for n in names)
        table.append((r["kv"], r["heads"], r["rows"], r["floor_us"], *(r["us"].get(n) for n in names), *shown))
    times, errors = [f"{n} us" for n in names], [f"{n} error %" for n in names]
    print_table(("kv", "heads", "rows", "floor us", *times, *errors), table)
    columns = ("kv", "implementation", "heads", "rows", "bare us", "ours", "built-in", "ours - bare")
    table = [
        (r["kv"], r["implementation"], r["heads"], r["rows"], *r["us"].values(), r["us"]["ours"] - r["us"]["bare"])
        for r in wrapper
    ]
    print_table(columns, table)
    layer_front.show(report.get("layer_front", []))
    whole_front.show(report.get("whole_front", []))
