"""Block-FP8 projections of few rows: what SGLang's block-FP8 layers can call, beside the time that the bytes take.

    python benchmarks/tuning/projections.py OUT.json [--rows 1 4 8 16 32 128]

Inputs are quantised beforehand where a runner takes them so; the others quantise for themselves, and DeepGEMM with SGLang's
quantisation in front of it stands beside those. Weights take turns, so that none is in the L2 cache. Every runner is compared
with DeepGEMM before it is timed. OUT.json is written after every cell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_backend.benchmarks.calls.split_gemm import split_gemm
from nsa_backend.benchmarks.commands.attention import timed
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.testing.process import start_sglang

SHAPES = {"qkv_a": (2112, 7168), "q_b": (3072, 1536), "wq_b": (8192, 1536), "o_proj": (7168, 2048)}
"""(columns out, columns in) of a rank of DeepSeek-V3.2 under tensor parallel 8; qkv_a and wq_b are the same on every rank."""
BLOCK, COLD_BYTES, SAMPLES = 128, 300 << 20, 5
BYTES_PER_US = 4.0e6
TILES = ((64, 1, 4, 4), (64, 2, 4, 4), (64, 4, 4, 4), (64, 4, 4, 6), (64, 8, 4, 4), (128, 2, 4, 4), (128, 4, 4, 4))
"""Columns of a block, programs a block, warps, stages."""
TOO_FAR = 1e-2


def runners(n: int, k: int, rows: int) -> dict[str, Callable[[int], torch.Tensor]]:
    """What gives bfloat16 [rows, n] of the i-th weight, by name."""
    from flashinfer.gemm import fp8_blockscale_gemm_sm90
    from sglang.srt.layers.quantization import fp8_utils

    from nsa_backend.adapters.dsa.layer_front.projections import quantised
    from nsa_backend.kernels.layer_front_weights import Scales

    copies = max(2, COLD_BYTES // (n * k))
    x = torch.randn(rows, k, device="cuda").bfloat16()
    values, scales = quantised(x, Scales.EXACT)
    plain = scales.contiguous()
    weights = [(torch.randn(n, k, device="cuda") * 0.5).to(torch.float8_e4m3fn) for _ in range(copies)]
    weight_scales = [torch.rand(-(-n // BLOCK), k // BLOCK, device="cuda") * 1e-2 for _ in range(copies)]
    deepgemm = fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
    block = [BLOCK, BLOCK]

    def of(run: Callable) -> Callable[[int], torch.Tensor]:
        return lambda i: run(weights[i % copies], weight_scales[i % copies])

    found = {
        "deepgemm": of(lambda w, s: deepgemm(values, w, block, s, input_scale=scales)),
        "quantise, deepgemm": of(lambda w, s: deepgemm(x, w, block, s)),
        "flashinfer": of(lambda w, s: fp8_blockscale_gemm_sm90(values, w, plain, s)),
        "quantise, flashinfer": of(lambda w, s: fp8_blockscale_gemm_sm90(x, w, None, s)),
        "quantise, cutlass": of(lambda w, s: fp8_utils.cutlass_w8a8_block_fp8_linear_with_fallback(x, w, block, s)),
        "quantise, triton": of(lambda w, s: fp8_utils.triton_w8a8_block_fp8_linear(x, w, block, s)),
    }
    if rows <= 32:
        for tile in TILES:
            found["split " + " ".join(map(str, tile))] = of(lambda w, s, tile=tile: split_gemm(values, plain, w, s, *tile))
    return found


def cell(name: str, rows: int) -> dict:
    """Microseconds of every runner that is right; what is wrong is named."""
    n, k = SHAPES[name]
    calls, wrong = {}, {}
    every = runners(n, k, rows)
    wanted = every["deepgemm"](0).float()
    for runner, call in every.items():
        try:
            distance = float((call(0).float() - wanted).norm() / wanted.norm())
            torch.cuda.synchronize()
        except Exception as error:  # whatever a library raises is this cell's finding
            wrong[runner] = (str(error) or type(error).__name__).splitlines()[0]
            continue
        if distance < TOO_FAR:
            calls[runner] = call
        else:
            wrong[runner] = f"relative distance from deepgemm {distance:.1e}"
    times = timed(calls, 64, SAMPLES)
    return {
        "projection": name,
        "columns": [n, k],
        "rows": rows,
        "us": {runner: round(us, 2) for runner, (us, _) in times.items()},
        "min_max": {runner: [round(x, 2) for x in spread] for runner, (_, spread) in times.items()},
        "floor_us": round(n * k / BYTES_PER_US, 2),
        "wrong": wrong,
    }


def show(found: list[dict]) -> None:
    """A line a cell: every library and the best tile."""
    table = []
    for row in found:
        tiles = {runner: us for runner, us in row["us"].items() if runner.startswith("split")}
        best = min(tiles, key=tiles.get, default="-")
        others = ", ".join(f"{runner} {us:.1f}" for runner, us in row["us"].items() if runner not in tiles)
        table.append(
            (row["projection"], row["rows"], row["floor_us"], others, best, tiles.get(best), "; ".join(row["wrong"])[:60])
        )
    print_table(("projection", "rows", "floor us", "libraries us", "best tile", "its us", "wrong"), table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 128])
    parser.add_argument("--projection", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    start_sglang()
    found: list[dict] = []
    for rows in args.rows:
        for name in args.projection:
            found.append(cell(name, rows))
            write_report(args.out, {"environment": environment(), "rows": found})
            show(found[-1:])
    show(found)


if __name__ == "__main__":
    main()
