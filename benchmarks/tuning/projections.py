"""Block-FP8 projections of few rows: what SGLang's block-FP8 layers can call, beside the time that the bytes take.

    python benchmarks/tuning/projections.py OUT.json [--rows 1 4 8 16 32 64 128] [--served]

Inputs are quantised beforehand where a runner takes them so, and the others quantise by themselves. Two projections of one
input are one launch of ours, and two launches on two streams of DeepGEMM. Weights take turns, so that none is in the L2 cache,
or with `--warm` are the same, which L2 has: the difference is what memory costs. Every runner is compared with DeepGEMM before
it is timed. With `--served` launches of ours are divided as a server has them alone, and beside them is DeepGEMM alone.
OUT.json is written after every cell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_backend.adapters.dsa.layer_front.builtin import quantised
from nsa_backend.adapters.dsa.layer_front.projections import LEAST_INNER
from nsa_backend.adapters.dsa.layer_front.streams import SideStream
from nsa_backend.benchmarks.calls.timing import right_ones
from nsa_backend.benchmarks.commands.attention import timed
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.kernels import early_products, tile_products
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.kernels.projection_inputs import quantise
from nsa_backend.testing.process import start_sglang

SHAPES = {
    "qkv_a, wk": (7168, 2112, 128), "q_b, wq_b": (1536, 3072, 8192), "q_b": (1536, 3072), "o_proj": (2048, 7168),
    "qkv_a of GLM-5": (6144, 2624), "q_b, wq_b of GLM-5": (2048, 2048, 4096), "q_b of GLM-5": (2048, 2048),
    "o_proj of GLM-5": (2048, 6144),
    "q_b, wq_b under DP attention": (1536, 24576, 8192), "q_b under DP attention": (1536, 24576),
    "o_proj under DP attention": (16384, 7168),
}  # fmt: skip
"""Columns in, then out of each, of a rank of DeepSeek-V3.2 under tensor parallel 8 unless said."""
INDEX_HEADS = 64
COLD_BYTES, SAMPLES = 300 << 20, 5
BYTES_PER_US = 4.0e6
MOST_SHARED, MOST_SUMS = 227 << 10, 288 * 128
"""Bytes of shared memory; of threads and rows, so that registers suffice."""
TILES = tuple(
    (parts, wide, takers, stages)
    for parts in (1, 2, 4, 7, 8)
    for wide, takers in ((1, 1), (1, 2), (2, 1), (2, 2))
    for stages in (4, 6, 8)
    if not stages % (wide * takers)
)
"""Ways to divide a launch of tiles: parts of the inner dimension, 64 columns of a block, warpgroups that take turns, stages."""
ROW_TILES = tuple((parts, columns, stages) for parts in (1, 2, 4) for columns in (64, 96, 128) for stages in (4, 6, 8))
"""Of more rows: parts, columns of a block, stages."""
EARLY = tuple(
    early_products.Tile(*tile, before)
    for tile in ((8, 16, 7), (8, 16, 4), (8, 32, 4), (4, 32, 6), (4, 32, 4), (6, 32, 4))
    for before in (0, 1, 2, 4)
)
"""Ways to divide a launch whose weights come early: warps, columns, and chunks that are held and that come before rows."""
TOO_FAR = 1e-2

Call = Callable[[int], list[torch.Tensor]]


def runners(name: str, rows: int, warm: bool = False, served: bool = False) -> dict[str, Call]:
    """What gives the products with the i-th weights, by name; of ours, as they are `served`, or in every way."""
    from flashinfer.gemm import fp8_blockscale_gemm_sm90
    from sglang.srt.layers.quantization import fp8_utils

    inner, *widths = SHAPES[name]
    copies, block = 1 if warm else max(2, COLD_BYTES // (sum(widths) * inner)), [GROUP, GROUP]
    x = torch.randn(rows, inner, device="cuda").bfloat16()
    values, scales = quantised(x, Scales.EXACT)
    drawn = [
        [
            (
                (torch.randn(width, inner, device="cuda") * 0.5).to(torch.float8_e4m3fn),
                torch.rand(-(-width // GROUP), inner // GROUP, device="cuda") * 1e-2,
            )
            for width in widths
        ]
        for _ in range(copies)
    ]
    deepgemm = fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
    side = SideStream(torch.cuda.Stream())

    def each(run: Callable) -> Call:
        return lambda i: [run(*weight) for weight in drawn[i % copies]]

    def on_two_streams(i: int) -> list[torch.Tensor]:
        first, second = drawn[i % copies]
        side.fork()
        one = deepgemm(values, first[0], block, first[1], input_scale=scales)
        with side.running():
            two = deepgemm(values, second[0], block, second[1], input_scale=scales)
        side.join()
        return [one, two]

    found = {
        "deepgemm": each(lambda w, s: deepgemm(values, w, block, s, input_scale=scales)),
        "quantise, deepgemm": each(lambda w, s: deepgemm(x, w, block, s)),
    }
    if not served:  # which FlashInfer may compile for minutes, or which are slower by far
        found |= {
            "quantise, flashinfer": each(lambda w, s: fp8_blockscale_gemm_sm90(x, w, None, s)),
            "quantise, cutlass": each(lambda w, s: fp8_utils.cutlass_w8a8_block_fp8_linear_with_fallback(x, w, block, s)),
            "quantise, triton": each(lambda w, s: fp8_utils.triton_w8a8_block_fp8_linear(x, w, block, s)),
        }
    if rows <= early_products.MOST_ROWS:
        others = () if served else EARLY
        tiles = [tile for tile in others if early_products.chunks_of(inner, tile.warps) >= tile.ahead]
        named = {f"early_products {tile.warps} {tile.columns} {tile.ahead} {tile.before}": tile for tile in tiles}
        for said, tile in ({"early_products": None} | named).items():
            found[said] = lambda i, tile=tile: list(
                early_products.early_products(values, scales, *drawn[i % copies], tile=tile)
            )
    of_rows = next(most for most in tile_products.ROWS if rows <= most)
    few = of_rows < tile_products.LINES
    kind, cuts = (tile_products.Tile, TILES) if few else (tile_products.RowTile, ROW_TILES)
    tiles = {cut: tile for cut in (() if served else cuts) if fits(tile := kind(of_rows, *cut), inner)}
    named = {" ".join(map(str, ("tile_products", *cut))): tile for cut, tile in tiles.items()}
    for said, tile in ({"tile_products": None} | named).items():
        found[said] = lambda i, tile=tile: list(tile_products.tile_products(values, scales, *drawn[i % copies], tile=tile))
    if len(widths) == 2:
        found["deepgemm, two streams"] = on_two_streams
    if inner >= LEAST_INNER:
        gates = [torch.randn(INDEX_HEADS, inner, device="cuda").bfloat16() for _ in range(copies)]

        def deepgemm_and_gates(i: int) -> list[torch.Tensor]:
            side.fork()
            outs = [deepgemm(values, w, block, s, input_scale=scales) for w, s in drawn[i % copies]]
            with side.running():
                torch.mm(x, gates[i % copies].t(), out_dtype=torch.float32)
            side.join()
            return outs

        def with_gates(multiply: Callable) -> Call:
            def call(i: int) -> list[torch.Tensor]:
                x_of_ours = quantise(x, Scales.EXACT, before_ours=True)
                return list(multiply(*x_of_ours, *drawn[i % copies], gates=(x, gates[i % copies])))[: len(widths)]

            return call

        found["deepgemm, gates on another stream"] = deepgemm_and_gates
        found["quantise, tile_products with gates"] = with_gates(tile_products.tile_products)
        if rows <= early_products.MOST_ROWS:
            found["quantise, early_products with gates"] = with_gates(early_products.early_products)
    return found


def fits(tile: tile_products.Tile | tile_products.RowTile, inner: int) -> bool:
    """Whether a launch can be divided so."""
    if not tile.divides(inner) or tile.shared_bytes(inner) > MOST_SHARED:
        return False
    steps = tile.stages * (tile.columns + tile.rows) * GROUP
    if isinstance(tile, tile_products.RowTile):
        return tile.parts == 1 or tile.sums_bytes <= steps
    sums = tile.wide * tile.takers * tile.rows * (tile_products.COLUMNS + 4) * 4
    return sums <= steps and tile.threads * tile.rows <= MOST_SUMS


def cell(name: str, rows: int, warm: bool, served: bool) -> dict:
    """Microseconds of every runner that is right; what is wrong is named."""
    inner, *widths = SHAPES[name]
    every = runners(name, rows, warm, served)
    wanted = [out.float() for out in every["deepgemm"](0)]

    def distance(call: Call) -> float:
        return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(call(0), wanted, strict=True))

    calls, wrong = right_ones(every, distance, TOO_FAR, "deepgemm")
    times = timed(calls, 64, SAMPLES)
    return {
        "projections": name,
        "columns": [inner, *widths],
        "rows": rows,
        "warm": warm,
        "us": {runner: round(us, 2) for runner, (us, _) in times.items()},
        "min_max": {runner: [round(x, 2) for x in spread] for runner, (_, spread) in times.items()},
        "floor_us": round(sum(widths) * inner / BYTES_PER_US, 2),
        "wrong": wrong,
    }


def show(found: list[dict]) -> None:
    """A line a cell: every library and the best tile."""
    table = []
    for row in found:
        tiles = {runner: us for runner, us in row["us"].items() if "_products" in runner}
        best = min(tiles, key=tiles.get, default="-")
        others = ", ".join(f"{runner} {us:.1f}" for runner, us in row["us"].items() if runner not in tiles)
        wrong = "; ".join(row["wrong"])[:60]
        table.append((row["projections"], row["rows"], row["floor_us"], others, best, tiles.get(best), wrong))
    print_table(("projections", "rows", "floor us", "libraries us", "best tile", "its us", "wrong"), table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--projections", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--warm", action="store_true", help="the same weights at every call, which L2 has")
    parser.add_argument("--served", action="store_true", help="of launches of ours the division alone that a server has")
    args = parser.parse_args()
    start_sglang()
    found: list[dict] = []
    for rows in args.rows:
        for name in args.projections:
            found.append(cell(name, rows, args.warm, args.served))
            write_report(args.out, {"environment": environment(), "rows": found})
            show(found[-1:])
    show(found)


if __name__ == "__main__":
    main()
