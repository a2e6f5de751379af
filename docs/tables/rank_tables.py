"""Ranks of released models: rounds and tokens of every side, and where the GPU's time goes."""

from __future__ import annotations

from functools import cache

from result_files import Parts, release, reports, spread, table

from nsa_backend.benchmarks.reports.parts import PARTS as KERNEL_PARTS
from nsa_backend.benchmarks.reports.parts import REST
from nsa_backend.benchmarks.reports.rank_rows import Cell, Spread, by_cell, together

PARTS = Parts()
PRIMARY = "0.5.23"
FIRST_RANK = "v3.2-tp8"
"""The model of the README's table."""
BUILTIN = "builtin"
SIDES = {
    "ours": "ours",
    "front": "layer front",
    "verify": "rows together",
    "front_verify": "both",
    "auto": "auto",
    BUILTIN: "built-in",
}
"""Sides in the order of columns: `front` launches a layer's front twice, `verify` reads for all rows of a request together."""
BATCHES = (1, 8, 32)
NOISE = 0.005
"""What is lost by less is in the result files alone."""
LAYER_KERNELS = {
    "attention (FA3)": "flash::FlashAttnFwdSm90",
    "its combine": "flash::FlashAttnFwdCombine",
    "index logits": "deep_gemm::sm90_fp8_paged_mqa_logits",
}
"""Kernels that decode alone launches, once a layer, in a run that counts kernels by name."""
BESIDES = {"idle_us": "GPU idle", "period_us": "from one round to the next", "graph_launch_us": "host in graph launches"}


@cache
def newest(key: str) -> dict[Cell, dict]:
    """Of every cell, its rows in the report that has `key` of both sides and was put into the result file last."""
    found = {}
    for report in reports("rank").values():
        if release(report) == PRIMARY:
            for cell, sides in by_cell(row for row in report["rows"] if key in row).items():
                if {"ours", BUILTIN} <= sides.keys():
                    rows = [row for turns in sides.values() for row in turns]
                    found[cell] = {"commit": report["environment"]["commit"], "rows": rows}
    return dict(sorted(found.items(), key=lambda item: (item[0].checkpoint, order(item[0]))))


def order(cell: Cell) -> tuple[bool, int, int, int]:
    """Most drafts first after three, none last; the shortest prompts first."""
    return not cell.steps, abs(cell.steps - 3), cell.length, cell.batch


def times() -> dict[Cell, dict[str, Spread]]:
    """A round by cell and side; without drafts a token."""
    return {cell: together(given["rows"])[cell] for cell, given in newest("round_ms").items()}


def ratio(sides: dict[str, Spread], side: str = "ours") -> float:
    return sides[side].median / sides[BUILTIN].median


def sides_of(cells: dict[Cell, dict]) -> list[str]:
    """Those that any of these cells has, in the order of columns."""
    there = {side for sides in cells.values() for side in sides}
    return [side for side in SIDES if side in there]


def shape(cell: Cell) -> str:
    return f"{cell.batch} x {cell.length}"


def joined(of_batches: list[str]) -> str:
    return " / ".join(of_batches) if set(of_batches) != {"-"} else "-"


@PARTS.part
def rank_short() -> str:
    """A row a number of drafts and a prompt length that has all batches."""
    every = {cell: sides for cell, sides in times().items() if cell.checkpoint == FIRST_RANK}
    switched = [side for side in sides_of(every) if side not in ("ours", BUILTIN)]
    rows = []
    for steps, words in ((3, "a round of three drafts"), (0, "a token without drafts")):
        for length in (300, 4096):
            cells = [every.get(Cell(FIRST_RANK, steps, batch, length), {}) for batch in BATCHES]
            ms = [joined([f"{cell[side].median:.2f}" if side in cell else "-" for cell in cells]) for side in ("ours", BUILTIN)]
            ratios = [
                joined([f"{ratio(cell, side):.3f}" if side in cell else "-" for cell in cells]) for side in ("ours", *switched)
            ]
            rows.append([f"{words}, {length} tokens", *ms, *ratios])
    head = [f"ms at {' / '.join(map(str, BATCHES))} requests", "this package", f"SGLang {PRIMARY}", "ratio"]
    return table([*head, *(f"ratio, {SIDES[side]}" for side in switched)], rows)


@PARTS.part
def rank() -> str:
    """Every cell with its range."""
    every = times()
    sides = sides_of(every)
    ours = [side for side in sides if side != BUILTIN]
    rows = []
    for cell, given in every.items():
        ms = [f"{t.median:.2f} ({t.least:.2f} to {t.most:.2f})" if (t := given.get(side)) else "-" for side in sides]
        ratios = " / ".join(f"{ratio(given, side):.3f}" if side in given else "-" for side in ours)
        rows.append([cell.checkpoint, str(cell.steps), shape(cell), *ms, ratios, newest("round_ms")[cell]["commit"]])
    head = ["rank", "drafts", "requests x tokens", *(f"{SIDES[side]}, ms" for side in sides)]
    return table([*head, "ratio" if len(ours) == 1 else f"ratio: {' / '.join(SIDES[side] for side in ours)}", "commit"], rows)


@PARTS.part
def rank_saved() -> str:
    """Percent of a round with drafts."""
    saved = [100 * (1 - ratio(sides)) for cell, sides in times().items() if (cell.checkpoint, cell.steps) == (FIRST_RANK, 3)]
    return f"{spread(saved, '{:.0f}')} %"


@PARTS.part
def rank_kernels() -> str:
    """Of a round with drafts by part; where kernels were counted by name, of a launch of what decode alone launches."""
    return by_part() if newest("parts") else by_launch()


def by_part() -> str:
    found = {cell: by_cell(given["rows"])[cell] for cell, given in newest("parts").items() if cell.steps == 3}
    sides = sides_of(found)

    def line(words: str, of_row: str, part: str | None = None) -> list[str]:
        cells = []
        for given in found.values():
            rows = [given[side][-1] if side in given else None for side in sides]
            us = [None if row is None else row[of_row][part][1] if part else row[of_row] for row in rows]
            cells.append(" / ".join("-" if value is None else f"{value:.0f}" for value in us))
        return [words, *cells]

    rows = [line(part, "parts", part) for part in (*KERNEL_PARTS, REST)]
    rows += [line(words, key) for key, words in {"kernel_us": "all kernels", **BESIDES}.items()]
    return table([f"us: {' / '.join(SIDES[side] for side in sides)}", *(f"{c.checkpoint}, {shape(c)}" for c in found)], rows)


def by_launch() -> str:
    rows = []
    for cell, given in newest("kernels").items():
        if cell.steps == 3:
            sides = by_cell(given["rows"])[cell]
            counted = [sides[side][-1]["kernels"] for side in ("ours", BUILTIN)]
            means = [" / ".join(f"{k[name][1] / k[name][0]:.1f}" for k in counted) for name in LAYER_KERNELS.values()]
            rows.append([shape(cell), *means])
    return table(["us a launch, requests x tokens", *LAYER_KERNELS], rows)


def lost_by_ranks() -> list[list[str]]:
    """A row a rank and side that is behind the built-in anywhere."""
    rows = []
    every = times()
    for checkpoint in dict.fromkeys(cell.checkpoint for cell in every):
        for side in sides_of(every):
            lost = [
                f"{shape(cell)}{f', {cell.steps} drafts' if cell.steps else ''} ({ratio(sides, side):.3f})"
                for cell, sides in every.items()
                if cell.checkpoint == checkpoint and side in sides and ratio(sides, side) >= 1 + NOISE
            ]
            if lost:
                name = f"rank {checkpoint}" + (f", {SIDES[side]}" if side != "ours" else "")
                rows.append([name, "longer than built-in", "; ".join(lost)])
    return rows
