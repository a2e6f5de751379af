"""Speeds and memory: one table a kind of result file."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from context_tables import lost_by_two_ranks
from rank_tables import GPU, NOISE, lost_beside_pieces, lost_by_ranks, lost_to_vllm
from result_files import Parts, reports, result, spread, table

from nsa_backend.adapters.expert_products import BOTH
from nsa_backend.adapters.few_experts import MOST_TOKENS
from nsa_backend.adapters.shared_expert import MANY
from nsa_backend.attention.auto import CANDIDATES, least_together
from nsa_backend.benchmarks.calls.whole_layer import SHAPES
from nsa_backend.benchmarks.reports.rank_rows import ONE_RANK
from nsa_backend.benchmarks.tuning.experts import AMONG, EARLY, WHOLE, over_sglangs, wins
from nsa_backend.kernels.add_norm import EACH
from nsa_backend.kernels.few_experts import Tile, tile_for
from nsa_backend.kernels.router import SERVED
from nsa_backend.kernels.value_products import few_rows

PARTS = Parts()
SGLANGS = "SGLang's"


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
QUANTITIES = {"ttft_ms": "first token up to", "round_ms": "round up to", "tokens_per_s": "tokens/s down to"}
SMALL = "[small checkpoints](../benchmarks/results/serve_0_5_23_h200.json)"


def over(row: dict, side: str, other: str, key: str) -> float:
    return row[side][key]["median"] / row[other][key]["median"]


def cell_name(row: dict) -> str:
    drafts = f", {row['steps']} drafts" if row["steps"] else ""
    return f"{row['checkpoint']} {row['batch']} x {row['length']}{drafts}"


@PARTS.part
def rounds() -> str:
    """A row a cell with drafts: a round on every side, tokens per second of ours and the built-in's; of two GPUs the ends."""
    return table(
        ["checkpoint", "drafts", "requests x tokens", f"ms a round: one graph / three graphs / {SGLANGS}",
         f"tokens/s: ours / {SGLANGS}", "accepted"],
        [served(row, *SERVERS[part]) for part in ("rounds", "parallel") for row in wanted(part)],
    )  # fmt: skip


def wanted(part: str) -> list[dict]:
    """Rows with drafts; of a deployment of several GPUs those of the fewest and the most requests."""
    rows = [row for row in result("serve_0_5_23", part)["rows"] if row["steps"]]
    batches: dict[str, list[int]] = {}
    for row in rows:
        batches.setdefault(deployment(row), []).append(row["batch"])
    ends = {where: (min(found), max(found)) for where, found in batches.items()}
    return [row for row in rows if not deployment(row) or row["batch"] in ends[deployment(row)]]


def deployment(row: dict) -> str:
    """That of a row of several GPUs."""
    return row.get("parallel", ONE_RANK).replace(ONE_RANK, "")


def served(row: dict, side: str, others: Sequence[str]) -> list[str]:
    sides = (side, *others)
    times = " / ".join(f"{row[s]['round_ms']['median']:.2f}" for s in sides)
    rates = " / ".join(f"{row[s]['tokens_per_s']['median']:.0f}" for s in (side, "builtin"))
    accept = " / ".join(f"{row[s]['accept']:.2f}" for s in (side, "builtin"))
    where = ", ".join(filter(None, (row["checkpoint"], deployment(row))))
    return [where, str(row["steps"]), f"{row['batch']} x {row['length']}", times, rates, accept]


@PARTS.part
def trained_accept() -> str:
    """Ours over the built-in's on the same prompts, least to most over cells of two drafts and more; how many are apart."""
    cells = [
        row["gain"] for report in result("trained_0_5_23")["reports"].values() for row in report["accept"] if row["steps"] >= 2
    ]
    below, above = (sum(sign * (c["ratio"] - 1) > 2 * c["standard_error"] for c in cells) for sign in (-1, 1))
    ratios = spread((cell["ratio"] for cell in cells), "{:.3f}")
    apart = f"{below + above} of {len(cells)} cells differ by more than two standard errors, {below} of them downwards"
    return f"{ratios} times {SGLANGS}. {apart}"


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
    columns = (1, 4, 8, 16, 32, 64, 512)
    heads = dict.fromkeys((kv, heads) for kv, heads, _ in found)
    return table(
        ["KV, heads; rows:", *(f"{n}" for n in columns)],
        [[f"{kv}, {n}", *(f"{found[kv, n, rows]:.2f}" for rows in columns)] for kv, n in heads],
    )


SHARED = (0.9, 0.5, 0.0)
"""What a row shares with the row before it."""


class Sharing(NamedTuple):
    """A cell of rows that share what they chose."""

    kv: str
    heads: int
    together: int  # rows that are read together: of a request, or of a prompt
    count: int  # requests, or rows of a prompt
    overlap: float


def over_others(parts: Sequence[str], name: str, together: str, count: str) -> dict[Sharing, float]:
    """By cell of reports, the last that has it, `name`'s time over that of the fastest that reads every row alone."""
    alone = {other for candidates in CANDIDATES.values() for other in candidates}
    return {
        Sharing(row["kv"], row["heads"], row[together], row[count], row["overlap"]): row["us"][name]
        / min(us for other, us in row["us"].items() if other in alone)
        for part in parts
        for row in result("attention_0_5_23", part)["rows"]
    }


together_ratios = partial(over_others, ["rows_together"], "sparse_verify", "rows_per_request", "requests")
prefill_ratios = partial(over_others, ["prefill_together", "prefill_in_turns"], "sparse_prefill", "rows_together", "rows")


def by_shared(found: dict[Sharing, float], count: str, counts: Sequence[int]) -> str:
    """A row a KV cache and number of heads, a column a count: ratios by how much is shared."""
    ratios = {(cell.kv, cell.heads, cell.count, cell.overlap): ratio for cell, ratio in found.items()}

    def told(kv: str, heads: int, n: int) -> str:
        return " / ".join(f"{ratios[kv, heads, n, overlap]:.2f}" for overlap in SHARED)

    rows = [[f"{kv}, {heads}", *(told(kv, heads, n) for n in counts)] for kv, heads in sorted({cell[:2] for cell in found})]
    return table([f"KV, heads; {count}:", *map(str, counts)], rows)


@PARTS.part
def sparse_verify() -> str:
    """Of three drafts."""
    return by_shared({cell: t for cell, t in together_ratios().items() if cell.together == 4}, "requests", (8, 16, 32, 64))


@PARTS.part
def verify_served() -> str:
    """Requests with three drafts from which on a default server takes their rows together, by KV cache."""
    least = {
        kv: [least_together(GPU, kv, heads)[4] // 4 for heads in sorted({c.heads for c in together_ratios()}, reverse=True)]
        for kv in CANDIDATES
    }
    bf16, fp8 = (" or ".join(map(str, dict.fromkeys(found))) for found in least.values())
    return f"{bf16} requests on, on FP8 KV from {fp8}"


@PARTS.part
def sparse_prefill() -> str:
    return by_shared(prefill_ratios(), "rows", (8192, 1024))


@PARTS.part
def index_scores() -> str:
    """Rows two by two over SGLang's call by requests and tokens, for 64 index heads; in brackets microseconds of the latter."""
    times = {
        (row["requests"], row["length"]): row["us"]
        for part in ("rows_of_a_verify", "beside_sglangs_pieces")
        for row in result("index_scores_0_5_23", part)["rows"]
        if row["index_heads"] == 64
    }
    lengths = sorted({length for _, length in times})

    def told(us: dict[str, float]) -> str:
        sglang = us.get("one by one in SGLang's pieces", us["one by one"])
        return f"{us['two by two'] / sglang:.2f} ({sglang:.1f})"

    rows = [[str(n), *(told(times[n, length]) for length in lengths)] for n in (1, 8, 64)]
    return table(["requests; tokens:", *map(str, lengths)], rows)


def own_topk() -> list[float]:
    """By cell, the fastest launch of a top-k of ours, which is gone, over SGLang's: of rows as wide as a graph's."""
    rows = result("topk_0_5_23", "by_blocks_of_a_row_of_graphs")["rows"]
    return [min(us for way, us in row["us"].items() if way != SGLANGS) / row["us"][SGLANGS] for row in rows]


@PARTS.part
def own_topk_ahead() -> str:
    """Where it was the faster one."""
    return spread(ratio for ratio in own_topk() if ratio < 1)


@PARTS.part
def own_topk_behind() -> str:
    """Elsewhere."""
    return spread(ratio for ratio in own_topk() if ratio >= 1)


EXPERT_TOKENS = (8, 32, 128, 512, 8192)
RANKS_OF_EXPERTS = {"v3.2-tp8": "DeepSeek-V3.2", "glm-5-tp8": "GLM-5"}
"""Those of expert parallel (`v3.2-ep8`) serve nobody yet: no server of eight GPUs ran with them."""


def in_one_launch() -> dict[tuple[str, int], dict[str, float]]:
    """By rank and tokens, microseconds of a layer's experts by way."""
    return {(row["rank"], row["tokens"]): row["between_us"] for row in result("experts_0_5_23", "one_launch_to_1024")["rows"]}


@PARTS.part
def experts() -> str:
    """Microseconds of a layer's experts as this package has them over SGLang's, by tokens; in brackets SGLang's."""
    tiles = [row for report in reports("experts").values() for row in report["rows"] if "best" in row]
    rows, newer = {(row["rank"], row["tokens"]): row for row in tiles}, in_one_launch()

    def told(rank: str, tokens: int) -> str:
        if us := newer.get((rank, tokens)):
            return f"{us[WHOLE] / us['sglang']:.2f} ({us['sglang']:.0f})"
        row = rows[rank, tokens]
        over = f"{over_sglangs(row):.2f}" if wins(row) else SGLANGS
        return f"{over} ({row['us']['sglang']:.0f})"

    of_models = [[model, *(told(rank, tokens) for tokens in EXPERT_TOKENS)] for rank, model in RANKS_OF_EXPERTS.items()]
    return table(["tokens:", *map(str, EXPERT_TOKENS)], of_models)


@PARTS.part
def experts_divided() -> str:
    """Experts of one launch over SGLang's, of one of eight GPUs that divide them."""
    return spread(us[WHOLE] / us["sglang"] for (rank, _), us in in_one_launch().items() if rank == "v3.2-ep8")


@PARTS.part
def experts_bandwidth() -> str:
    """TB/s of weights while a layer's experts have 16 to 128 tokens, with the order and sums: DeepSeek-V3.2's."""
    rows = result("experts_0_5_23", "one_launch_by_rows")["rows"]
    of_rank = [row for row in rows if row["rank"] == "v3.2" and 16 <= row["tokens"] <= 128]
    return spread((4 * row["bytes_us_4.0"] / row["rows 16"] for row in of_rank), "{:.1f}")


@PARTS.part
def read_alone() -> str:
    """TB/s of what only reads weights, in one piece and in the tiles that products take."""
    rows = result("experts_0_5_23", "weights_read")["rows"]
    one, tiles = (max(row["tb_s"] for row in rows if row["what"] == what) for what in ("in a row", "tiles"))
    return f"{one:.1f} in a row, {tiles:.1f} in tiles"


FEW_OF_RANKS = {
    "v3.2-tp8": (8, "DeepSeek-V3.2"), "v3.2-tp16": (8, "16 GPUs"), "v3.2-tp4": (8, "4 GPUs"), "v3.2-ep8": (8, "EP 8"),
    "glm-5-tp8": (9, "GLM-5"),
}  # fmt: skip
"""Experts that a token chooses, and what pages call them."""


def as_filed(tile: Tile) -> str:
    """A tile by the name that it had when they could be without sums by lane, or take one choice after the other."""
    return str(tile).replace(", ahead=", ", by_choice=0, ahead=").replace(")", ", by_lane=True)")


@PARTS.part
def few_experts() -> str:
    """A row a rank: two launches over SGLang's experts by tokens, in brackets where they do not serve.

    DeepSeek-V3.2's with its shared expert, which SGLang has on another stream.
    """
    rows = result("experts_0_5_23", "few_tokens")["rows"]
    counts = sorted({row["tokens"] for row in rows})
    newer = {(row["rank"], row["tokens"]): row for row in result("experts_0_5_23", "few_by_tensor_cores")["rows"]}

    def over(row: dict, choices: int) -> str:
        tokens, of = row["tokens"], newer.get((row["rank"], row["tokens"]))
        if of is None:
            us, way = row["few_us"], as_filed(tile_for(tokens))
        elif "beside_us" in of:
            us, way = of["beside_us"], f"{EARLY}{AMONG}"
        else:
            us, way = of["few_us"], EARLY
        ratio = f"{us[way] / us['sglang']:.2f}"
        return ratio if tokens <= MOST_TOKENS.get((choices, row["width"]), 0) else f"({ratio})"

    found = [
        [words, *(over(row, choices) for row in rows if row["rank"] == rank)] for rank, (choices, words) in FEW_OF_RANKS.items()
    ]
    return table(["tokens:", *map(str, counts)], found)


ROUTERS = "experts_0_5_23", "norms_and_routers_by_division"
HEADS = "attention_0_5_23", "heads_beside_sglang"
"""Files and reports of what stands between two halves of a layer, and of products with a weight of each head's own."""


def over_sglangs_launches(report: tuple[str, str], what: str, way: str) -> str:
    """Of both models and all numbers of rows."""
    return spread(row["us"][way] / row["us"][SGLANGS] for row in result(*report)["rows"] if row["what"] == what)


@PARTS.part
def routers() -> str:
    """The launch of a router over SGLang's product and choice."""
    return over_sglangs_launches(ROUTERS, "router", str(SERVED))


@PARTS.part
def routers_behind_norms() -> str:
    """The same with the norm before it, and a copy of its rows; the router is divided as it was before that run."""
    return over_sglangs_launches(ROUTERS, "norm, router", "add_norm, router")


@PARTS.part
def norms_alone() -> str:
    """Sums and norms that quantise nothing, with copies of their rows, over SGLang's."""
    return over_sglangs_launches(ROUTERS, "norm", f"add_norm {EACH}")


@PARTS.part
def values_of_heads() -> str:
    """Values with o_proj's quantisation over SGLang's product and quantisation."""
    return over_sglangs_launches(HEADS, "values", "head_values")


@PARTS.part
def queries_of_heads() -> str:
    """MLA's query over SGLang's product beside what it turns."""
    return over_sglangs_launches(HEADS, "queries", "head_queries")


@PARTS.part
def many_tokens() -> str:
    """A layer's experts with the second product of prefills over SGLang's, of both models where it is alone."""
    return of_prefills("sglang, ours", MANY, BOTH)


@PARTS.part
def both_products() -> str:
    """The same with both products."""
    return of_prefills("both ours", BOTH)


def of_prefills(way: str, least: int, below: float = math.inf) -> str:
    rows = [row for row in result("experts_0_5_23", "both_products")["rows"] if least <= row["tokens"] < below]
    return spread(row["many_us"][way] / row["many_us"]["sglang"] for row in rows)


VALUES_TOGETHER = "ours with values in one launch, to o_proj"
OF_FRONTS = "fronts_to_o_proj"
FRONT_ROWS = (4, 32, 128)
FRONTS = {"deepseek-v3.2": "DeepSeek-V3.2", "glm-5.1": "GLM-5.1", "glm-5.2, shared": "GLM-5.2, shared"}


@PARTS.part
def whole_front() -> str:
    """Microseconds of a layer's front up to its index scores, ours over SGLang's, by rows; in brackets SGLang's; launches."""
    found = [row for row in result("attention_0_5_23", OF_FRONTS)["whole_front"] if row["rows"] in FRONT_ROWS]
    columns = list(dict.fromkeys((row["model"], row["kv"]) for row in found))
    times = {(row["model"], row["kv"], row["rows"]): row["us"] for row in found}

    def told(us: dict[str, float]) -> str:
        return f"{us['ours'] / us[SGLANGS]:.2f} ({us[SGLANGS]:.0f})"

    def launched(model: str, kv: str) -> str:
        of_column = [row["launches"] for row in found if (row["model"], row["kv"]) == (model, kv)]
        return " / ".join(spread((launches[side] for launches in of_column), "{:.0f}") for side in ("ours", SGLANGS))

    rows = [[str(n), *(told(times[*column, n]) for column in columns)] for n in FRONT_ROWS]
    last = [f"launches, ours / {SGLANGS}", *(launched(*column) for column in columns)]
    return table(["rows", *(f"{FRONTS[model]}, {kv}" for model, kv in columns)], [*rows, last])


def values_together(row: dict) -> bool:
    """Whether a server has the values of these rows in one launch."""
    return row["rows"] <= few_rows(SHAPES[row["model"]]["v"])


@PARTS.part
def whole_layers() -> str:
    """A layer to o_proj as it is served over SGLang's, without attention, least to most over rows, by model."""
    found = [row for row in result("attention_0_5_23", OF_FRONTS)["whole_front"] if VALUES_TOGETHER in row["us"]]
    ratios = {
        name: spread(
            row["us"][VALUES_TOGETHER if values_together(row) else "ours, to o_proj"] / row["us"][f"{SGLANGS}, to o_proj"]
            for row in found
            if row["model"] == model
        )
        for model, name in FRONTS.items()
    }
    return ", ".join(f"{ratio} on {name}" for name, ratio in ratios.items())


@PARTS.part
def newest_front() -> str:
    """Both launches in front of a layer, each with the one before it, as they are served over what served before."""
    rows = result("attention_0_5_23", "front_in_cuda")["rows"]
    served = {"norm_rope_store": "product, cuda", "rope_quantise": "product, cuda 16 128"}
    return spread(
        row["us"][way] / row["us"]["product, old"]
        for row in rows
        if row["rows"] <= FRONT_ROWS[-1] and (way := served.get(row["kernel"])) in row["us"]
    )


def metadata_shapes() -> list[dict]:
    report = result("metadata_0_5_23", "replay")
    return report["rows"] + report["growth"]


@PARTS.part
def metadata_launch() -> str:
    """Microseconds of the launch as it is served since that run chose its warps, over modes, requests and lengths."""
    report = result("metadata_0_5_23", "launch_again")
    return spread((row["us"]["2 warps"] for row in report["rows"]), "{:.1f}")


@PARTS.part
def metadata_beside() -> str:
    """How much longer SGLang's own path takes on the GPU, and on the CPU, least to most over shapes."""
    gpu, cpu = (
        spread((row["builtin"][key] / row["ours"][key] for row in metadata_shapes()), "{:.1f}") for key in ("gpu_us", "cpu_us")
    )
    return f"{gpu} (GPU) and {cpu} (CPU)"


MEMORY = (("memory_0_5_23", "million"), ("memory_0_5_12", None))
"""The newest report of each release."""


@PARTS.part
def memory() -> str:
    """A row a release and model."""
    rows = []
    for file, name in MEMORY:
        report = result(file, name)
        version = report["environment"]["packages"]["sglang"]
        for row in report.get("rows") or [report["setting"] | report]:
            of = f"{row.get('model', 'DeepSeek-V3.2')}, {row['max_bs']} requests of {row['context']} tokens"
            rows.append([version, of, *(f"{row['bytes'][side] / 2**20:.1f}" for side in ("ours", "builtin"))])
    return table(["SGLang", "captured", "ours, MiB", f"{SGLANGS}, MiB"], rows)


def lost_by_servers() -> list[str]:
    """A row of all servers of small checkpoints: in how many figures ours is behind, and the worst of each quantity."""
    found = []
    for part, (side, others) in SERVERS.items():
        for row, other, key in product(result("serve_0_5_23", part)["rows"], others, QUANTITIES):
            if other in row:
                ratio = over(row, side, other, key)
                lack = 1 - ratio if key == "tokens_per_s" else ratio - 1
                found.append((lack, key, f"{ratio:.3f} ({cell_name(row)})"))
    lost = [one for one in found if one[0] >= NOISE]
    worst = (f"{words} {max(one for one in lost if one[1] == key)[-1]}" for key, words in QUANTITIES.items())
    return [f"servers of {SMALL}", f"{len(lost)} of {len(found)} figures", "; ".join(worst)]


def behind(ratios: Collection[float]) -> str:
    """In how many of these ours is behind."""
    return f"{sum(ratio >= 1 + NOISE for ratio in ratios)} of {len(ratios)}"


@PARTS.part
def losses() -> str:
    """Every cell of every run in which the package is behind by NOISE or more; of servers of small checkpoints the worst."""
    trained = [row for row in result("trained_0_5_23", "third")["speed"] if rate(row) < 1]
    cells = "; ".join(f"{r['batch']} requests, {r['steps']} drafts, T = {r['temperature']:g} ({rate(r):.2f})" for r in trained)
    rows = [
        *lost_by_ranks(),
        *lost_by_two_ranks(),
        *lost_to_vllm(),
        *lost_beside_pieces(),
        lost_by_servers(),
        ["small trained models", "fewer tokens/s", cells],
    ]
    (kv, heads, most), worst = max(decode_ratios().items(), key=lambda item: item[1])
    cells = behind(decode_ratios().values())
    rows.append(["sparse_decode", "longer", f"{cells}; at most {worst:.2f} ({kv}, {heads} heads, {most} rows)"])
    by_overlap = " / ".join(f"{100 * overlap:.0f}" for overlap in SHARED) + " %"
    for name, count, ratios in (("sparse_verify", "requests", together_ratios()), ("sparse_prefill", "rows", prefill_ratios())):
        cell, worst = max(ratios.items(), key=lambda item: item[1])
        lost = " / ".join(behind([t for other, t in ratios.items() if other.overlap == overlap]) for overlap in SHARED)
        most = f"{worst:.2f} ({cell.kv}, {cell.heads} heads, {cell.count} {count})"
        rows.append([f"{name}, {by_overlap} shared", "longer", f"{lost}; at most {most}"])
    shapes = metadata_shapes()
    slower = [row for row in shapes if row["builtin"]["gpu_us"] < row["ours"]["gpu_us"]]
    worst = max(slower, key=lambda row: row["ours"]["gpu_us"] / row["builtin"]["gpu_us"])
    times = " against ".join(f"{worst[side]['gpu_us']:.1f} us" for side in ("ours", "builtin"))
    modes = ", ".join(dict.fromkeys(row["mode"] for row in slower))
    rows.append(["metadata", "longer on the GPU", f"{len(slower)} of {len(shapes)}, {modes}: at worst {times}"])
    return table(["what", "behind in", f"cells (ours / {SGLANGS} or the best other)"], rows)
