"""Which tile of sparse_decode is fastest on this GPU, for each number of heads and rows, beside the other implementations.

    python benchmarks/tuning/sparse_decode.py OUT.json [--kv bf16 fp8] [--heads 8 16 32 64 128] [--rows 1 2 4 8 16 32]

Calls are those of `bench attention`: inside a captured graph, each on 2048 of a million tokens of its own, variants in turns.
Every tile is compared with the first of them before it is timed, and the fastest of a cell is timed again with every way to
join. OUT.json is written after every cell; kernels/sparse_decode_plan.py names the file that chose its tiles and joins.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple
from pathlib import Path

import torch
import triton

from nsa_backend.benchmarks.calls.attention_case import Case
from nsa_backend.benchmarks.commands.attention import floor_us, timed
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.kernels.sparse_decode import SCALE_BYTES, sparse_decode
from nsa_backend.kernels.sparse_decode_plan import Join, Split, Tile
from nsa_backend.testing.process import start_sglang
from nsa_backend.testing.shape import LATENT, QK_DIM, ROPE, SCALE, TOPK

OTHERS = {"bf16": ("fa3", "flashmla_sparse"), "fp8": ("flashmla_kv",)}
TILES = tuple(
    Tile(heads, tokens, warps, stages, programs)
    for heads, tokens, warps, stages, most in (
        (16, 32, 4, 2, 1),
        (16, 32, 4, 3, 2),
        (16, 32, 8, 3, 1),
        (16, 64, 4, 2, 2),
        (16, 64, 4, 3, 1),
        (16, 64, 8, 3, 1),
        (16, 128, 4, 2, 1),
        (16, 128, 8, 2, 1),
        (32, 32, 4, 3, 2),
        (32, 32, 8, 3, 1),
        (32, 64, 8, 3, 1),
        (64, 32, 8, 3, 1),
        (64, 64, 8, 2, 1),
    )
    for programs in range(1, most + 1)
)
JOINS = tuple(Join(*sizes) for sizes in ((64, 64, 4), (32, 128, 4), (64, 128, 4), (16, 256, 4), (16, 512, 4), (32, 512, 8)))
COMPILERS = 8  # processes
SAMPLES = 5
TOO_FAR = 5e-3


def compile_tile(tile: Tile) -> None:
    """Into Triton's cache, split and not, for either cache: of a compiled kernel a cell asks for nothing but time."""
    fp8 = torch.zeros(64, 1, LATENT + SCALE_BYTES + 2 * ROPE, dtype=torch.float8_e4m3fn, device="cuda")
    for cache in (torch.zeros(64, 1, QK_DIM, dtype=torch.bfloat16, device="cuda"), fp8):
        for rows, join in (*((1, join) for join in JOINS), (512, None)):
            query = torch.zeros(rows, 128, QK_DIM, dtype=torch.bfloat16, device="cuda").split([LATENT, ROPE], dim=-1)
            slots = torch.zeros(rows, TOPK, dtype=torch.int32, device="cuda")
            lens = torch.full((rows,), TOPK, dtype=torch.int32, device="cuda")
            try:
                sparse_decode(*query, cache, slots, lens, SCALE, num_sms=132, tile=tile, join=join)
            except (RuntimeError, triton.TritonError):  # told of in the cell
                break


def compile_all() -> None:
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_tile, TILES))


def caller(case: Case, rows: int, num_sms: int) -> Callable[[Tile, Join | None], Callable[[int], torch.Tensor]]:
    """What makes a call of a tile."""
    q_nope, q_rope = case.query(rows)
    lens = torch.full((rows,), TOPK, dtype=torch.int32, device="cuda")

    def calls(tile: Tile, join: Join | None = None) -> Callable[[int], torch.Tensor]:
        return lambda i: sparse_decode(
            q_nope, q_rope, case.cache, case.chosen(rows, i), lens, SCALE, num_sms=num_sms, tile=tile, join=join
        )

    return calls


def title(what: Tile | Join) -> str:
    return " ".join(map(str, astuple(what)))


def cell(case: Case, rows: int, num_sms: int) -> dict:
    """Microseconds of every tile that is right, and of the others; the rest is named with what is wrong."""
    others = OTHERS[case.kv]
    wanted, wrong, calls, call = case.ours(others[0], rows)(0).float(), {}, {}, caller(case, rows, num_sms)
    tiles = {title(tile): tile for tile in TILES if tile.heads < 2 * max(case.heads, 16)}
    for name, tile in tiles.items():
        try:
            out = call(tile)(0).float()
        except (RuntimeError, triton.TritonError) as error:  # more shared memory than there is, for one
            wrong[name] = str(error).splitlines()[0]
            continue
        distance = float((out - wanted).norm() / wanted.norm())
        if distance < TOO_FAR:
            calls[name] = call(tile)
        else:
            wrong[name] = f"relative distance from {others[0]} {distance:.1e}"
    times = timed({name: case.ours(name, rows) for name in others} | calls, rows, SAMPLES)
    best = min(calls, key=lambda name: times[name][0], default=None)
    joins = {}
    if best is not None and Split.of(rows, case.heads, TOPK, num_sms, tiles[best]).parts > 1:
        joins = timed({title(join): call(tiles[best], join) for join in JOINS}, rows, SAMPLES)
    tile, join = Tile.of(rows, case.heads, fp8=case.kv == "fp8"), Join.of(rows, case.heads)
    return {
        "kv": case.kv,
        "heads": case.heads,
        "rows": rows,
        "floor_us": round(floor_us(case.heads, rows, case.bytes_per_token), 2),
        "us": {name: round(us, 2) for name, (us, _) in times.items()},
        "min_max": {name: [round(x, 2) for x in spread] for name, (_, spread) in times.items()},
        "best": best,
        "of": [title(tile), title(join)],
        "joins_of_best": {name: round(us, 2) for name, (us, _) in joins.items()},
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kv", nargs="+", choices=OTHERS, default=list(OTHERS))
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 8, 32, 128, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    args = parser.parse_args()
    compile_all()
    start_sglang()
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    found: list[dict] = []
    for kv, heads in itertools.product(args.kv, args.heads):
        case = Case(kv, heads)
        for rows in args.rows:
            found.append(cell(case, rows, num_sms))
            write_report(args.out, {"environment": environment(), "rows": found})
            show(found[-1:])
    show(found)


def show(found: list[dict]) -> None:
    """The others, the tile that sparse_decode takes by itself, and the two best, of each cell."""
    table = []
    for row in found:
        others = {name: row["us"][name] for name in OTHERS[row["kv"]]}
        tiles = sorted((us, name) for name, us in row["us"].items() if name not in others)
        best = (f"{us:.1f} ({name})" for us, name in [*tiles, *[(float("nan"), "-")] * 2][:2])
        told = ", ".join(f"{name} {us:.1f}" for name, us in others.items())
        own = row["us"].get(row["of"][0], float("nan"))
        cell = (row["kv"], row["heads"], row["rows"], row["floor_us"], told, own, *best, len(row["wrong"]))
        table.append((*cell, min(row["joins_of_best"], key=row["joins_of_best"].get, default="-"), row["of"][1]))
    best = "best (heads tokens warps stages programs)"
    print_table(("kv", "heads", "rows", "floor us", "others", "own", best, "second", "wrong", "best join", "own join"), table)


if __name__ == "__main__":
    main()
