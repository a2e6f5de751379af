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
from nsa_backend.benchmarks.reports.rank_rows import ONE_RANK, Cell, Spread, by_cell, shape_of, title_of, together
from nsa_backend.benchmarks.servers.server import BF16
from nsa_backend.kernels.plan import PAGE_SIZE

PARTS = Parts()
GPU = "NVIDIA H200"
"""What pages are about, as auto's table calls it."""
FIRST_RANK = "v3.2-tp8"
FP8_RANK = title_of(FIRST_RANK, ONE_RANK, "fp8_e4m3")
BUILTIN = "builtin"
IN_PIECES = "pieces"
"""The side whose prefills of few tokens are not one graph, as the default's are."""
FEW_TOKENS = 300
"""Of a prompt in tables of all ranks. Rounds of fewer take as long, and first tokens have a table of their own."""
MANY_TOKENS = 4096
"""The same at most: longer prompts are told in a sentence."""
LEFT_TO_A_SENTENCE = (2, 4, 16, 64)
"""Requests of which tables of all ranks do not tell."""
DP_RANK, GLM_RANK, GLM_52_RANK = "v3.2-dp8", "glm-5.1-tp8", "glm-5.2-tp8"
FP8_GLM_RANK = title_of(GLM_RANK, ONE_RANK, "fp8_e4m3")
MODELS = {
    FIRST_RANK: "DeepSeek-V3.2", FP8_RANK: "DeepSeek-V3.2, FP8 KV", DP_RANK: "DeepSeek-V3.2, DP attention",
    GLM_RANK: "GLM-5.1", FP8_GLM_RANK: "GLM-5.1, FP8 KV", GLM_52_RANK: "GLM-5.2",
}  # fmt: skip
"""What pages call them."""
IN_README = (FIRST_RANK, FP8_RANK, GLM_RANK, FP8_GLM_RANK, GLM_52_RANK)
DEFAULTS = {
    FIRST_RANK: ("auto", "default"), FP8_RANK: ("auto", "default"), DP_RANK: ("default",), GLM_RANK: ("auto_alone", "default"),
    FP8_GLM_RANK: ("default",), GLM_52_RANK: ("default",),
}  # fmt: skip
"""Rank and KV cache to the sides that an H200's default was, a later one in place of an earlier one.

A report in which a side is another than it is called says `sides_are`.
"""
WITH_PREFILL = DEFAULTS | dict.fromkeys((FIRST_RANK, FP8_RANK), ("sparse_prefill", "default"))
"""The same to the sides whose prefill is sparse_prefill's, as the default's is since."""
LOST_BY = {"default": "default", "ours": "fa3, NSA_BACKEND_LAYER_FRONT=0"}
"""Sides whose losses are told."""
CALLED = {"logits": "index scores"}
"""Parts that pages call otherwise than result files."""
TIMES = {"round_ms": "longer rounds or tokens", "ttft_ms": "first token later"}
FIRST_FILE, GLM_FILE, GLM_52_FILE = "rank_v32_tp8_0_5_23", "rank_glm51_tp8_0_5_23", "rank_glm52_tp8_0_5_23"
"""Of the first rank, and of GLM-5.1's and GLM-5.2's."""
WHOLE = "DeepSeek-V3.2 on eight H200s"
"""All ranks as one server, in the report `eight_gpus`."""
VLLM = "vllm"
"""The side, and how its reports are called."""
FILES = {FIRST_RANK: FIRST_FILE, GLM_RANK: GLM_FILE, GLM_52_RANK: GLM_52_FILE}
"""Of the ranks that vLLM ran."""
LONG_PROMPTS = {
    FIRST_RANK: ("copies_left_out", "second_product", "weights_come_early", "tokens_to_32768", "newest_front"),
    GLM_RANK: ("five_drafts", "both_products", "weights_come_early", "newest_front"),
}
"""Ranks to the reports of the newest first tokens after long prompts, a later one in place of an earlier one."""
STEADY = 0.15
"""Of a median, the widest range of a cell of vLLM's that is told: it compiles kernels for shapes as it meets them."""
STEPS = (3, 0)
"""Numbers of drafts that tables of all ranks have."""
OF_ROUNDS, OF_FIRST_TOKENS = "{:.3f} ({:.2f} / {:.2f})", "{:.2f} ({:.0f} / {:.0f})"
"""How tables tell a ratio and the milliseconds of both sides."""
OF_RANKS, OF_RANKS_FIRST = "{:.3f} ({:.2f})", "{:.2f} ({:.0f})"
"""The same of tables of all ranks, with ours alone."""
IN_COLUMNS = (1, 8, 32, 128)
"""Requests of which the README tells."""
NOISE = 0.005
"""What is lost by less is in the result files alone."""


@cache
def runs(key: str) -> list[dict[Cell, dict[str, list[dict]]]]:
    """Rows by cell and side of every run that has `key` of the built-in and of a side of ours, the oldest first.

    Cells are of one rank alone with nothing cached; several as one server, and turns of chats, are other comparisons.
    """
    found = []
    for report in reports("rank").values():
        if release(report) == PRIMARY:
            cells = cells_of(report, key)
            alone = {cell: sides for cell, sides in cells.items() if cell.parallel == ONE_RANK and not cell.cached}
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


def shape(cell: Cell) -> str:
    return f"{cell.batch} x {cell.length}"


def with_drafts(cell: Cell) -> str:
    """Its shape, and how many drafts where there are some."""
    return f"{shape(cell)}{f', {cell.steps} drafts' if cell.steps else ''}"


def of_sides(sides: Iterable[str], key: str = "round_ms") -> dict[Cell, tuple[dict[str, Spread], str]]:
    """By cell, `key` of the last of `sides` that has it: by side in that run, and which it is."""
    return {cell: (found, side) for side in sides for cell, found in times(side, key).items()}


def of_rank(name: str, sides: Iterable[str], key: str = "round_ms") -> dict[Cell, tuple[dict[str, Spread], str]]:
    """The same of the cells of one rank and KV cache."""
    return {cell: found for cell, found in of_sides(sides, key).items() if cell.name == name}


def over_builtin(name: str, sides: Iterable[str], drafts: bool = True, more_than: int = 0) -> list[float]:
    """Rounds, or tokens without drafts, of the last of `sides` that has them over the built-in's in that run.

    Cells are those of more than so many requests.
    """
    found = of_rank(name, sides)
    return [ratio(*given) for cell, given in found.items() if drafts == bool(cell.steps) and cell.batch > more_than]


def first_token(name: str) -> dict[Cell, tuple[dict[str, Spread], str]]:
    """By cell, the default's time to the first token beside the built-in's; prompts of few rows go without sparse_prefill."""

    def together(cell: Cell) -> bool:
        heads = ranks.named(cell.checkpoint).config["num_attention_heads"]
        least = least_in_prefill(GPU, "bf16" if cell.kv == BF16 else "fp8", heads)
        return least is not None and cell.batch * cell.length >= least

    few, many = (of_rank(name, sides[name], "ttft_ms") for sides in (DEFAULTS, WITH_PREFILL))
    return {cell: found for cell, found in few.items() if not together(cell)} | {
        cell: found for cell, found in many.items() if together(cell)
    }


def alike(sides: dict[str, Spread], side: str) -> bool:
    """Whether the range of what was measured of a side meets the built-in's."""
    return sides[side].least <= sides[BUILTIN].most and sides[BUILTIN].least <= sides[side].most


@PARTS.part
def rank_rounds() -> str:
    """A row a deployment: percent of a round of three drafts, after prompts of 300 tokens, that the default saves."""

    def saved(given: tuple[dict[str, Spread], str] | None) -> str:
        return "-" if given is None else f"{mark(*given)}{round(100 * (1 - ratio(*given)))} %"

    of_all = {WHOLE: {cell: (sides, "default") for cell, sides in of_eight("round_ms").items()}}
    of_all |= {f"a rank of {MODELS[name]}": of_rank(name, DEFAULTS[name]) for name in IN_README}
    rows = []
    for words, found in of_all.items():
        by_batch = {cell.batch: given for cell, given in found.items() if (cell.steps, cell.length) == (3, FEW_TOKENS)}
        rows.append([words, *(saved(by_batch.get(n)) for n in IN_COLUMNS)])
    return table(["requests", *map(str, IN_COLUMNS)], rows)


def of_eight(key: str) -> dict[Cell, dict[str, Spread]]:
    """`key` by cell and side of all eight ranks of DeepSeek-V3.2 as one server, in the order of tables."""
    found = spreads(cells_of(result(FIRST_FILE, "eight_gpus"), key), key)
    return dict(sorted(found.items(), key=lambda item: order(item[0])))


@PARTS.part
def eight_gpus() -> str:
    """A row a cell of these: ours over the built-in's, in brackets milliseconds of both."""
    rounds, first = map(of_eight, TIMES)
    rows = [
        [shape(cell), mark(sides, "default") + beside(sides, "default", OF_ROUNDS),
         mark(first[cell], "default") + beside(first[cell], "default", OF_FIRST_TOKENS)]
        for cell, sides in rounds.items()
    ]  # fmt: skip
    return table(["requests x tokens", "round", "first token"], rows)


@PARTS.part
def eight_first_saved() -> str:
    """Percent of the time to the first token that ours saves there, least to most, where sides are not alike."""
    return percent(ratio(sides, "default") for sides in of_eight("ttft_ms").values() if not alike(sides, "default"))


def mark(sides: dict[str, Spread], side: str) -> str:
    """~ before what is told of sides that are alike."""
    return "~" if alike(sides, side) else ""


@PARTS.part
def rank() -> str:
    """Rounds of three drafts of the default."""
    return by_shape(of_ranks(drafts=True), OF_RANKS)


@PARTS.part
def rank_tokens() -> str:
    """Tokens without drafts of the default."""
    return by_shape(of_ranks(drafts=False), OF_RANKS)


def of_ranks(drafts: bool) -> dict[str, dict[Cell, tuple[dict[str, Spread], str]]]:
    """The default's rounds or tokens by rank and cell, of ranks that have some."""
    found = {
        name: {cell: given for cell, given in of_rank(name, sides).items() if bool(cell.steps) == drafts}
        for name, sides in DEFAULTS.items()
    }
    return {name: cells for name, cells in found.items() if cells}


@PARTS.part
def long_requests() -> str:
    """By number of requests of longer prompts, rounds of three drafts of the default on the first rank."""
    found = of_rank(FIRST_RANK, DEFAULTS[FIRST_RANK])
    longer = {
        cell: f"{ratio(*given):.3f}" for cell, given in found.items() if cell.steps == STEPS[0] and cell.length > MANY_TOKENS
    }
    return "; ".join(
        f"{' / '.join(map(str, told))} tokens {' / '.join(told.values())} of {batch}"
        for batch, told in by_requests(longer).items()
    )


def by_requests(told: Mapping[Cell, str]) -> dict[int, dict[int, str]]:
    """What is told of cells by their requests, then tokens, the fewest first."""
    found: dict[int, dict[int, str]] = {}
    for cell in sorted(told, key=lambda one: (one.batch, one.length)):
        found.setdefault(cell.batch, {})[cell.length] = told[cell]
    return found


@PARTS.part
def two_four_or_more() -> str:
    """The default's rounds and tokens over the built-in's with so many requests, on all ranks, least to most."""
    found = [(cell, ratio(*given)) for name, sides in DEFAULTS.items() for cell, given in of_rank(name, sides).items()]
    rounds, tokens = (
        spread(over for cell, over in found if cell.batch in LEFT_TO_A_SENTENCE and bool(cell.steps) == drafts)
        for drafts in (True, False)
    )
    return f"rounds {rounds}, tokens {tokens}"


@PARTS.part
def divided_indexer() -> str:
    """First tokens of one request by its tokens, where two of the first rank are one server."""
    found = of_two_ranks()
    return f"{' / '.join(f'{over:.2f}' for over in found.values())} at {' / '.join(map(str, found))} tokens"


def of_two_ranks() -> dict[int, float]:
    """The default's first token over the built-in's there, by tokens."""
    found = spreads(cells_of(result(FIRST_FILE, "divided_indexer"), "ttft_ms"), "ttft_ms")
    return {cell.length: ratio(sides, "default") for cell, sides in sorted(found.items())}


@PARTS.part
def beside_experts_fused() -> str:
    """Percent that the default's rounds save of those of the built-in with that option, least to most."""
    fused = spreads(cells_of(result(FIRST_FILE, "sglang_experts_fused"), "round_ms"))
    apart = of_rank(FIRST_RANK, DEFAULTS[FIRST_RANK])
    return percent(apart[cell][0]["default"].median / sides["sglang_experts_fused"].median for cell, sides in fused.items())


MOST_IN_ONE_LAUNCH = 32
"""Requests of the rank of DP attention up to which experts are one launch: more have more rows an expert than tiles have."""


def under_dp_attention() -> list[float]:
    """Rounds with experts in one launch over the built-in's."""
    cells = spreads(newest("round_ms", "more experts"))
    return [ratio(sides, "more experts") for cell, sides in cells.items() if cell.batch <= MOST_IN_ONE_LAUNCH]


@PARTS.part
def experts_under_dp_attention() -> str:
    """The same, least to most."""
    return spread(under_dp_attention())


@PARTS.part
def dp_saved() -> str:
    """Percent of a round that a server of that rank saves, with experts in one launch where it has them now."""
    others = over_builtin(DP_RANK, ("default",), more_than=MOST_IN_ONE_LAUNCH)
    return percent([*under_dp_attention(), *others])


@PARTS.part
def one_draft() -> str:
    """The default's rounds of one draft over the built-in's, on the first rank, least to most."""
    return of_drafts(FIRST_RANK, 1)


@PARTS.part
def glm_one_draft() -> str:
    """The same on GLM-5.1's rank."""
    return of_drafts(GLM_RANK, 1)


@PARTS.part
def dp_one_draft() -> str:
    """The same under DP attention."""
    return of_drafts(DP_RANK, 1)


@PARTS.part
def five_drafts() -> str:
    """The same of five on the first rank."""
    return of_drafts(FIRST_RANK, 5)


@PARTS.part
def glm_five_drafts() -> str:
    """The same of five on GLM-5.1's rank."""
    return of_drafts(GLM_RANK, 5)


def of_drafts(name: str, steps: int) -> str:
    return spread(ratio(*given) for cell, given in of_rank(name, DEFAULTS[name]).items() if cell.steps == steps)


def beside_vllm(name: str) -> dict[Cell, dict[str, tuple[float, float]]]:
    """By cell of vLLM's and quantity: medians of the default on this rank, and of vLLM's last run that did not wander.

    First tokens of a run whose report says `busy_host` are left out: vLLM's wait for the host.
    """
    of_vllm = [one for path, one in reports("rank").items() if path.startswith(f"{FILES[name]}/{VLLM}")]
    ours = {"round_ms": of_rank(name, DEFAULTS[name]), "ttft_ms": first_token(name)}
    found: dict[Cell, dict[str, tuple[float, float]]] = {}
    for (key, of_default), report in product(ours.items(), of_vllm):
        if key == "ttft_ms" and report.get("busy_host"):
            continue
        for cell, sides in spreads(cells_of(report, key), key).items():
            times, (given, side) = sides[VLLM], of_default.get(cell, ({}, ""))
            if given and times.most - times.least <= STEADY * times.median:
                found.setdefault(cell, {})[key] = given[side].median, times.median
    return dict(sorted(found.items(), key=lambda item: order(item[0])))


@PARTS.part
def vllm() -> str:
    """DeepSeek-V3.2's rank beside vLLM."""
    return table_of_vllm(FIRST_RANK)


@PARTS.part
def vllm_of_glm() -> str:
    """GLM-5.1's rank beside vLLM."""
    return table_of_vllm(GLM_RANK)


@PARTS.part
def vllm_of_glm_52() -> str:
    """GLM-5.2's rank beside vLLM."""
    return table_of_vllm(GLM_52_RANK)


def table_of_vllm(name: str) -> str:
    """A row a batch: the default's rounds, tokens and first tokens over vLLM's, in brackets milliseconds of both.

    What no batch has is no column.
    """

    def told(pair: tuple[float, float] | None, form: str) -> str:
        return form.format(pair[0] / pair[1], *pair) if pair else "-"

    rows: dict[str, list[str]] = {}
    for cell, of in beside_vllm(name).items():
        at = 2 * STEPS.index(cell.steps)
        row = rows.setdefault(shape(cell), ["-"] * 2 * len(STEPS))
        row[at : at + 2] = told(of.get("round_ms"), OF_ROUNDS), told(of.get("ttft_ms"), OF_FIRST_TOKENS)
    columns = ["requests x tokens", "round", "its first token", "token without drafts", "its first token"]
    kept = [0, *(1 + at for at in range(2 * len(STEPS)) if any(row[at] != "-" for row in rows.values()))]
    return table([columns[at] for at in kept], [[[of, *row][at] for at in kept] for of, row in rows.items()])


def lost_to_vllm() -> list[list[str]]:
    """A row of the cells in which vLLM is ahead."""
    rows = []
    for (key, behind), name in product(TIMES.items(), FILES):
        ratios = {cell: of[key][0] / of[key][1] for cell, of in beside_vllm(name).items() if key in of}
        told = [f"{with_drafts(cell)} ({one:.3f})" for cell, one in ratios.items() if one >= 1 + NOISE]
        if told:
            rows.append([f"a rank of {MODELS[name]}, [beside vLLM](vllm.md)", behind, "; ".join(told)])
    return rows


@PARTS.part
def all_sizes() -> str:
    """What captures of all kinds of rounds took on the first rank, with its start beside the built-in's, and on GLM-5.1's."""
    builtin, ours = result(FIRST_FILE, "captures_beside_sglang")["rows"]
    sizes = max(one["sizes"] for one in ours["captures"] if one["what"].startswith("whole rounds"))
    rounds = f"{ours['rounds_s']:.1f} s and {ours['rounds_gib']:.2f} GiB for {sizes} batch sizes"
    of_glm = next(row["captures"] for row in result(GLM_FILE, "five_drafts")["rows"] if row["side"] != BUILTIN)
    of_rounds = [one for one in of_glm if one["what"].startswith("whole rounds")]
    glm = f"{sum(one['seconds'] for one in of_rounds):.1f} s and {sum(one['gib'] for one in of_rounds):.2f} GiB"
    start = f"and the start {ours['ready_s']:.0f} s instead of {builtin['ready_s']:.0f}"
    return f"{rounds}, {start}. GLM-5.1's took {glm} for {of_rounds[0]['sizes']}"


def long_prompts(name: str, least: int = MANY_TOKENS) -> dict[Cell, dict[str, Spread]]:
    """A rank's first tokens after so many tokens or more, with most of what prefills have of ours, whatever its drafts."""
    found: dict[tuple[int, int], tuple[Cell, dict[str, Spread]]] = {}
    for one in LONG_PROMPTS[name]:
        of_report = spreads(cells_of(result(FILES[name], one), "ttft_ms"), "ttft_ms")
        found |= {(cell.batch, cell.length): (cell, sides) for cell, sides in of_report.items()}
    return {cell: sides for cell, sides in found.values() if cell.length >= least}


@PARTS.part
def long_prompts_saved() -> str:
    """Percent of these, and of those of two ranks as one server, that the default saves, least to most."""
    of_one = [ratio(sides, "default") for name in LONG_PROMPTS for sides in long_prompts(name).values()]
    return percent([*of_one, *of_two_ranks().values()])


@PARTS.part
def longer_first_tokens() -> str:
    """The first rank's by number of requests."""
    return first_of_long(FIRST_RANK)


@PARTS.part
def glm_first_tokens() -> str:
    """GLM-5.1's by number of requests."""
    return first_of_long(GLM_RANK)


def first_of_long(name: str) -> str:
    told = {cell: f"{ratio(sides, 'default'):.2f}" for cell, sides in long_prompts(name).items()}
    return ", ".join(f"{' / '.join(by_length.values())} of {batch}" for batch, by_length in by_requests(told).items())


@PARTS.part
def first_tokens() -> str:
    """Times to the first token of the default, with three drafts."""
    return by_shape(first_with_drafts(), OF_RANKS_FIRST)


def first_with_drafts() -> dict[str, dict[Cell, tuple[dict[str, Spread], str]]]:
    """Of every rank and KV cache what `first_token` gives with drafts."""
    return {name: {cell: found for cell, found in first_token(name).items() if cell.steps} for name in DEFAULTS}


def beside(sides: dict[str, Spread], side: str, form: str) -> str:
    """`form` of the ratio of a side to the built-in's, and of both sides' milliseconds."""
    return form.format(ratio(sides, side), sides[side].median, sides[BUILTIN].median)


def by_shape(by_rank: Mapping[str, Mapping[Cell, tuple[dict[str, Spread], str]]], form: str) -> str:
    """A row a shape, a column a rank, as `beside` tells them, of one number of drafts."""
    columns: dict[str, dict[tuple[int, int], str]] = {}
    for name, found in by_rank.items():
        for cell, (sides, side) in ((cell, given) for cell, given in found.items() if cell.steps in STEPS):
            columns.setdefault(MODELS[name], {})[cell.length, cell.batch] = mark(sides, side) + beside(sides, side, form)
    told = {at for column in columns.values() for at in column if FEW_TOKENS <= at[0] <= MANY_TOKENS}
    shapes = sorted(at for at in told if at[1] not in LEFT_TO_A_SENTENCE)
    rows = [[f"{at[1]} x {at[0]}", *(column.get(at, "-") for column in columns.values())] for at in shapes]
    return table(["requests x tokens", *columns], rows)


def beside_pieces() -> dict[Cell, dict[str, Spread]]:
    """Of the first rank, times to the first token where pieces ran beside the default and the built-in, by cell."""
    found: dict[Cell, dict[str, Spread]] = {}
    for report in reports("rank").values():
        cells = spreads(cells_of(report, "ttft_ms"), "ttft_ms")
        found |= {cell: sides for cell, sides in cells.items() if {"default", IN_PIECES, BUILTIN} <= set(sides)}
    of_first = {cell: sides for cell, sides in found.items() if cell.name == FIRST_RANK}
    return dict(sorted(of_first.items(), key=lambda item: (item[0].cached, item[0].batch, item[0].length)))


def new_tokens(cell: Cell) -> int:
    """Of a batch's prompts, how many are prefilled: with drafts SGLang keeps the last cached page for none."""
    return cell.batch * (cell.length + PAGE_SIZE * (cell.cached > 0 and cell.steps > 0))


def behind_cached(cell: Cell) -> str:
    """Its shape by the tokens that are prefilled, `new_tokens`, of each prompt."""
    again = new_tokens(cell) // cell.batch - cell.length
    return shape_of(cell.batch, cell.length + again, cell.cached - again)


@PARTS.part
def short_prefills() -> str:
    """A row a shape: milliseconds to the first token of the default, of pieces and of the built-in."""
    rows = [
        [
            behind_cached(cell),
            *(f"{mark(sides, side)}{sides[side].median:.0f}" for side in ("default", IN_PIECES)),
            f"{sides[BUILTIN].median:.0f}",
        ]
        for cell, sides in beside_pieces().items()
    ]
    return table(["requests x new tokens", "ours", "ours in pieces", "SGLang's"], rows)


@PARTS.part
def host_waits() -> str:
    """Milliseconds to the built-in's first token of one prompt of FEW_TOKENS on the first rank, over its runs."""
    asked = Cell(FIRST_RANK, 3, 1, FEW_TOKENS)
    found = [spreads(cells, "ttft_ms") for cells in runs("ttft_ms")]
    return spread((cells[asked][BUILTIN].median for cells in found if asked in cells), "{:.0f}")


@PARTS.part
def many_of_glm() -> str:
    """GLM-5.1's longest tokens without drafts over the built-in's, over its runs."""
    asked = Cell(GLM_RANK, 0, 32, 4096)
    found = [spreads(cells, "round_ms") for cells in runs("round_ms")]
    return spread((ratio(cells[asked], "default") for cells in found if asked in cells), "{:.3f}")


WHOLE_BESIDE_PIECES = 512
"""New tokens of the largest graph of a whole prefill when the run beside pieces was made."""


@PARTS.part
def short_prefills_saved() -> str:
    """Percent of the same that the default saves where its prefills were whole, least to most."""
    whole = (sides for cell, sides in beside_pieces().items() if new_tokens(cell) <= WHOLE_BESIDE_PIECES)
    return percent(ratio(sides, "default") for sides in whole)


def worst(ratios: Mapping[Cell, float]) -> tuple[int, Cell] | None:
    """How many of these are behind by NOISE or more, and the cell that is furthest; None where none is."""
    lost = sum(ratio >= 1 + NOISE for ratio in ratios.values())
    return (lost, max(ratios, key=ratios.__getitem__)) if lost else None


def lost_beside_pieces() -> list[list[str]]:
    """A row of where the default, behind cached tokens, or pieces have a first token later than the built-in's."""
    rows = []
    for side, words in (("default", "turns of chats"), (IN_PIECES, "NSA_BACKEND_SHORT_PREFILLS=0")):
        cells = {cell: sides for cell, sides in beside_pieces().items() if cell.cached or side == IN_PIECES}
        ratios = {cell: ratio(sides, side) for cell, sides in cells.items()}
        if found := worst(ratios):
            lost, cell = found
            told = f"{lost} of {len(cells)}; at most {mark(cells[cell], side)}{ratios[cell]:.3f} ({cell.shape})"
            rows.append([f"{words}, a rank of {MODELS[FIRST_RANK]}", TIMES["ttft_ms"], told])
    return rows


@PARTS.part
def prefill_captures() -> str:
    """What the server of the first rank with the most sizes of whole prefills, the newest of such, took to capture them."""
    found = [
        one
        for report in reports("rank").values()
        for row in report["rows"]
        if (row["checkpoint"], row.get("parallel", ONE_RANK)) == (FIRST_RANK, ONE_RANK)
        for one in row.get("captures", ())
        if one["what"].startswith("whole prefills")
    ]
    most = max(reversed(found), key=lambda one: one["sizes"])
    return f"{most['sizes']} of these took {most['seconds']} s of a start and {1024 * most['gib']:.0f} MiB"


def percent(ratios: Iterable[float]) -> str:
    """Saved by ratios, least to most."""
    return spread((100 * (1 - ratio) for ratio in ratios), "{:.0f}") + " %"


def of_defaults() -> list[tuple[dict[str, Spread], str]]:
    """By cell of the default its rounds or tokens, and which side it is."""
    return [given for name, sides in DEFAULTS.items() for given in of_rank(name, sides).values()]


@PARTS.part
def rounds_shorter() -> str:
    """How many of these are shorter than the built-in's, beyond the range of either."""
    found = of_defaults()
    return f"{sum(ratio(*given) < 1 and not alike(*given) for given in found)} of {len(found)}"


@PARTS.part
def samples_apart() -> str:
    """Percent of a median that the samples of a side of these are apart at most."""
    both = [sides[one] for sides, side in of_defaults() for one in (side, BUILTIN)]
    return f"{max(100 * (times.most - times.least) / times.median for times in both):.1f} %"


@PARTS.part
def rounds_saved() -> str:
    """Percent of a round that a default server saves, over all ranks."""
    return percent(ratio for name, sides in DEFAULTS.items() for ratio in over_builtin(name, sides))


@PARTS.part
def token_saved() -> str:
    """The same of a token without drafts, on the first rank."""
    return percent(over_builtin(FIRST_RANK, ("default",), drafts=False))


@PARTS.part
def glm_token_saved() -> str:
    """The same on GLM-5.1's."""
    return percent(over_builtin(GLM_RANK, ("default",), drafts=False))


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
    rows = [[CALLED.get(part, part), *(f"{us:.0f}" for us in values)] for part, values in told.items() if any(values)]
    return table(["us", *map(shape, cells)], rows)


def lost_by_ranks() -> list[list[str]]:
    """A row a rank, side and time that is behind the built-in's of the same run anywhere: sides of `LOST_BY`."""
    default = {name: {"round_ms": of_rank(name, sides), "ttft_ms": first_token(name)} for name, sides in DEFAULTS.items()}
    rows = []
    for (name, of_default), (side, words) in product(default.items(), LOST_BY.items()):
        for key, behind in TIMES.items():
            found = of_default[key] if side == "default" else of_rank(name, [side], key)
            cells = [
                f"{with_drafts(cell)} ({mark(*given)}{ratio(*given):.3f})"
                for cell, given in found.items()
                if ratio(*given) >= 1 + NOISE
            ]
            if cells:
                rows.append([f"a rank of {MODELS[name]}, {words}", behind, "; ".join(cells)])
    return rows
