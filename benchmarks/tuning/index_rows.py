"""Index queries and keys of prefills of DeepSeek-V3.2: our launches, beside two of the kernels that SGLang has there.

    python benchmarks/tuning/index_rows.py OUT.json [--rows 1024 4096 8192]

SGLang's are the Hadamard rotation and the quantisation of queries; RoPE, gates and the keys' kernels are not timed. Queries by
blocks of other sizes are compared bit by bit before they are timed. OUT.json is written after every number of rows.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
import triton

from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.kernels.cuda_source import CudaKernel
from nsa_backend.kernels.layer_front_weights import GROUP, FrontWeights
from nsa_backend.kernels.norm_rope_store import INDEX_PAGE_BYTES, store_index_keys
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.rope_quantise import SOURCE, THREADS, constants, index_queries
from nsa_backend.testing.process import start_sglang

HEADS, ROPE, POSITIONS = 64, 64, 163840
OTHERS = (64, 256, 512)
"""Threads of a block."""


def weights() -> FrontWeights:
    """Of a layer, but for its latents' norms, which are not used."""
    angles = torch.rand(POSITIONS, ROPE // 2, device="cuda") * 6.28
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    norm, unused = torch.ones(GROUP, device="cuda"), torch.ones(512, device="cuda").bfloat16()
    return FrontWeights(unused, unused, norm, norm - 1, table, table, 1e-6, 1e-6, 1e-6, False, index_neox=True)


def microseconds(call) -> float:
    return round(triton.testing.do_bench(call, warmup=5, rep=30) * 1000, 1)


def by_blocks_of(threads: int, of_layer: FrontWeights):
    """What launches queries by such blocks."""
    macros = constants(HEADS, of_layer) | {"THREADS": threads}
    kernel = CudaKernel(SOURCE, SOURCE.stem, macros, threads, 0)
    return lambda grid, arguments: kernel.launch((grid[0] * THREADS // threads, 1), arguments)


def measure(rows: int) -> dict:
    """Microseconds of each way, and which blocks give other bits than those that serve."""
    from sglang.kernels.ops.quantization.act_quant_triton import act_quant
    from sglang.srt.layers.attention.dsa.dsa_indexer import rotate_activation

    of_layer, positions = weights(), torch.randint(0, POSITIONS, (rows,), device="cuda")
    query, gates = torch.randn(rows, HEADS, GROUP, device="cuda").bfloat16(), torch.randn(rows, HEADS, device="cuda")
    key, slots = torch.randn(rows, GROUP, device="cuda").bfloat16(), PAGE_SIZE + torch.randperm(rows, device="cuda")
    cache = torch.zeros(rows // PAGE_SIZE + 2, INDEX_PAGE_BYTES, dtype=torch.uint8, device="cuda")
    queries = partial(index_queries, query, gates, of_layer, positions)
    us = {
        "keys": microseconds(lambda: store_index_keys(key, of_layer, positions, slots, cache)),
        "queries": microseconds(queries),
        "sglang hadamard": microseconds(lambda: rotate_activation(query)),
        "sglang act_quant": microseconds(lambda: act_quant(query, GROUP, "ue8m0")),
    }
    wanted, wrong = queries(), []
    for threads in OTHERS:
        call, said = partial(queries, launch=by_blocks_of(threads, of_layer)), f"queries, blocks of {threads}"
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(call(), wanted, strict=True)):
            wrong.append(said)
        us[said] = microseconds(call)
    return {"rows": rows, "us": us, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=(1024, 4096, 8192))
    args = parser.parse_args()
    start_sglang()
    found: list[dict] = []
    for rows in args.rows:
        found.append(measure(rows))
        write_report(args.out, {"environment": environment(), "rows": found})
        print(rows, "rows, wrong:", found[-1]["wrong"], flush=True)
        print_table(("way", "us"), sorted(found[-1]["us"].items(), key=lambda way: way[1]))


if __name__ == "__main__":
    main()
