"""Where a launch of sparse_verify spends its time: when blocks come by the marks that its source has.

    python benchmarks/tuning/phases.py OUT.json [--kv bf16 fp8] [--heads 16] [--requests 8 16 32] [--overlap 0.9 0.5]
    python benchmarks/tuning/phases.py OUT.json --context 304  # rows that choose all of a short request, each one token more

A phase ends at its mark. Microseconds are those of a block's own clock, medians over blocks and calls; `slowest` is the median
over calls of the slowest block. Calls come alone, with slots that L2 has not seen, and have the bits of what is served. Needs
no SGLang. OUT.json is written after every cell.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch

from nsa_backend.benchmarks.calls.overlapping import overlapping
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.kernels.cuda_source import CudaKernel
from nsa_backend.kernels.sparse_verify import (
    PARTED,
    SHARED_BYTES,
    THREADS,
    Groups,
    VerifyMemory,
    constants,
    parts_of,
    sparse_verify,
)
from nsa_backend.testing.shape import LATENT, ROPE, SCALE, TOPK

PHASES = ("entries apart", "list made", "first tokens there", "all weighed", "part written", "all parts written", "joined")
"""What ends at the marks of sparse_verify.cu behind the first one."""
MARKS = len(PHASES) + 1
SLOTS, CALLS = 1 << 20, 12


def durations(stamps: np.ndarray) -> tuple[np.ndarray, float]:
    """(microseconds of each phase by block, those from the first block's begin to the last one's end).

    Args:
        stamps: uint64 [blocks, marks, 2], cycles of a block's multiprocessor and nanoseconds of the GPU; zeros where a block
            did not come by. One that did not come by the last mark had nothing to do.
    """
    stamps = np.maximum.accumulate(stamps[stamps[:, -1, 0] > 0], axis=1)
    cycles, ns = stamps.astype(np.int64).transpose(2, 0, 1)
    cycles_per_us = (cycles[:, -1] - cycles[:, 0]).sum() / (ns[:, -1] - ns[:, 0]).sum() * 1e3
    return np.diff(cycles, axis=1) / cycles_per_us, float(ns[:, -1].max() - ns[:, 0].min()) / 1e3


def cache_of(kv: str) -> torch.Tensor:
    """A KV cache of a million tokens, as `sparse_verify` takes it."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    if kv == "bf16":
        return torch.randn(SLOTS, 1, LATENT + ROPE, generator=generator, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(SLOTS, 1, LATENT, generator=generator, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(SLOTS, 1, 4, generator=generator, device="cuda").view(torch.uint8)
    rope = torch.randn(SLOTS, 1, ROPE, generator=generator, device="cuda").bfloat16().view(torch.uint8)
    return torch.cat([values, scales, rope], dim=-1).view(torch.float8_e4m3fn)


def in_order(requests: int, rows: int, context: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(int32 [requests * rows, TOPK], int32 [requests * rows]): slots of short requests as top-k leaves them, and how many."""
    drawn = torch.stack([torch.randperm(SLOTS, generator=generator, device="cuda")[:context] for _ in range(requests)]).int()
    lens = torch.arange(context - rows + 1, context + 1, dtype=torch.int32, device="cuda").repeat(requests)
    chosen = torch.nn.functional.pad(drawn.repeat_interleave(rows, 0), (0, TOPK - context), value=-1)
    return chosen.masked_fill_(torch.arange(TOPK, device="cuda") >= lens[:, None], -1), lens


def cell(cache: torch.Tensor, heads: int, rows_per_request: int, requests: int, overlap: float, context: int) -> dict:
    """Phases of one shape; below TOPK tokens rows choose all of `context`, and `overlap` says nothing.

    Raises:
        SystemExit: each tile of so many requests has one block, which has no marks.
    """
    fp8, sms = cache.dtype == torch.float8_e4m3fn, torch.cuda.get_device_properties("cuda").multi_processor_count
    rows, groups = requests * rows_per_request, Groups.of(rows_per_request, heads)
    tiles = requests * groups.of_request
    parts = parts_of(tiles, sms)
    if parts == 1:
        raise SystemExit(f"{requests} requests have a block for each of {tiles} tiles: give at most {sms // 2} tiles")
    generator = torch.Generator(device="cuda").manual_seed(1)
    query = torch.randn(rows, heads, LATENT + ROPE, generator=generator, device="cuda").bfloat16()
    lens = torch.full((rows,), TOPK, dtype=torch.int32, device="cuda")
    memory = VerifyMemory.allocate(rows, rows_per_request, heads, TOPK, sms, "cuda")
    macros = constants(groups.rows, heads, TOPK, fp8=fp8)
    marked = CudaKernel(PARTED, "attend", macros | {"STAMPS": MARKS}, THREADS, SHARED_BYTES)
    phases, whole, different = [], [], 0
    for _ in range(CALLS):
        if context < TOPK:
            chosen, lens = in_order(requests, rows_per_request, context, generator)
        else:
            chosen = overlapping(requests, rows_per_request, TOPK, overlap, SLOTS, generator)
        given = query[..., :LATENT], query[..., LATENT:], cache, chosen, lens, SCALE, rows_per_request, memory
        torch.cuda.synchronize()
        found = sparse_verify(*given, num_sms=sms, launch=marked.launch)
        stamps = np.frombuffer(marked.variable("stamps"), dtype=np.uint64).reshape(-1, MARKS, 2)[: tiles * parts]
        assert torch.equal(found, sparse_verify(*given, num_sms=sms))
        of_blocks, us = durations(stamps)
        phases.append(of_blocks)
        whole.append(us)
        named = chosen.view(requests, -1)[0]
        different = named[named >= 0].unique().numel()
    of_calls = np.stack(phases[1:])  # the first one warms up
    return {
        "kv": "fp8" if fp8 else "bf16", "heads": heads, "rows_per_request": rows_per_request, "requests": requests,
        "overlap": overlap, "context": context, "different": different, "parts": parts,
        "whole_us": round(float(np.median(whole[1:])), 2),
        "us": {name: round(float(x), 2) for name, x in zip(PHASES, np.median(of_calls, axis=(0, 1)), strict=True)},
        "slowest": {name: round(float(x), 2) for name, x in zip(PHASES, np.median(of_calls.max(axis=1), axis=0), strict=True)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kv", nargs="+", choices=("bf16", "fp8"), default=["bf16"])
    parser.add_argument("--heads", type=int, nargs="+", default=[16])
    parser.add_argument("--rows", type=int, nargs="+", default=[4], help="of a request")
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--overlap", type=float, nargs="+", default=[0.9, 0.5])
    parser.add_argument("--context", type=int, default=SLOTS, help="tokens of a request")
    args = parser.parse_args()
    found: list[dict] = []
    for kv in args.kv:
        cache = cache_of(kv)
        for shape in itertools.product(args.heads, args.rows, args.requests, args.overlap):
            found.append(cell(cache, *shape, args.context))
            write_report(args.out, {"environment": environment(), "rows": found})
            row = found[-1]
            shown = "kv", "heads", "requests", "overlap", "context", "parts", "whole_us"
            print(*(f"{name} {row[name]}" for name in shown), sep=", ")
            print_table(("phase", "us", "slowest block"), [(name, row["us"][name], row["slowest"][name]) for name in PHASES])


if __name__ == "__main__":
    main()
