"""Which tile of sparse_decode is fastest on this GPU, for each number of heads and rows, beside the other implementations.

    python benchmarks/tune_sparse_decode.py OUT.json [--heads 8 16 32 64 128] [--rows 1 2 4 8 16 32]

Calls are those of `bench attention`: inside a captured graph, each on 2048 of a million tokens of its own, variants in turns.
Every tile is compared with fa3 before it is timed. OUT.json is written after every cell. `Tile.of` in
kernels/sparse_decode.py is to name the file that chose its tiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_backend.benchmarks.attention_case import Case
from nsa_backend.benchmarks.bench_attention import floor_us, timed
from nsa_backend.benchmarks.report import environment, print_table
from nsa_backend.kernels.sparse_decode import Tile, sparse_decode
from nsa_backend.testing.process import start_sglang
from nsa_backend.testing.shape import SCALE, TOPK

OTHERS = ("fa3", "flashmla_sparse")
TILES = tuple(
    Tile(*sizes)
    for sizes in (*itertools.product((16,), (32, 64), (4, 8), (2, 3)), *itertools.product((32, 64), (32, 64), (4, 8), (2,)))
)
TOO_FAR = 5e-3


def calls_of(case: Case, rows: int, num_sms: int) -> dict[str, Callable[[int], torch.Tensor]]:
    """A call of each tile, by its fields."""
    q_nope, q_rope = case.query(rows)
    lens = torch.full((rows,), TOPK, dtype=torch.int32, device="cuda")

    def call(tile: Tile) -> Callable[[int], torch.Tensor]:
        return lambda i: sparse_decode(
            q_nope, q_rope, case.cache, case.chosen(rows, i), lens, SCALE, num_sms=num_sms, tile=tile
        )

    return {" ".join(map(str, vars(tile).values())): call(tile) for tile in TILES if tile.heads < 2 * case.heads}


def cell(case: Case, rows: int, num_sms: int) -> dict:
    """Microseconds of every tile that is right, and of the others; the rest is named with what is wrong."""
    wanted, wrong, calls = case.ours("fa3", rows)(0).float(), {}, {}
    for name, call in calls_of(case, rows, num_sms).items():
        try:
            out = call(0).float()
        except RuntimeError as error:  # more shared memory than there is, for one
            wrong[name] = str(error).splitlines()[0]
            continue
        distance = float((out - wanted).norm() / wanted.norm())
        if distance < TOO_FAR:
            calls[name] = call
        else:
            wrong[name] = f"relative distance from fa3 {distance:.1e}"
    times = timed({name: case.ours(name, rows) for name in OTHERS} | calls, rows, 7)
    return {
        "heads": case.heads,
        "rows": rows,
        "floor_us": round(floor_us(case.heads, rows, case.bytes_per_token), 2),
        "us": {name: round(us, 2) for name, (us, _) in times.items()},
        "min_max": {name: [round(x, 2) for x in spread] for name, (_, spread) in times.items()},
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 8, 32, 128, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    args = parser.parse_args()
    start_sglang()
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    found: list[dict] = []
    for heads in args.heads:
        case = Case("bf16", heads)
        for rows in args.rows:
            found.append(cell(case, rows, num_sms))
            args.out.write_text(json.dumps({"environment": environment(), "rows": found}, indent=1))
            show(found[-1:])
    show(found)


def show(found: list[dict]) -> None:
    """The others, and the three best tiles, of each cell."""
    table = []
    for row in found:
        tiles = sorted((us, name) for name, us in row["us"].items() if name not in OTHERS)
        best = (f"{us:.1f} ({name})" for us, name in [*tiles, *[(float("nan"), "-")] * 3][:3])
        table.append(
            (row["heads"], row["rows"], row["floor_us"], *(row["us"][name] for name in OTHERS), *best, len(row["wrong"]))
        )
    print_table(("heads", "rows", "floor us", *OTHERS, "best (heads tokens warps stages)", "second", "third", "wrong"), table)


if __name__ == "__main__":
    main()
