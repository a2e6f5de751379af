"""Ranks of released models: rounds and tokens of every side, and where the GPU's time goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import product

from result_files import PRIMARY, Parts, release, reports, result, spread, table

from nsa_backend.attention.auto import least_in_prefill
from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.reports.parts import ALL_REDUCE, EXCHANGE, REST
from nsa_backend.benchmarks.reports.parts import PARTS as KERNEL_PARTS
from nsa_backend.benchmarks.reports.rank_rows import (
    ONE_RANK,
    Cell,
    Spread,
    by_cell,
    over_tensor_parallel,
    title_of,
    together,
    undivided,
)
from nsa_backend.benchmarks.servers.parallel import Parallel
from nsa_backend.benchmarks.servers.server import BF16

PARTS = Parts()
FIRST_RANK = "v3.2-tp8"
FP8_RANK = title_of(FIRST_RANK, ONE_RANK, "fp8_e4m3")
BUILTIN = "builtin"
SIDES = {
    "ours": "without front",
    "front": "with front",
    "verify": "rows together",
    "front_verify": "both",
    "auto_alone": "auto, without front",
    "auto": "front and auto",
    "default": "default",
    "sparse_verify": "sparse_verify",
    "sparse_prefill": "sparse_prefill",
    "any_length": "without short graphs",
    "short_prefills": "short prefills in one graph",
    BUILTIN: "built-in",
}
"""Sides in the order of columns. `front` launches a layer's front twice, as is the default where it can; `ours` does not.
`verify` reads for all rows of a request together. A report in which a side is another than it is called says `sides_are`."""
GLM_RANK = "glm-5.1-tp8"
MODELS = {FIRST_RANK: "DeepSeek-V3.2", FP8_RANK: "DeepSeek-V3.2, FP8 KV", GLM_RANK: "GLM-5.1"}
"""What the README calls them."""
DEFAULTS = {FIRST_RANK: ("auto", "default"), FP8_RANK: ("auto", "default"), GLM_RANK: ("auto_alone", "default")}
"""Rank and KV cache to the sides that an H200's default was, a later one in place of an earlier one."""
WITH_PREFILL = {
    FIRST_RANK: ("sparse_prefill", "default"), FP8_RANK: ("sparse_prefill", "default"), GLM_RANK: ("auto_alone", "default"),
}  # fmt: skip
"""The same to the sides whose prefill is sparse_prefill's, as the default's is since."""
TIMES = {"round_ms": "longer", "ttft_ms": "first token later"}
CONTEXT_FILE, DIVIDED = "rank_v32_tp8_0_5_23_h100", str(Parallel(dcp=2))
BATCHES, LENGTHS = (1, 8, 32, 64, 128), (300, 4096)
NOISE = 0.005
"""What is lost by less is in the result files alone, and so are narrower ranges."""


@cache
def runs(key: str) -> list[dict[Cell, dict[str, list[dict]]]]:
    """Rows by cell and side of every run that has `key` of the built-in and of a side of ours, the oldest first.

    Cells are of one rank alone; several as one server are another comparison.
    """
    found = []
    for report in reports("rank").values():
        if release(report) == PRIMARY:
            cells = cells_of(report, key)
            alone = {cell: sides for cell, sides in cells.items() if cell.parallel == ONE_RANK}
            both = {cell: sides for cell, sides in alone.items() if BUILTIN in sides and len(sides) > 1}
            found.append(both)
    return found


def cells_of(report: dict, key: str) -> dict[Cell, dict[str, list[dict]]]:
    """Rows that have `key`, by cell and by what the report says that their sides are."""
    named = report.get("sides_are", {})
    return by_cell(row | {"side": named.get(row["side"], row["side"])} for row in report["rows"] if key in row)


def newest(key: str, side: str = "ours") -> dict[Cell, dict[str, list[dict]]]:
    """By cell, rows by side of the run that was put into the result file last of those that have this side."""
    found = {cell: sides for cells in runs(key) for cell, sides in cells.items() if side in sides}
    return dict(sorted(found.items(), key=lambda item: order(item[0])))


def order(cell: Cell) -> tuple[str, bool, int, int, int]:
    """Most drafts first after three, none last; the shortest prompts first."""
    return cell.name, not cell.steps, abs(cell.steps - 3), cell.length, cell.batch


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
    """Without those behind the last that was measured."""
    while of_batches[1:] and of_batches[-1] == "-":
        of_batches = of_batches[:-1]
    return " / ".join(of_batches)


def of_sides(sides: Iterable[str], key: str = "round_ms") -> dict[Cell, tuple[dict[str, Spread], str]]:
    """By cell, `key` of the last of `sides` that has it: by side in that run, and which it is."""
    return {cell: (found, side) for side in sides for cell, found in times(side, key).items()}


def of_rank(name: str, sides: Iterable[str], key: str = "round_ms") -> dict[Cell, tuple[dict[str, Spread], str]]:
    """The same of the cells of one rank and KV cache."""
    return {cell: found for cell, found in of_sides(sides, key).items() if cell.name == name}


def over_builtin(name: str, sides: Iterable[str], drafts: bool | None = True) -> list[float]:
    """Rounds, tokens without drafts or, if None, both of the last of `sides` that has them over the built-in's in that run."""
    return [ratio(*found) for cell, found in of_rank(name, sides).items() if drafts in (None, bool(cell.steps))]


def least_prefill(kv: str, heads: int) -> int:
    """Rows from which on a default server's prefill is sparse_prefill's, on an H200."""
    return least_in_prefill("NVIDIA H200", kv, heads)


def first_token(name: str) -> dict[Cell, tuple[dict[str, Spread], str]]:
    """By cell, the default's time to the first token beside the built-in's; prompts of few rows go without sparse_prefill."""

    def together(cell: Cell) -> bool:
        heads = ranks.named(cell.checkpoint).config["num_attention_heads"]
        return cell.batch * cell.length >= least_prefill("bf16" if cell.kv == BF16 else "fp8", heads)

    few, many = (of_rank(name, sides[name], "ttft_ms") for sides in (DEFAULTS, WITH_PREFILL))
    return {cell: found for cell, found in few.items() if not together(cell)} | {
        cell: found for cell, found in many.items() if together(cell)
    }


def alike(sides: dict[str, Spread], side: str) -> bool:
    """Whether the range of what was measured of a side meets the built-in's."""
    return sides[side].least <= sides[BUILTIN].most and sides[BUILTIN].least <= sides[side].most


def at_batches(found: Mapping[Cell, tuple[dict[str, Spread], str]], steps: int, length: int) -> str:
    """Of one rank and KV cache: a ratio a batch, or ~ where both sides are alike."""
    told = {
        cell.batch: "~" if alike(*given) else f"{ratio(*given):.3f}"
        for cell, given in found.items()
        if (cell.steps, cell.length) == (steps, length)
    }
    return joined([told.get(batch, "-") for batch in BATCHES])


@PARTS.part
def rank_short() -> str:
    """A row a rank: rounds of three drafts and first tokens of the default over the built-in's, by prompt length."""
    rows = []
    for name, sides in DEFAULTS.items():
        times = (of_rank(name, sides), first_token(name))
        rows.append([MODELS[name], *(at_batches(found, 3, length) for found in times for length in LENGTHS)])
    columns = (f"{what}, {length} tokens" for what in ("round", "first token") for length in LENGTHS)
    return table(["a rank of", *columns], rows)


@PARTS.part
def first_token_saved() -> str:
    """Percent of the time to the first token that sparse_prefill saves, least to most, at 8 requests on bfloat16 KV."""
    of_both = {cell: found for name in (FIRST_RANK, GLM_RANK) for cell, found in first_token(name).items()}
    return percent(ratio(*found) for cell, found in of_both.items() if cell.batch == 8 and cell.steps)


@PARTS.part
def first_token_saved_fp8() -> str:
    """The same at all batches on FP8 KV."""
    return percent(ratio(*found) for found in first_token(FP8_RANK).values())


def percent(ratios: Iterable[float]) -> str:
    """Saved by ratios, least to most."""
    return spread((100 * (1 - ratio) for ratio in ratios), "{:.0f}") + " %"


@PARTS.part
def rank() -> str:
    """A row a cell: the time of the newest run over the built-in's, and milliseconds of the row's last side."""
    columns = {"ours": ("ours",), "default": DEFAULTS[FIRST_RANK]}
    shown = {side: cells for side, sides in columns.items() if (cells := of_sides(sides))}
    rows = []
    for cell in sorted({cell for cells in shown.values() for cell in cells}, key=order):
        last = [side for side, cells in shown.items() if cell in cells][-1]
        told = [
            "-" if cell not in cells else beside(*cells[cell]) if side == last else f"{ratio(*cells[cell]):.3f}"
            for side, cells in shown.items()
        ]
        rows.append([cell.name, str(cell.steps), shape(cell), *told])
    return table(["rank", "drafts", "requests x tokens", *(SIDES[side] for side in shown)], rows)


def beside(sides: dict[str, Spread], side: str) -> str:
    """The ratio, with both times in brackets, and their ranges where these are wider than NOISE."""

    def told(t: Spread) -> str:
        wide = t.most - t.least > NOISE * t.median
        return f"{t.median:.2f}, {t.least:.2f} to {t.most:.2f}" if wide else f"{t.median:.2f}"

    return f"{ratio(sides, side):.3f} ({told(sides[side])} / {told(sides[BUILTIN])})"


@PARTS.part
def front_saved() -> str:
    """Percent of a round or token that a layer's front in two launches saves."""
    return percent(over_builtin(FIRST_RANK, ("front",), drafts=None))


@PARTS.part
def auto_saved() -> str:
    """Percent of a round that a default server saves."""
    return percent(over_builtin(FIRST_RANK, DEFAULTS[FIRST_RANK]))


@PARTS.part
def token_saved() -> str:
    """The same of a token without drafts."""
    return percent(over_builtin(FIRST_RANK, ("default",), drafts=False))


@PARTS.part
def glm_saved() -> str:
    """Percent of a round that the default saves on a rank of GLM-5.1."""
    return percent(over_builtin(GLM_RANK, DEFAULTS[GLM_RANK]))


@PARTS.part
def fp8_saved() -> str:
    """The same on a rank of DeepSeek-V3.2 with FP8 KV."""
    return percent(over_builtin(FP8_RANK, DEFAULTS[FP8_RANK]))


@PARTS.part
def fp8_over_bf16() -> str:
    """A default server's round on FP8 KV over one on bfloat16 KV, least to most: other runs, the same rank and shapes.

    Of bfloat16 those before values in one launch, rounds of short requests and scales of powers of two, which FP8's lack.
    """
    whole = {cell: sides[side].median for cell, (sides, side) in of_sides(("auto",)).items() if cell.kv == BF16}
    of_fp8 = of_rank(FP8_RANK, DEFAULTS[FP8_RANK]).items()
    both = ((sides[side].median, whole.get(cell._replace(kv=BF16))) for cell, (sides, side) in of_fp8)
    return spread(fp8 / bf16 for fp8, bf16 in both if bf16 is not None)


@PARTS.part
def topk_share() -> str:
    """Percent of a default server's round with drafts that top-k takes, least to most over batches, at 4096 tokens."""
    rows = [row for report in reports("rank").values() for row in report["rows"] if "parts" in row and row["side"] == "auto"]
    of_rounds = [row for row in rows if row["steps"] and row["length"] == 4096]
    return spread((100 * row["parts"]["top-k"][1] / row["period_us"] for row in of_rounds), "{:.0f}") + " %"


@PARTS.part
def rank_kernels() -> str:
    """Microseconds of a default server's round with three drafts by part, of the newest run of each shape."""
    found = {}
    for report in reports("rank").values():
        if release(report) == PRIMARY:
            for cell, sides in cells_of(report, "parts").items():
                of_default = [row for side in DEFAULTS[FIRST_RANK] for row in sides.get(side, ())]
                if of_default and (cell.name, cell.steps) == (FIRST_RANK, 3):
                    found[cell] = of_default[-1]
    cells = sorted(found, key=order)
    of_one_rank = [part for part in (*KERNEL_PARTS, REST) if part not in (ALL_REDUCE, EXCHANGE)]
    told = {part: [found[cell]["parts"][part][1] for cell in cells] for part in of_one_rank}
    told["from one round to the next"] = [found[cell]["period_us"] for cell in cells]
    rows = [[words, *(f"{us:.0f}" for us in values)] for words, values in told.items() if any(values)]
    return table(["us", *map(shape, cells)], rows)


def context_reports() -> tuple[dict, dict]:
    """Ranks that divide the KV: before our front, one graph and captured prefills served them, and since."""
    return tuple(result(CONTEXT_FILE, f"decode_context_parallel{when}") for when in ("_before", ""))


@PARTS.part
def context_ranks() -> str:
    """A row a cell: ours on ranks that divide the KV over ours on as many that do not, each pair of one run."""

    def told(found: dict[Cell, dict[str, Spread]], cell: Cell) -> str:
        ratio = over_tensor_parallel(found, cell, "ours")
        both = (found[of]["ours"].median for of in (cell, undivided(cell)))
        return f"{ratio:.3f} ({' / '.join(f'{ms:.2f}' for ms in both)})"

    before, after = (spreads(cells_of(report, "round_ms")) for report in context_reports())
    first = spreads(cells_of(context_reports()[1], "ttft_ms"), "ttft_ms")
    rows = []
    for cell in sorted((cell for cell in before if cell.parallel == DIVIDED), key=order):
        rounds = [told(found, cell) if cell in found else "-" for found in (after, before)]
        firsts = [first[of]["ours"].median for of in (cell, undivided(cell)) if of in first]
        rows.append([shape(cell), *rounds, " / ".join(f"{ms:.0f}" for ms in firsts) or "-"])
    return table(["requests x tokens", "round", "round without these", "first token, ms"], rows)


@PARTS.part
def context_eager() -> str:
    """Milliseconds to a first token without captured prefills, and with them."""
    found = [spreads(cells_of(report, "ttft_ms"), "ttft_ms") for report in context_reports()]
    cell = next(cell for cell in found[1] if (cell.parallel, cell.batch, cell.length) == (DIVIDED, 1, 300))
    before, after = (f"{cells[cell]['ours'].median:.0f}" for cells in found)
    return f"{before} instead of {after}"


@PARTS.part
def context_pool() -> str:
    """Tokens that the pools of both hold."""
    pools = {row["parallel"]: row["pool_tokens"] for row in context_reports()[1]["rows"] if "pool_tokens" in row}
    whole, divided = (pools[word] for word in (str(Parallel(tp=2)), DIVIDED))
    return f"{divided} tokens where {whole} fitted, {divided / whole:.2f} times"


@PARTS.part
def context_exchange() -> str:
    """Microseconds a layer of what ranks that divide the KV exchange, least to most over shapes."""
    rows = [row for row in context_reports()[1]["rows"] if row["parallel"] == DIVIDED and "parts" in row]
    return spread((row["exchange_a_layer"][1] for row in rows), "{:.0f}")


@PARTS.part
def prompt_idle() -> str:
    """Percent of the time before the first round in which a GPU of tensor parallel 2 idles: one request of 300 tokens."""
    rows = [row for row in context_reports()[1]["rows"] if "before_rounds" in row and row["parallel"] != DIVIDED]
    (found,) = (row["before_rounds"] for row in rows if (row["batch"], row["length"]) == (1, 300))
    return f"{100 * found['idle_us'] / found['period_us']:.0f} %"


def lost_by_ranks() -> list[list[str]]:
    """A row a rank, side and time that is behind the built-in's of the same run anywhere: the sides of `rank`."""
    default = {name: {"round_ms": of_rank(name, sides), "ttft_ms": first_token(name)} for name, sides in DEFAULTS.items()}
    rows = []
    for (name, of_default), side in product(default.items(), ("default", "ours")):
        for key, behind in TIMES.items():
            found = of_default[key] if side == "default" else of_rank(name, [side], key)
            cells = [
                f"{shape(cell)}{f', {cell.steps} drafts' if cell.steps else ''} ({ratio(*given):.3f})"
                for cell, given in found.items()
                if ratio(*given) >= 1 + NOISE
            ]
            if cells:
                rows.append([f"rank {name}, {SIDES[side]}", f"{behind} than built-in", "; ".join(cells)])
    return rows
