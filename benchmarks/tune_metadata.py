"""Which launch configuration of the metadata kernel is fastest on this GPU: every variant in one run, interleaved.

    python benchmarks/tune_metadata.py OUT.json

Kernel time by torch's profiler, median over rounds. The constants in kernels/metadata.py name the row that chose them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path

import torch

from nsa_backend.benchmarks.report import environment, print_table
from nsa_backend.benchmarks.timing import captured_graph, kernel_us
from nsa_backend.kernels import metadata
from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.inputs import BatchInputs
from nsa_backend.testing.shape import TOPK

WARPS, COLUMNS, ROWS, PROGRAMS = (4, 8), (1024, 2048, 4096), (128, 256), (512, 1024, 2048, 4096)
SHAPES = [(1, 4096), (8, 16384), (32, 32768), (64, 65536)]


def launcher(plan: plans.MetadataPlan, length: int, num_sms: int = 132):
    bs = plan.num_requests
    buffers = MetadataBuffers.allocate(plan, table_width=length + 64, num_sms=num_sms, device="cuda", wide=True, planned=False)
    req_to_token = torch.randint(0, 2**20, (bs + 1, length + 73), dtype=torch.int32, device="cuda")
    seq_lens = (length - torch.arange(bs, device="cuda") % 50).to(torch.int32)
    slots = torch.randperm(bs, device="cuda") + 1
    extend = torch.full((bs,), 3, dtype=torch.int32, device="cuda") if plan.ragged else None

    def launch() -> None:
        metadata.write_metadata(plan, buffers, BatchInputs(seq_lens, slots, extend), req_to_token=req_to_token, index_topk=TOPK)

    return launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    rows = []
    for mode, (bs, length) in itertools.product(("draft 4", "verify 4", "ragged"), SHAPES):
        plan = {
            "draft 4": plans.plan_draft_decode(bs, 4),
            "verify 4": plans.plan_target_verify(bs, 4),
            "ragged": plans.plan_draft_extend_v1(bs, 4 * bs),
        }[mode]
        launch, graphs = launcher(plan, length), {}
        for variant in itertools.product(WARPS, COLUMNS, ROWS, PROGRAMS):
            metadata.NUM_WARPS, metadata.COLUMN_BLOCK, metadata.ROW_BLOCK, metadata.TARGET_TABLE_PROGRAMS = variant
            graphs[variant] = captured_graph(launch)
        samples = {variant: [] for variant in graphs}
        for _ in range(3):
            for variant, graph in graphs.items():
                samples[variant].append(kernel_us(graph.replay, 8)[0])
        for variant, times in samples.items():
            names = ("num_warps", "column_block", "row_block", "table_programs")
            rows.append(
                {"mode": mode, "bs": bs, "length": length, "us": round(statistics.median(times), 2)}
                | dict(zip(names, variant, strict=True))
            )
    args.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
    report(rows)


def report(rows: list[dict]) -> None:
    """The five variants that lose least to the best of each shape, and how they do there."""
    cases = sorted({(r["mode"], r["bs"], r["length"]) for r in rows})
    best = {c: min(r["us"] for r in rows if (r["mode"], r["bs"], r["length"]) == c) for c in cases}
    keys = ("num_warps", "column_block", "row_block", "table_programs")
    variants = {}
    for r in rows:
        variants.setdefault(tuple(r[k] for k in keys), {})[r["mode"], r["bs"], r["length"]] = r["us"]
    ranked = sorted(variants.items(), key=lambda item: sum(item[1][c] / best[c] for c in cases))
    table = [(*variant, *(times[c] for c in cases)) for variant, times in ranked[:6]]
    print_table((*keys, *(f"{m} {b}x{n}" for m, b, n in cases)), [*table, ("best", "", "", "", *best.values())])


if __name__ == "__main__":
    main()
