"""Speeds and memory: one table a kind of result file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

from rank_tables import NOISE, joined, least_prefill, lost_by_ranks
from result_files import Parts, result, spread, table

from nsa_backend.attention.auto import CANDIDATES
from nsa_backend.benchmarks.calls.whole_layer import SHAPES
from nsa_backend.kernels.value_products import few_rows

PARTS = Parts()
SGLANGS = "SGLang's"


@PARTS.part
def replay_memory() -> str:
    (row,) = result("memory_0_5_23")["rows"]
    return " instead of ".join(f"{row['bytes'][side] / 2**20:.1f}" for side in ("ours", "builtin")) + " MiB"


# Servers of small checkpoints: (report of serve_0_5_23, the side that is the package's, the sides it is compared with).
SERVERS = {
    "rounds": ("round_graph", ("ours", "builtin")),
    "order": ("ours", ("three_graphs", "builtin")),
    "auto": ("auto", ("ours", "builtin")),
    "models": ("ours", ("builtin",)),
    "sampled_default": ("ours", ("three_graphs", "builtin")),
    "parallel": ("ours", ("three_graphs", "builtin")),
    "prompts": ("ours", ("builtin",)),
}
NAMES = {"ours": "three graphs", "three_graphs": "three graphs", "builtin": "built-in"}
"""A side that the package's best one is compared with; in the report "auto" `ours` is fa3."""
QUANTITIES = {"tokens_per_s": "fewer tokens/s", "ttft_ms": "first token later", "round_ms": "longer rounds"}


def over(row: dict, side: str, other: str, key: str) -> float:
    return row[side][key]["median"] / row[other][key]["median"]


def cell_name(row: dict) -> str:
    return f"{row['checkpoint']} {row['batch']} x {row['length']}, {row['steps']} drafts".replace(", 0 drafts", "")


def served(part: str, wanted: tuple[int, ...]) -> str:
    """A row a cell with this many drafts: a round on every side, tokens per second of ours and the built-in's."""
    side, others = SERVERS[part]
    rows = []
    for row in result("serve_0_5_23", part)["rows"]:
        if row["steps"] in wanted:
            sides = [s for s in (side, *others) if s in row]
            rounds = " / ".join(f"{row[s]['round_ms']['median']:.2f}" for s in sides)
            rates = " / ".join(f"{row[s]['tokens_per_s']['median']:.0f}" for s in (side, "builtin"))
            accept = " / ".join(f"{row[s]['accept']:.2f}" for s in (side, "builtin"))
            where = row["checkpoint"] + (f", {row['parallel']}" if row.get("parallel", "tp1") != "tp1" else "")
            rows.append([where, str(row["steps"]), f"{row['batch']} x {row['length']}", rounds, rates, accept])
    sides = " / ".join(["one graph", *(NAMES[s] for s in others)])
    return table(
        ["checkpoint", "drafts", "requests x tokens", f"ms a round: {sides}", "tokens/s: ours / built-in", "accepted"], rows
    )


@PARTS.part
def rounds() -> str:
    return served("rounds", (1, 3))


@PARTS.part
def two_gpus() -> str:
    return served("parallel", (3,))


@PARTS.part
def trained_accept() -> str:
    """Ours over built-in on the same prompts, least to most over cells of two drafts and more, and how many are apart."""
    cells = [
        row["gain"] for report in result("trained_0_5_23")["reports"].values() for row in report["accept"] if row["steps"] >= 2
    ]
    below, above = (sum(sign * (c["ratio"] - 1) > 2 * c["standard_error"] for c in cells) for sign in (-1, 1))
    ratios = spread((cell["ratio"] for cell in cells), "{:.3f}")
    return f"{ratios} of the built-in's in {len(cells)} cells. By two standard errors {below} are below 1 and {above} above"


def rate(row: dict) -> float:
    return row["ours"]["tokens_per_s"] / row["builtin"]["tokens_per_s"]


@PARTS.part
def trained_greedy() -> str:
    """Tokens per second of the third model over the built-in's with drafts, greedy, least to most."""
    return trained_speed(sampled=False)


@PARTS.part
def trained_sampled() -> str:
    """The same of sampled requests."""
    return trained_speed(sampled=True)


def trained_speed(*, sampled: bool) -> str:
    rows = result("trained_0_5_23", "third")["speed"]
    return spread(rate(row) for row in rows if row["steps"] and bool(row["temperature"]) == sampled)


DECODE_RUNS = {"bf16": "decode", "fp8": "decode_again"}
"""KV cache to the run that has today's tiles."""


def decode_ratios() -> dict[tuple[str, int, int], float]:
    """(KV, heads, rows) to sparse_decode's time over that of the best other implementation."""
    return {
        (kv, row["heads"], row["rows"]): row["us"]["sparse_decode"]
        / min(t for n, t in row["us"].items() if n != "sparse_decode")
        for kv, part in DECODE_RUNS.items()
        for row in result("attention_0_5_23", part)["decode"]
        if row["kv"] == kv
    }


@PARTS.part
def sparse_decode() -> str:
    found = decode_ratios()
    columns = (1, 2, 4, 8, 16, 32, 64, 512)
    heads = dict.fromkeys((kv, heads) for kv, heads, _ in found)
    return table(
        ["KV, heads; rows:", *(f"{n}" for n in columns)],
        [[f"{kv}, {n}", *(f"{found[kv, n, rows]:.2f}" for rows in columns)] for kv, n in heads],
    )


SHARED = {0.9: "nine tenths", 0.5: "half", 0.0: "nothing"}
"""What a row shares with the row before it."""


class Sharing(NamedTuple):
    """A cell of rows that share what they chose."""

    kv: str
    heads: int
    together: int  # rows that are read together: of a request, or of a prompt
    count: int  # requests, or rows of a prompt
    overlap: float


def over_others(part: str, name: str, together: str, count: str) -> dict[Sharing, float]:
    """By cell of a report, `name`'s time over that of the fastest implementation that reads every row alone."""
    alone = {other for candidates in CANDIDATES.values() for other in candidates}
    return {
        Sharing(row["kv"], row["heads"], row[together], row[count], row["overlap"]): row["us"][name]
        / min(us for other, us in row["us"].items() if other in alone)
        for row in result("attention_0_5_23", part)["rows"]
    }


together_ratios = partial(over_others, "rows_together", "sparse_verify", "rows_per_request", "requests")
prefill_ratios = partial(over_others, "prefill_together", "sparse_prefill", "rows_together", "rows")


def by_shared(found: dict[Sharing, float], count: str, *, reverse: bool = False) -> str:
    """A row a KV cache, number of heads and of rows together, of ratios by how much is shared; "-" where none was measured."""
    counts = sorted({cell.count for cell in found}, reverse=reverse)

    def told(row: tuple, n: int) -> str:
        ratios = (found.get(Sharing(*row, n, overlap)) for overlap in SHARED)
        return joined(["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios])

    rows = [[", ".join(map(str, row)), *(told(row, n) for n in counts)] for row in dict.fromkeys(sorted(c[:3] for c in found))]
    return table([f"KV, heads, rows together; {count}:", *map(str, counts)], rows)


@PARTS.part
def sparse_verify() -> str:
    return by_shared(together_ratios(), "requests")


def shared(found: dict[Sharing, float], kv: str, least: int) -> str:
    """Least to most on this KV cache, from so many requests or rows on, where nine tenths or half are shared."""
    return spread(ratio for cell, ratio in found.items() if cell.kv == kv and cell.count >= least and cell.overlap)


@PARTS.part
def verify_shared() -> str:
    """From 24 requests on, with which auto takes rows together."""
    return spread(ratio for cell, ratio in together_ratios().items() if cell.count >= 24 and cell.overlap)


@PARTS.part
def sparse_prefill() -> str:
    return by_shared(prefill_ratios(), "rows", reverse=True)


@PARTS.part
def prefill_shared() -> str:
    """Least to most where a default server has it, and nine tenths or half are shared."""
    return shared(served_prefill(), "bf16", 0)


@PARTS.part
def prefill_shared_fp8() -> str:
    """The same on FP8 KV."""
    return shared(served_prefill(), "fp8", 0)


def served_prefill() -> dict[Sharing, float]:
    """Cells that a default server takes together."""
    return {cell: ratio for cell, ratio in prefill_ratios().items() if cell.count >= least_prefill(cell.kv, cell.heads)}


@PARTS.part
def index_scores() -> str:
    """Rows two by two over SGLang's call by requests and tokens, for 64 index heads; in brackets microseconds of the latter."""
    times = {
        (row["requests"], row["length"]): row["us"]
        for part in ("rows_of_a_verify", "beside_sglangs_pieces")
        for row in result("index_scores_0_5_23", part)["rows"]
        if row["index_heads"] == 64
    }
    requests, lengths = (sorted(set(counts)) for counts in zip(*times, strict=True))

    def told(us: dict[str, float]) -> str:
        sglang = us.get("one by one in SGLang's pieces", us["one by one"])
        return f"{us['two by two'] / sglang:.2f} ({sglang:.1f})"

    rows = [[str(n), *(told(times[n, length]) for length in lengths)] for n in requests]
    return table(["requests; tokens:", *map(str, lengths)], rows)


VALUES_TOGETHER = "ours with values in one launch, to o_proj"
OF_FRONTS = "fronts_to_o_proj"


@PARTS.part
def whole_front() -> str:
    """Microseconds of a layer's front up to its index scores, ours over SGLang's, by rows; in brackets SGLang's."""
    found = result("attention_0_5_23", OF_FRONTS)["whole_front"]
    columns = list(dict.fromkeys((row["model"], row["kv"]) for row in found))
    times = {(row["model"], row["kv"], row["rows"]): row["us"] for row in found}
    launches = {(row["model"], row["kv"]): row["launches"] for row in found if row["rows"] == 4}

    def told(us: dict[str, float]) -> str:
        return f"{us['ours'] / us[SGLANGS]:.2f} ({us[SGLANGS]:.0f})"

    rows = [[str(n), *(told(times[*column, n]) for column in columns)] for n in sorted({row["rows"] for row in found})]
    counted = [f"{launches[column]['ours']:.0f} / {launches[column][SGLANGS]:.0f}" for column in columns]
    return table(["rows", *(f"{model}, {kv} KV" for model, kv in columns)], [*rows, ["launches, 4 rows", *counted]])


def values_together(row: dict) -> bool:
    """Whether a server has the values of these rows in one launch."""
    return row["rows"] <= few_rows(SHAPES[row["model"]]["v"])


def to_o_proj() -> list[dict]:
    """Rows of a layer's front and of what is behind its attention, to o_proj."""
    return [row for row in result("attention_0_5_23", OF_FRONTS)["whole_front"] if VALUES_TOGETHER in row["us"]]


@PARTS.part
def whole_layers() -> str:
    """A layer to o_proj as it is served over SGLang's, least to most over rows, by model."""
    of_model = {"deepseek-v3.2": "DeepSeek-V3.2", "glm-5.1": "GLM-5.1", "glm-5.2, shared": "shared layers of GLM-5.2"}
    ratios = {
        name: spread(
            row["us"][VALUES_TOGETHER if values_together(row) else "ours, to o_proj"] / row["us"][f"{SGLANGS}, to o_proj"]
            for row in to_o_proj()
            if row["model"] == model
        )
        for model, name in of_model.items()
    }
    return ", ".join(f"{ratio} on {name}" for name, ratio in ratios.items())


@PARTS.part
def values_saved() -> str:
    """Microseconds that values in one launch save of that, least to most, at the rows that have them."""
    few = [row["us"] for row in to_o_proj() if values_together(row)]
    return spread((us["ours, to o_proj"] - us[VALUES_TOGETHER] for us in few), "{:.1f}") + " us"


@PARTS.part
def fetching_lost() -> str:
    """Microseconds of a layer's front that weights asked for ahead cost, least to most."""
    found = result("attention_0_5_23", "early_launches")["rows"]
    return spread((row["us"]["front now"] - row["us"]["front no prefetch"] for row in found), "{:.1f}") + " us"


@PARTS.part
def metadata_launch() -> str:
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in result("metadata_0_5_23", "launch")["rows"]:
        found.setdefault((row["bs"], row["length"]), {})[row["mode"]] = row["us"]["served"]
    modes = list(next(iter(found.values())))
    rows = [[f"{bs} x {length}", *(f"{us[mode]:.2f}" for mode in modes)] for (bs, length), us in found.items()]
    return table(["requests x tokens, us", *modes], rows)


def metadata_shapes() -> list[dict]:
    report = result("metadata_0_5_23", "replay")
    return report["rows"] + report["growth"]


@PARTS.part
def metadata_beside() -> str:
    """How much longer SGLang's own path takes, by mode."""
    rows = []
    for mode in dict.fromkeys(row["mode"] for row in metadata_shapes()):
        cells = [row for row in metadata_shapes() if row["mode"] == mode]
        times = [spread((r["builtin"][key] / r["ours"][key] for r in cells), "{:.1f}") for key in ("gpu_us", "cpu_us")]
        rows.append([mode, str(len(cells)), *times])
    return table(["SGLang's time / ours", "shapes", "GPU", "CPU"], rows)


@PARTS.part
def memory() -> str:
    rows = []
    for name in ("0_5_23", "0_5_12"):
        report = result(f"memory_{name}")
        sizes = report["rows"][0]["bytes"] if "rows" in report else report["bytes"]
        rows.append([name.replace("_", "."), *(f"{sizes[side] / 2**20:.1f}" for side in ("ours", "builtin"))])
    return table(["SGLang", "ours, MiB", "built-in, MiB"], rows)


def lost_by_servers() -> Iterator[list[str]]:
    """A row a report, other side and quantity: every cell in which the package's side is behind."""
    for part, (side, others) in SERVERS.items():
        rows = result("serve_0_5_23", part)["rows"]
        for other, (key, words) in product(others, QUANTITIES.items()):
            ratios = [(row, over(row, side, other, key)) for row in rows if other in row]
            lost = [(row, ratio) for row, ratio in ratios if (1 - ratio if key == "tokens_per_s" else ratio - 1) >= NOISE]
            if lost:
                name = "fa3" if (part, other) == ("auto", "ours") else NAMES[other]
                yield [part, f"{words} than {name}", "; ".join(f"{cell_name(row)} ({ratio:.3f})" for row, ratio in lost)]


@PARTS.part
def losses() -> str:
    """Every cell of every run in which the package is behind by more than NOISE."""
    rows = [*lost_by_ranks(), *lost_by_servers()]
    trained = [row for row in result("trained_0_5_23", "third")["speed"] if rate(row) < 1]
    cells = "; ".join(f"{r['batch']} requests, {r['steps']} drafts, T = {r['temperature']:g} ({rate(r):.2f})" for r in trained)
    rows.append(["trained", "fewer tokens/s than built-in", cells])
    for kv in DECODE_RUNS:
        (_, heads, most), worst = max((item for item in decode_ratios().items() if item[0][0] == kv), key=lambda item: item[1])
        rows.append(["sparse_decode", f"longer than the best other, {kv}", f"at most {worst:.2f}: {heads} heads, {most} rows"])
    for name, count, ratios in (("sparse_verify", "requests", together_ratios()), ("sparse_prefill", "rows", prefill_ratios())):
        cell, worst = max(ratios.items(), key=lambda item: item[1])
        of_overlap = [[ratio for other, ratio in ratios.items() if other.overlap == overlap] for overlap in SHARED]
        lost = [f"{sum(ratio >= 1 + NOISE for ratio in found)} of {len(found)}" for found in of_overlap]
        sharing = "; ".join(f"{words}: {cells}" for words, cells in zip(SHARED.values(), lost, strict=True))
        most = f"{worst:.2f} ({cell.kv}, {cell.heads} heads, {cell.count} {count})"
        rows.append([name, "longer than the best other", f"of rows that share {sharing}; at most {most}"])
    slower = [row for row in metadata_shapes() if row["builtin"]["gpu_us"] < row["ours"]["gpu_us"]]
    worst = max(slower, key=lambda row: row["ours"]["gpu_us"] / row["builtin"]["gpu_us"])
    times = " against ".join(f"{worst[side]['gpu_us']:.1f} us" for side in ("ours", "builtin"))
    rows.append(["metadata", "longer on the GPU than SGLang's", f"{len(slower)} shapes of draft decode, at worst {times}"])
    return table(["run", "behind in", "cells (ours / other)"], rows)
