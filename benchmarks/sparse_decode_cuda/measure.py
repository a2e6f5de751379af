"""Checks every variant of the CUDA kernel on this GPU, then times it beside sparse_decode in Triton, fa3 and flashmla_sparse.

    python benchmarks/sparse_decode_cuda/measure.py OUT.json [--heads 8 16 32 64 128] [--rows 1 2 4 8 16 32 64] [--minutes 5]

Calls are those of `bench attention`: inside a captured graph, each on 2048 of a million tokens of its own, variants in turns;
`triton` and the variants are bare calls, the others our forward_decode. Of the fastest variant of a cell it also times the
first launch alone, both launches on rows without a token, and every way to join. OUT.json is written after every cell. A cell
starts only where the longest so far would still end in time.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_backend.benchmarks.attention_case import Case
from nsa_backend.benchmarks.bench_attention import floor_us, timed
from nsa_backend.benchmarks.report import environment, print_table, write_report
from nsa_backend.benchmarks.sparse_decode_cuda import launch
from nsa_backend.benchmarks.sparse_decode_cuda.check import SHAPES, check
from nsa_backend.benchmarks.sparse_decode_cuda.tiles import JOINS, LATENT, TILES, CudaTile
from nsa_backend.benchmarks.sparse_decode_cuda.variants import VARIANTS, Variant
from nsa_backend.kernels.sparse_decode import Parts, sparse_decode
from nsa_backend.testing.process import start_sglang
from nsa_backend.testing.shape import SCALE, TOPK

OTHERS = {"fa3": "fa3", "flashmla_sparse": "flashmla_sparse", "triton, served": "sparse_decode"}
SAMPLES = 5


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128, 64, 8, 32])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--minutes", type=float, default=5.0)
    args = parser.parse_args()
    start_sglang()
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    head = {"environment": environment(), "command": shlex.join(["python", *sys.argv]), "sms": num_sms}
    errors, wrong = check(num_sms)
    report = head | {"shapes": len(SHAPES), "relative_error": errors, "wrong": wrong, "not_measured": [], "rows": []}
    longest = 0.0
    for heads in args.heads:
        case = None
        for rows in args.rows:
            started = time.monotonic()
            if started - began + longest > 60 * args.minutes:
                report["not_measured"].append(f"{heads} heads, {rows} rows: no time left")
            else:
                case = case or Case("bf16", heads)
                report["rows"].append(cell(case, rows, num_sms, without=wrong))
                show(report["rows"][-1:])
                longest = max(longest, time.monotonic() - started)
            write_report(args.out, report)
    show(report["rows"])
    sys.exit(1 if wrong or report["not_measured"] else 0)


def cell(case: Case, rows: int, num_sms: int, without: dict) -> dict:
    """Microseconds of every right variant and of the others; of the best, what its launches and joins take."""
    q_nope, q_rope = case.query(rows)
    lens = torch.full((rows,), TOPK, dtype=torch.int32, device="cuda")

    def inputs(i: int, lens: torch.Tensor = lens) -> tuple[torch.Tensor, ...]:
        return q_nope, q_rope, case.cache, case.chosen(rows, i), lens

    calls = {title: case.ours(name, rows) for title, name in OTHERS.items()}
    calls["triton"] = lambda i: sparse_decode(*inputs(i), SCALE, num_sms=num_sms)
    mine = {n: v for n, v in VARIANTS.items() if n not in without and v.is_worth_a_measurement(rows, case.heads)}
    calls |= {name: lambda i, v=variant: v.call(inputs(i), SCALE, num_sms) for name, variant in mine.items()}
    times = timed(calls, rows, SAMPLES)
    best = min(mine, key=lambda name: times[name][0], default=None)
    parts, of_best = 0, {}
    if best is not None:
        parts = mine[best].split(rows, case.heads, TOPK, num_sms).parts
        of_best = timed(calls_of_best(mine[best], inputs, rows, case.heads, num_sms), rows, SAMPLES)
    own = next(name for name, tile in TILES.items() if tile == CudaTile.of(rows, case.heads))
    return {
        "heads": case.heads,
        "rows": rows,
        "floor_us": round(floor_us(case.heads, rows, case.bytes_per_token), 2),
        "us": {name: round(us, 2) for name, (us, _) in times.items()},
        "min_max": {name: [round(x, 2) for x in spread] for name, (_, spread) in times.items()},
        "best": best,
        "own": own,
        "parts_of_best": parts,
        "of_best": {name: round(us, 2) for name, (us, _) in of_best.items()},
    }


def calls_of_best(
    variant: Variant, inputs: Callable[..., tuple], rows: int, heads: int, num_sms: int
) -> dict[str, Callable[[int], object]]:
    split = variant.split(rows, heads, TOPK, num_sms)
    parts = Parts.of(rows * split.parts * heads, LATENT, "cuda")
    no_tokens = torch.zeros(rows, dtype=torch.int32, device="cuda")

    def attend_alone(i: int) -> None:
        out = torch.empty(rows, heads, LATENT, dtype=torch.bfloat16, device="cuda")
        call = launch.prepare(*inputs(i), SCALE, out, parts, variant.tile, split, 1)
        launch.launch_attend(call, variant.tile, out.device)

    calls = {
        "attend alone": attend_alone,
        "no tokens": lambda i: variant.call(inputs(i, no_tokens), SCALE, num_sms, parts=parts),
    }
    if split.parts > 1:
        calls |= {f"join {n}": lambda i, n=n: variant.call(inputs(i), SCALE, num_sms, join_warps=n) for n in JOINS}
    return calls


def show(found: list[dict]) -> None:
    """The others, the two best variants, the one that `CudaTile.of` takes, and what the best one's launches take."""
    table = []
    for row in found:
        mine = sorted((us, name) for name, us in row["us"].items() if name in VARIANTS)
        best = [f"{us:.1f} ({name})" for us, name in mine[:2]] + ["-"] * (2 - len(mine[:2]))
        others = ", ".join(f"{name} {us:.1f}" for name, us in row["us"].items() if name not in VARIANTS)
        of_best = ", ".join(f"{name} {us:.1f}" for name, us in row["of_best"].items())
        own = row["us"].get(row["own"], float("nan"))
        table.append((row["heads"], row["rows"], row["floor_us"], others, *best, own, of_best))
    print_table(("heads", "rows", "floor us", "others", "best", "second", "own", "of the best"), table)


if __name__ == "__main__":
    main()
