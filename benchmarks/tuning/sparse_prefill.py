"""Prefill attention of few heads by how much neighbouring rows share: sparse_prefill beside FlashMLA's, which pads the heads.

    python benchmarks/tuning/sparse_prefill.py OUT.json [--kv bf16 fp8] [--heads 16 8] [--rows 8192 1024] [--overlap 0.9 0.5]

A row shares `overlap` of its 2048 slots with the row before it in its tile, at random places of a million tokens. The two take
turns and are compared before they are timed. OUT.json is written after every cell.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.flashmla_sparse import HEADS_MULTIPLE
from nsa_backend.benchmarks.calls.attention_case import SLOTS, pools
from nsa_backend.benchmarks.calls.timing import interleaved
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.benchmarks.tuning.sparse_verify import TOO_FAR, overlapping
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.sparse_verify import VerifyMemory, rows_of_tile, sparse_verify
from nsa_backend.testing.process import start_sglang
from nsa_backend.testing.shape import LATENT, QK_DIM, SCALE, TOPK

SAMPLES = 5
PEERS, SERVED = {"bf16": "flashmla_sparse", "fp8": "flashmla_kv"}, "sparse_prefill"


def of_flashmla(kv: str, query: torch.Tensor, cache: torch.Tensor, chosen: torch.Tensor) -> Callable[[], torch.Tensor]:
    """FlashMLA's kernel for such a KV cache, on a query whose heads are padded already; [rows, padded heads, latent]."""
    flash_mla, (rows, heads, _) = adapter.flash_mla(), query.shape
    if kv == "bf16":
        attend = flash_mla.flash_mla_sparse_fwd
        return lambda: attend(q=query, kv=cache, indices=chosen.unsqueeze(1), sm_scale=SCALE, d_v=LATENT)[0]
    lens = torch.full((rows,), TOPK, dtype=torch.int32, device="cuda")
    tiles, num_splits = flash_mla.get_mla_metadata(
        cache_seqlens=lens, num_q_tokens_per_head_k=heads, num_heads_k=1, num_heads_q=heads, is_fp8_kvcache=True, topk=TOPK
    )
    arguments = dict(
        q=query.unsqueeze(1), k_cache=cache.view(-1, PAGE_SIZE, 1, cache.shape[-1]), cache_seqlens=lens, head_dim_v=LATENT,
        tile_scheduler_metadata=tiles, num_splits=num_splits, softmax_scale=SCALE, indices=chosen.unsqueeze(1),
        block_table=chosen.new_empty(rows, 0), is_fp8_kvcache=True,
    )  # fmt: skip
    return lambda: flash_mla.flash_mla_with_kvcache(**arguments)[0].squeeze(1)


def cell(kv: str, heads: int, rows: int, overlap: float, num_sms: int) -> dict:
    """Microseconds of both, and how far ours is from FlashMLA's."""
    peer = PEERS[kv]
    together, generator = rows_of_tile(heads), torch.Generator(device="cuda").manual_seed(1)
    cache, _ = pools(kv)
    chosen = overlapping(rows // together, together, TOPK, overlap, SLOTS, generator)
    query = torch.randn(heads, rows, QK_DIM, generator=generator, device="cuda").bfloat16().transpose(0, 1)
    padded = torch.zeros(rows, HEADS_MULTIPLE, QK_DIM, device="cuda", dtype=torch.bfloat16)
    padded[:, :heads] = query
    lens = torch.full((rows,), TOPK, dtype=torch.int32, device="cuda")
    memory = VerifyMemory.allocate(rows, together, heads, TOPK, num_sms, "cuda")
    inputs = query[..., :LATENT], query[..., LATENT:], cache, chosen, lens, SCALE, together, memory
    calls = {
        peer: of_flashmla(kv, padded, cache, chosen),
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
