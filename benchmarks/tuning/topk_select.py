"""Top-k of rows of index scores: ours by blocks of a row, beside SGLang's kernel where SGLang is installed.

    python benchmarks/tuning/topk_select.py OUT.json [--rows 1 4 16 32 128] [--lengths 4096 8192 32768 131072] [--width 163840]

SGLang chooses a kernel by the rows' width, which is the model's context in a graph, and not by their lengths. A bare GPU
machine runs it without SGLang's. Each call stands behind a small kernel, whose time is taken off: behind themselves they would
overlap. What is selected is compared with torch's before it is timed. OUT.json is written after every cell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import torch

from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved, right_ones
from nsa_backend.benchmarks.reports.report import environment, write_report
from nsa_backend.kernels.cuda_source import CudaKernel
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.topk_select import (
    CLUSTERS,
    SHARE,
    SOURCE,
    THREADS,
    constants,
    shared_bytes,
    topk_select,
)
from nsa_backend.kernels.topk_slots import topk_slots_torch

TOPK = 2048
REPEATS, SAMPLES = 20, 9
OTHERS = ((THREADS, 4, 1), (512, 4, 2), (512, 8, 1))
"""Threads of a block, fours of scores that each keeps, and blocks of an SM, other than those that are served."""
SHARES = (SHARE // 2, SHARE, 2 * SHARE)
OTHER = "the small kernel"
SGLANGS = "SGLang's"


@cache
def kernel(blocks: int, threads: int, vectors: int, of_sm: int) -> CudaKernel:
    macros = constants(blocks, threads, vectors, of_sm=of_sm)
    return CudaKernel(SOURCE, SOURCE.stem, macros, threads, shared_bytes(blocks))


def sglangs(scores: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor) -> Callable[[], torch.Tensor]:
    """SGLang's call with a plan that its metadata would have."""
    from nsa_backend.adapters.installed import adapter
    from nsa_backend.testing.calls import calls

    paged, _ = adapter.topk_v2()
    plan, out = calls.topk_plan(lengths), torch.empty(len(scores), TOPK, dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        paged(scores, lengths, pages, out, PAGE_SIZE, plan)
        return out

    return call


def cell(rows: int, length: int, width: int) -> dict:
    lengths = torch.full((rows,), length, dtype=torch.int32, device="cuda") - torch.arange(rows, device="cuda").int() % 4
    # Normal, and all different, so that there is one selection.
    ranks = torch.stack([torch.randperm(length, device="cuda") for _ in range(rows)])
    scores = torch.full((rows, max(width, length)), torch.nan, device="cuda")
    scores[:, :length] = torch.special.ndtri((ranks.double() + 0.5) / length).float()
    pages = torch.stack([torch.randperm(1 << 15, device="cuda")[: -(-scores.shape[1] // PAGE_SIZE)] for _ in range(rows)]).int()
    out = torch.empty(rows, TOPK, dtype=torch.int32, device="cuda")
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    call = partial(topk_select, scores, lengths, pages, out)
    for blocks in CLUSTERS:
        for share in SHARES if blocks > 1 else SHARES[:1]:
            said = f"{blocks} blocks, share {share}" if blocks > 1 else "1 block"
            calls[said] = partial(call, blocks=blocks, share=share)
        for threads, vectors, of_sm in OTHERS:
            launch, most = kernel(blocks, threads, vectors, of_sm).launch, threads * vectors * 4
            for share in {most // 2, most, 4096}:
                said = f"{blocks} blocks of {threads} threads with {4 * vectors} scores, share {share}"
                calls[said] = partial(call, blocks=blocks, launch=launch, share=share)
    calls["ours"] = call
    if find_spec("sglang"):
        calls[SGLANGS] = sglangs(scores, lengths, pages)
    inside = torch.arange(length, device="cuda") < lengths[:, None]
    best = torch.where(inside, scores[:, :length], -torch.inf).topk(TOPK, 1).indices
    wanted = topk_slots_torch(best, pages, torch.arange(rows, device="cuda"), PAGE_SIZE).sort(1).values

    def far(one: Callable[[], torch.Tensor]) -> float:
        out.fill_(-7)
        return float((one().sort(1).values != wanted).float().mean())

    calls, wrong = right_ones(calls, far, 1e-9, "torch's")
    small = torch.zeros(1024, device="cuda")

    def behind(one: Callable[[], object] | None) -> None:
        for _ in range(REPEATS):
            small.add_(1)
            if one is not None:
                one()

    graphs = {way: captured_graph(partial(behind, one)) for way, one in ({OTHER: None} | calls).items()}
    times = interleaved({way: graph.replay for way, graph in graphs.items()}, REPEATS, SAMPLES)
    other = times.pop(OTHER)[0]
    us = {way: round(median - other, 2) for way, (median, _) in times.items()}
    spread = {way: [round(one - other, 2) for one in least_most] for way, (_, least_most) in times.items()}
    return {"rows": rows, "length": length, "width": scores.shape[1], "us": us, "spread_us": spread, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2049, 4096, 8192, 32768, 131072])
    parser.add_argument("--width", type=int, default=163840)
    options = parser.parse_args()
    torch.manual_seed(0)
    found: list[dict] = []
    for rows in options.rows:
        for length in options.lengths:
            found.append(cell(rows, -(-length // 4) * 4, options.width))
            print(rows, "rows of", length, found[-1]["wrong"] or "")
            print("\n".join(f"{us:9.2f} us  {way}" for way, us in found[-1]["us"].items()), flush=True)
            write_report(options.out, {"environment": environment(), "rows": found})


if __name__ == "__main__":
    main()
