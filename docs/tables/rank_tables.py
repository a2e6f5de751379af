"""Ranks of released models: rounds and tokens of every side, and where the GPU's time goes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product

from result_files import Parts, release, reports, spread, table

from nsa_backend.attention.auto import least_in_prefill
from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.reports.parts import ALL_REDUCE, EXCHANGE, REST
from nsa_backend.benchmarks.reports.parts import PARTS as KERNEL_PARTS
from nsa_backend.benchmarks.reports.rank_rows import ONE_RANK, Cell, Spread, by_cell, together

PARTS = Parts()
PRIMARY = "0.5.23"
FIRST_RANK = "v3.2-tp8"
"""The model of the README's table."""
BUILTIN = "builtin"
SIDES = {
    "ours": "without front",
    "front": "with front",
    "verify": "rows together",
    "front_verify": "both",
    "auto_alone": "auto, without front",
    "auto": "front and auto",
    "sparse_verify": "sparse_verify",
    "sparse_prefill": "sparse_prefill",
    BUILTIN: "built-in",
}
"""Sides in the order of columns. `front` launches a layer's front twice, as is the default where it can; `ours` does not.
`verify` reads for all rows of a request together. A report in which a side is another than it is called says `sides_are`."""
DEFAULTS = {FIRST_RANK: "auto", "glm-5.1-tp8": "auto_alone"}
"""Rank to the side that an H200's default is: SGLang fuses GLM's front itself."""
WITH_PREFILL = {FIRST_RANK: "sparse_prefill", "glm-5.1-tp8": "auto_alone"}
"""Rank to the side whose prefill is sparse_prefill's, as the default's is since."""
TIMES = {"round_ms": "longer", "ttft_ms": "first token later"}
BATCHES = (1, 8, 32)
NOISE = 0.005
"""What is lost by less is in the result files alone, and so are narrower ranges."""
LAYER_KERNELS = {
    "attention (FA3)": "flash::FlashAttnFwdSm90",
    "its combine": "flash::FlashAttnFwdCombine",
    "index logits": "deep_gemm::sm90_fp8_paged_mqa_logits",
}
"""Kernels that decode alone launches, once a layer, in a run that counts kernels by name."""
BESIDES = {"idle_us": "GPU idle", "period_us": "from one round to the next", "graph_launch_us": "host in graph launches"}


@cache
def runs(key: str) -> list[tuple[str, dict[Cell, dict[str, list[dict]]]]]:
    """(commit, rows by cell and side) of every run that has `key` of the built-in and of a side of ours, the oldest first.

    Cells are of one rank alone; several as one server are another comparison.
    """
    found = []
    for report in reports("rank").values():
        if release(report) == PRIMARY:
            named = report.get("sides_are", {})
            cells = by_cell(row | {"side": named.get(row["side"], row["side"])} for row in report["rows"] if key in row)
            alone = {cell: sides for cell, sides in cells.items() if cell.parallel == ONE_RANK}
            both = {cell: sides for cell, sides in alone.items() if BUILTIN in sides and len(sides) > 1}
            found.append((report["environment"]["commit"], dict(sorted(both.items(), key=lambda item: order(item[0])))))
    return found


def newest_runs(key: str, side: str) -> dict[Cell, tuple[str, dict[str, list[dict]]]]:
    """By cell, (commit, rows by side) of the run that was put into the result file last of those that have this side."""
    found = {cell: (commit, sides) for commit, cells in runs(key) for cell, sides in cells.items() if side in sides}
    return dict(sorted(found.items(), key=lambda item: order(item[0])))


def newest(key: str, side: str = "ours") -> dict[Cell, dict[str, list[dict]]]:
    """The same without commits."""
    return {cell: sides for cell, (_, sides) in newest_runs(key, side).items()}


def order(cell: Cell) -> tuple[str, bool, int, int, int]:
    """Most drafts first after three, none last; the shortest prompts first."""
    return cell.checkpoint, not cell.steps, abs(cell.steps - 3), cell.length, cell.batch


def spreads(cells: dict[Cell, dict[str, list[dict]]], key: str = "round_ms") -> dict[Cell, dict[str, Spread]]:
    """`key` by cell and side; a round without drafts is a token."""
    return together((row for sides in cells.values() for rows in sides.values() for row in rows), key)


def times(side: str = "ours", key: str = "round_ms") -> dict[Cell, dict[str, Spread]]:
    """The same of the newest run that has this side."""
    return spreads(newest(key, side), key)


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


def over_builtin(checkpoint: str, side: str, key: str = "round_ms") -> dict[Cell, float]:
    """By cell of a rank, `key` over the built-in's in the same run."""
    return {cell: ratio(sides, side) for cell, sides in times(side, key).items() if cell.checkpoint == checkpoint}


def least_prefill(heads: int) -> int:
    """Rows from which on a default server's prefill is sparse_prefill's, on an H200."""
    return least_in_prefill("NVIDIA H200", "bf16", heads)


def first_token(checkpoint: str) -> dict[Cell, float]:
    """By cell, the default's time to the first token over the built-in's; prompts of few rows go without sparse_prefill."""
    least = least_prefill(ranks.RANKS[checkpoint].config["num_attention_heads"])
    few, many = (over_builtin(checkpoint, side[checkpoint], "ttft_ms") for side in (DEFAULTS, WITH_PREFILL))
    return {cell: ratio for cell, ratio in few.items() if cell.batch * cell.length < least} | {
        cell: ratio for cell, ratio in many.items() if cell.batch * cell.length >= least
    }


def at_batches(found: Mapping[Cell, float], checkpoint: str, steps: int, length: int) -> str:
    cells = [Cell(checkpoint, steps, batch, length) for batch in BATCHES]
    return joined([f"{found[cell]:.3f}" if cell in found else "-" for cell in cells])


@PARTS.part
def rank_short() -> str:
    """A row a rank, number of drafts and prompt length: rounds and first tokens of the default over the built-in's."""
    rows = []
    for checkpoint, default in DEFAULTS.items():
        rounds, first = over_builtin(checkpoint, default), first_token(checkpoint)
        for length in (300, 4096):
            told = (at_batches(found, checkpoint, 3, length) for found in (rounds, first))
            rows.append([checkpoint, f"{length} tokens", *told])
    at = f"at {' / '.join(map(str, BATCHES))} requests"
    return table(["rank", "prompts", f"a round of three drafts, {at}", f"first token, {at}"], rows)


@PARTS.part
def first_token_saved() -> str:
    """Percent of the time to the first token that sparse_prefill saves, least to most, at 8 requests."""
    ratios = (value for checkpoint in DEFAULTS for cell, value in first_token(checkpoint).items() if cell.batch == 8)
    return spread((100 * (1 - value) for value in ratios), "{:.0f}") + " %"


@PARTS.part
def rank() -> str:
    """A row a cell: the time of every side over the built-in's, milliseconds of both, and the commit of its newest run."""
    sides = [side for side in SIDES if side not in (BUILTIN, "sparse_prefill")]  # whose rounds are those of fa3
    shown = {side: cells for side in sides if (cells := newest_runs("round_ms", side))}
    rows = []
    for cell in sorted({cell for cells in shown.values() for cell in cells}, key=order):
        told, commits = [], []
        for side, cells in shown.items():
            commit, given = cells.get(cell, ("-", None))
            told.append("-" if given is None else beside(spreads({cell: given})[cell], side))
            commits.append(commit)
        measured = set(commits) - {"-"}
        commits = commits if len(measured) > 1 else [*measured]
        rows.append([cell.checkpoint, str(cell.steps), shape(cell), *told, " / ".join(commits)])
    return table(["rank", "drafts", "requests x tokens", *(SIDES[side] for side in shown), "commit"], rows)


def beside(sides: dict[str, Spread], side: str) -> str:
    """The ratio, with both times in brackets, and their ranges where these are wider than NOISE."""

    def told(t: Spread) -> str:
        wide = t.most - t.least > NOISE * t.median
        return f"{t.median:.2f}, {t.least:.2f} to {t.most:.2f}" if wide else f"{t.median:.2f}"

    return f"{ratio(sides, side):.3f} ({told(sides[side])} / {told(sides[BUILTIN])})"


@PARTS.part
def front_saved() -> str:
    """Percent of a round or token that a layer's front in two launches saves."""
    return saved_by("front")


@PARTS.part
def auto_saved() -> str:
    """Percent that the front and the implementation of fewest microseconds save together."""
    return saved_by("auto")


@PARTS.part
def auto_alone_saved() -> str:
    """Percent that the latter saves without the front."""
    return saved_by("auto_alone")


def saved_by(side: str) -> str:
    saved = [100 * (1 - ratio(sides, side)) for cell, sides in times(side).items() if cell.checkpoint == FIRST_RANK]
    return f"{spread(saved, '{:.0f}')} %"


@PARTS.part
def glm_saved() -> str:
    """Percent of a round that the default saves on a rank of GLM-5.1."""
    (checkpoint,) = set(DEFAULTS) - {FIRST_RANK}
    return spread((100 * (1 - value) for value in over_builtin(checkpoint, DEFAULTS[checkpoint]).values()), "{:.0f}") + " %"


@PARTS.part
def rank_saved() -> str:
    """Percent of a round with drafts."""
    saved = [100 * (1 - ratio(sides)) for cell, sides in times().items() if (cell.checkpoint, cell.steps) == (FIRST_RANK, 3)]
    return f"{spread(saved, '{:.0f}')} %"


@PARTS.part
def topk_share() -> str:
    """Percent of a default server's round with drafts that top-k takes, least to most over batches, at 4096 tokens."""
    rows = [row for report in reports("rank").values() for row in report["rows"] if "parts" in row and row["side"] == "auto"]
    of_rounds = [row for row in rows if row["steps"] and row["length"] == 4096]
    return spread((100 * row["parts"]["top-k"][1] / row["period_us"] for row in of_rounds), "{:.0f}") + " %"


@PARTS.part
def rank_kernels() -> str:
    """Of a round with drafts by part; where kernels were counted by name, of a launch of what decode alone launches."""
    found = {cell: given for cell, given in newest("parts").items() if cell.steps == 3}
    return by_part(found) if found else by_launch()


def by_part(found: dict[Cell, dict[str, list[dict]]]) -> str:
    sides = sides_of(found)

    def line(words: str, of_row: str, part: str | None = None) -> list[str]:
        cells = []
        for given in found.values():
            rows = [given[side][-1] if side in given else None for side in sides]
            us = [None if row is None else row[of_row][part][1] if part else row[of_row] for row in rows]
            cells.append(" / ".join("-" if value is None else f"{value:.0f}" for value in us))
        return [words, *cells]

    of_one_rank = [part for part in (*KERNEL_PARTS, REST) if part not in (ALL_REDUCE, EXCHANGE)]
    rows = [line(part, "parts", part) for part in of_one_rank]
    rows += [line(words, key) for key, words in {"kernel_us": "all kernels", **BESIDES}.items()]
    return table([f"us: {' / '.join(SIDES[side] for side in sides)}", *(f"{c.checkpoint}, {shape(c)}" for c in found)], rows)


def by_launch() -> str:
    rows = []
    for cell, sides in newest("kernels").items():
        if cell.steps == 3:
            counted = [sides[side][-1]["kernels"] for side in ("ours", BUILTIN)]
            means = [" / ".join(f"{k[name][1] / k[name][0]:.1f}" for k in counted) for name in LAYER_KERNELS.values()]
            rows.append([shape(cell), *means])
    return table(["us a launch, requests x tokens", *LAYER_KERNELS], rows)


def lost_by_ranks() -> list[list[str]]:
    """A row a rank, side and time that is behind the built-in's of the same run anywhere."""
    rows = []
    for side, (key, behind) in product([side for side in SIDES if side != BUILTIN], TIMES.items()):
        lost: dict[str, list[str]] = {}
        for cell, sides in times(side, key).items():
            if ratio(sides, side) >= 1 + NOISE:
                drafts = f", {cell.steps} drafts" if cell.steps else ""
                lost.setdefault(cell.checkpoint, []).append(f"{shape(cell)}{drafts} ({ratio(sides, side):.3f})")
        for checkpoint, cells in lost.items():
            name = f"rank {checkpoint}" + (f", {SIDES[side]}" if side != "ours" else "")
            rows.append([name, f"{behind} than built-in", "; ".join(cells)])
    return rows
