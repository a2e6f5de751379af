"""Prefill attention of few heads by how much neighbouring rows share: sparse_prefill beside FlashMLA's, which pads the heads.

    python benchmarks/tuning/sparse_prefill.py OUT.json [--kv bf16 fp8] [--heads 16 8] [--rows 8192 1024] [--overlap 0.9 0.5]

A row shares `overlap` of its 2048 slots with the row before it in its tile, at random places of a million tokens. The two take
turns and are compared before they are timed. OUT.json is written after every cell.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch

from nsa_backend.benchmarks.calls.attention_case import HEAD_BLOCK, SLOTS, of_flashmla, pools
from nsa_backend.benchmarks.calls.overlapping import overlapping
from nsa_backend.benchmarks.calls.timing import interleaved
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.benchmarks.tuning.sparse_verify import TOO_FAR
from nsa_backend.kernels.sparse_verify import VerifyMemory, rows_of_tile, sparse_verify
from nsa_backend.testing.process import start_sglang
from nsa_backend.testing.shape import LATENT, QK_DIM, SCALE, TOPK

SAMPLES = 5
PEERS, SERVED = {"bf16": "flashmla_sparse", "fp8": "flashmla_kv"}, "sparse_prefill"


def cell(kv: str, heads: int, rows: int, overlap: float, num_sms: int) -> dict:
    """Microseconds of both, and how far ours is from FlashMLA's."""
    peer = PEERS[kv]
    together, generator = rows_of_tile(heads), torch.Generator(device="cuda").manual_seed(1)
    cache, _ = pools(kv)
    chosen = overlapping(rows // together, together, TOPK, overlap, SLOTS, generator)
    query = torch.randn(heads, rows, QK_DIM, generator=generator, device="cuda").bfloat16().transpose(0, 1)
    padded = torch.zeros(rows, HEAD_BLOCK, QK_DIM, device="cuda", dtype=torch.bfloat16)
    padded[:, :heads] = query
    lens = torch.full((rows,), TOPK, dtype=torch.int32, device="cuda")
    memory = VerifyMemory.allocate(rows, together, heads, TOPK, num_sms, "cuda")
    inputs = query[..., :LATENT], query[..., LATENT:], cache, chosen, lens, SCALE, together, memory
    flashmla = of_flashmla(kv, padded, cache)
    calls = {
        peer: lambda: flashmla(chosen),
        SERVED: lambda: sparse_verify(*inputs, num_sms=num_sms),
    }
    want, out = calls[peer]()[:, :heads].float(), calls[SERVED]().float()
    error = float((out - want).norm() / want.norm())
    if not error < TOO_FAR[kv]:
        raise ValueError(f"{SERVED} is {error:.1e} from {peer}: it is not timed")
    times = interleaved(calls, 1, SAMPLES)
    return {
        "kv": kv,
        "heads": heads,
        "rows": rows,
        "rows_together": together,
        "overlap": overlap,
        "error": error,
        "us": {name: round(us, 1) for name, (us, _) in times.items()},
        "min_max": {name: [round(x, 1) for x in spread] for name, (_, spread) in times.items()},
    }


def show(found: list[dict]) -> None:
    """Both times, and ours over FlashMLA's."""
    table = []
    for row in found:
        peer, own = row["us"][PEERS[row["kv"]]], row["us"][SERVED]
        table.append((row["kv"], row["heads"], row["rows"], row["overlap"], peer, own, own / peer))
    print_table(("kv", "heads", "rows", "overlap", "FlashMLA us", f"{SERVED} us", "ratio"), table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kv", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 8, 32])
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 1024, 304])
    parser.add_argument("--overlap", type=float, nargs="+", default=[0.9, 0.5, 0.0])
    args = parser.parse_args()
    start_sglang()
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    found: list[dict] = []
    for kv, heads, rows, overlap in itertools.product(args.kv, args.heads, args.rows, args.overlap):
        found.append(cell(kv, heads, rows, overlap, num_sms))
        write_report(args.out, {"environment": environment(), "rows": found})
        show(found[-1:])
    show(found)


if __name__ == "__main__":
    main()
