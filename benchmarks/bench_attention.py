"""Every attention implementation this GPU runs, by rows and heads: bare kernel, ours around it, SGLang's built-in around it.

    python benchmarks/bench_attention.py OUT.json [--quick]

`decode` has the time of our forward_decode, its floor and its error against float32; `wrapper` puts the bare kernel call, our
forward_decode and the built-in backend's side by side; `by_rows` has every row count from 1 to 512, twice, for auto_table.py.
Every call picks 2048 of a million tokens of its own, so that no KV is found in the L2 cache. Calls repeat inside a captured
graph, variants interleaved; the KV write is left out everywhere, since both backends leave it to SGLang's pool.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from attention_case import KV_DTYPES, MAX_ROWS, Case
from bench_common import captured_graph, environment, print_table, start_host

HEADS = (8, 16, 32, 64, 128)
WRAPPER_HEADS, WRAPPER_ROWS = (16, 64, 128), (1, 8, 32, 128)
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
COLD_ROWS = 56  # rows x 2048 tokens x 1152 bytes that replace what the 60 MB L2 held
MEMORY_BYTES_PER_S, BF16_FLOPS = 4.3e12, 790e12  # measured on an H200: device copies and an 8192^3 matrix product
TOPK, QK_DIM, V_DIM = 2048, 576, 512


def floor_us(heads: int, rows: int, bytes_per_token: int) -> float:
    """The larger of the time to read the KV once and the time of the multiplications."""
    read = rows * TOPK * bytes_per_token / MEMORY_BYTES_PER_S
    return 1e6 * max(read, 2 * rows * heads * TOPK * (QK_DIM + V_DIM) / BF16_FLOPS)


def timed(calls: dict[str, Callable[[int], object]], rows: int, samples: int) -> dict[str, tuple[float, list[float]]]:
    """Median microseconds of one call, and the least and the most, of each variant; one replay of each in turn."""
    repeats = max(4, -(-COLD_ROWS // rows))
    graphs = {name: captured_graph(lambda call=call: [call(i) for i in range(repeats)]) for name, call in calls.items()}
    found = {name: [] for name in calls}
    for sample in range(samples + 1):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if sample:  # the first warms up
                found[name].append(1e3 * start.elapsed_time(end) / repeats)
    return {name: (statistics.median(us), [min(us), max(us)]) for name, us in found.items()}


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


def every_row_count(case: Case, samples: int) -> dict:
    """Medians of every row count, in two passes a while apart: at hundreds of rows the clock wanders by several percent."""
    counts = range(1, MAX_ROWS + 1)
    passes = []
    for _ in range(2):
        times = [timed({name: case.ours(name, rows) for name in case.names}, rows, samples) for rows in counts]
        passes.append({name: [round(t[name][0], 2) for t in times] for name in case.names})
    return {"kv": case.kv, "heads": case.heads, "rows": [counts[0], counts[-1]], "passes": passes}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true", help="three samples, and not every row count")
    args = parser.parse_args()
    start_host()
    samples = 3 if args.quick else 9
    report = {"environment": environment(), "decode": [], "wrapper": [], "by_rows": []}
    for kv in KV_DTYPES:
        for heads in HEADS:
            case = Case(kv, heads)
            report["decode"] += [decode_row(case, rows, samples, with_error=rows <= 32) for rows in DECODE_ROWS]
            if heads in WRAPPER_HEADS:
                report["wrapper"] += [wrapper_row(case, n, rows, 3 * samples) for n in case.names for rows in WRAPPER_ROWS]
            if len(case.names) > 1 and not args.quick:
                report["by_rows"].append(every_row_count(case, 5))
            print(f"{kv}, {heads} heads: done", flush=True)
            args.out.write_text(dumped(report))
    show(report["decode"], report["wrapper"])


def dumped(report: dict) -> str:
    """JSON with one row a line."""
    parts = []
    for name, value in report.items():
        body = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if isinstance(value, list) else json.dumps(value)
        parts.append(f"{json.dumps(name)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def show(decode: list[dict], wrapper: list[dict]) -> None:
    names = sorted({name for row in decode for name in row["us"]})
    table = [
        (
            r["kv"],
            r["heads"],
            r["rows"],
            *(r["us"].get(n) for n in names),
            r["floor_us"],
            *(r.get("relative_error", {}).values()),
        )
        for r in decode
        if r["rows"] in (1, 8, 32, 128, 512)
    ]
    print_table(("kv", "heads", "rows", *names, "floor"), table)
    columns = ("kv", "implementation", "heads", "rows", "bare us", "ours", "built-in", "ours - bare")
    table = [
        (r["kv"], r["implementation"], r["heads"], r["rows"], *r["us"].values(), r["us"]["ours"] - r["us"]["bare"])
        for r in wrapper
    ]
    print_table(columns, table)


if __name__ == "__main__":
    main()
