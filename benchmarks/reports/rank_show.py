"""Rows of ranks as tables on a terminal: rounds of every cell and side, and the parts of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nsa_backend.benchmarks.reports import parts
from nsa_backend.benchmarks.reports.rank_rows import ONE_RANK, Cell, by_cell, over_tensor_parallel, together
from nsa_backend.benchmarks.reports.report import print_table


def show(rows: Sequence[dict]) -> None:
    """A line a cell and side with the ratio of rounds to the built-in's; then how a round becomes tokens.

    Where the run has deployments of several GPUs, also rounds over those of ours whose KV is not divided, and tokens of a pool.
    """
    told, small = [r for r in rows if "parts" in r], [r for r in rows if "needs_tokens" in r]
    rows = [r for r in rows if "round_ms" in r]
    first, rounds, given = together(rows, "ttft_ms"), together(rows), by_cell(rows)
    columns = ("rank", "N", "prompts", "side", "round ms", "over the built-in's", "first token ms")
    table, of_several = [], []
    for cell, sides in rounds.items():
        for side, (median, least, most) in sides.items():
            ratio = f"{median / sides['builtin'][0]:.3f}" if "builtin" in sides and side != "builtin" else None
            spread, shape = f"{median:.2f} ({least:.2f}-{most:.2f})", cell.shape
            table.append((cell.name, cell.steps, shape, side, spread, ratio, f"{first[cell][side][0]:.0f}"))
            over = over_tensor_parallel(rounds, cell, side, "ours") or over_tensor_parallel(rounds, cell, side, side)
            of_several.append((over and f"{over:.3f}", given[cell][side][-1].get("pool_tokens")))
    if any(cell.parallel != ONE_RANK for cell in rounds):
        columns = (*columns, "over ours of tp", "tokens of the pool")
        table = [(*line, *more) for line, more in zip(table, of_several, strict=True)]
    print_table(columns, table)
    for r in small:
        shape = f"{Cell.of(r).name}, N = {r['steps']}, {Cell.of(r).shape}, {r['side']}"
        print(f"{shape}: a pool of {r['pool_tokens']} tokens has no room for {r['needs_tokens']}")
    print("random weights accept no drafts: milliseconds a token are a round's over the accept length of a trained model")
    show_parts(told)


OF_A_ROUND = {
    "all kernels": ("launches", "kernel_us"),
    "launches a layer": (None, "launches_a_layer"),
    "from one round to the next": (None, "period_us"),
    "GPU idle": (None, "idle_us"),
    "host in graph launches": (None, "graph_launch_us"),
}
BEFORE_ROUNDS = {"from the first to the round": (None, "period_us"), "GPU idle": (None, "idle_us")}
"""Lines behind the parts: what a row has for either of a side's columns."""


def show_parts(rows: Sequence[dict]) -> None:
    """A table a cell: a line a part with launches and microseconds of each side, then what a round is besides.

    Then one layer's launches, and the same as of a round of what ran before the first round, where all sides tell it by part.
    """
    for cell, turns in by_cell(rows).items():
        title = f"{cell.name}, N = {cell.steps}, {cell.shape}: kernels"
        sides = {side: of_side[-1] for side, of_side in turns.items()}
        table = lines_of(sides, OF_A_ROUND)
        if cell.parallel != ONE_RANK:
            table.append(("exchange a layer", *(v for row in sides.values() for v in row["exchange_a_layer"])))
        columns = ("part", *(word for side in sides for word in (f"{side}: launches", "us")))
        print(f"\n{title} of a round by part")
        print_table(columns, table)
        show_layers(f"{title} of a layer", sides)
        before = {side: row["before_rounds"] for side, row in sides.items() if "parts" in row.get("before_rounds", {})}
        if len(before) == len(sides):
            print(f"\n{title} before the first round by part")
            print_table(columns, lines_of(before, BEFORE_ROUNDS))
            show_layers(f"{title} of a layer before the first round", before)


def show_layers(title: str, sides: Mapping[str, dict]) -> None:
    """A table a side that tells its layer: a line a launch."""
    for side, row in sides.items():
        if row.get("layer"):
            print(f"\n{title}, {side}: from its attention to the next")
            print_table(("kernel", "begins", "us", "longer than all before"), row["layer"])


def lines_of(sides: Mapping[str, dict], besides: Mapping[str, tuple[str | None, str]]) -> list[tuple]:
    """A line a part that any side has: its launches and microseconds of each side. Then those of `besides`."""
    ran = [part for part in (*parts.PARTS, parts.REST) if any(row["parts"].get(part, [0])[0] for row in sides.values())]
    table = [(part, *(v for row in sides.values() for v in row["parts"].get(part, (0, 0.0)))) for part in ran]
    for text, keys in besides.items():
        table.append((text, *(None if key is None else row[key] for row in sides.values() for key in keys)))
    return table
