"""Block-FP8 experts of a rank as SGLang's Triton runner calls them: which tiles are fastest, and the configs that follow.

    python benchmarks/tuning/experts.py OUT.json [--ranks v3.2-tp8 glm-5-tp8] [--tokens 1 2 4 ...] [--configs MOE_CONFIGS.json]

Tokens choose experts at random. Tiles of both products are compared first, then tiles of the second alone, both with and
without bulk copies (TMA). Each is compared with what SGLang chooses before it is timed, beside the time that the bytes take.
With few tokens this package's two launches (`kernels/few_experts.py`) are timed too, in some tiles: `few_us`. Each of its
calls has other experts than the one before, as layers have, so that no call finds its weights in L2. `--few` times these alone,
and once more where tokens have half of their experts in common, as rows of one request may: `alike_us`, and where SGLang would
have the shared expert on another stream, with that, or with it among the others: `beside_us`. `--between` times what lies
between both products, and before the first one, and both products in one launch; `--many` our second product of a prefill, by
tile.
The fastest is timed beside SGLang's once more where some experts are chosen far more often than others, `skewed_us`: a number
of tokens at which it does not win both has SGLang's in the file.
OUT.json is written after every cell, and so is the file of `nsa_backend.adapters.moe_configs` where --configs names one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from nsa_backend.adapters import expert_products, moe_configs, shared_expert
from nsa_backend.adapters.dsa.layer_front.streams import SideStream
from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved, right_ones
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.benchmarks.tuning.expert_tiles import random_weights
from nsa_backend.kernels import down_rows, early_experts, whole_experts
from nsa_backend.kernels.down_rows import Tile as RowsTile
from nsa_backend.kernels.few_experts import MOST_TOKENS, ONE, SOME, ExpertWeights, Tile, few_experts, problem, tile_for
from nsa_backend.testing.process import start_sglang

GROUP = 128


@dataclass(frozen=True)
class Shape:
    """Experts of one layer on one GPU, and how tokens choose them."""

    experts: int  # that the GPU has
    width: int
    hidden: int
    routed: int  # on all GPUs, of which a token chooses
    chosen: int = 8

    @property
    def gpus(self) -> int:
        """That divide the experts that tokens choose."""
        return max(1, self.routed // self.experts)

    @property
    def always(self) -> int:
        """Shared experts that SGLang has put among the others."""
        return max(0, self.experts - self.routed)


RANKS = {
    "v3.2-tp8": Shape(256, 256, 7168, 256),
    "v3.2-tp16": Shape(256, 128, 7168, 256),
    "v3.2-tp4": Shape(256, 512, 7168, 256),
    "glm-5-tp8": Shape(257, 256, 6144, 256),
    "v3.2-ep8": Shape(32, 2048, 7168, 256),  # tokens are those of all ranks, most of whose experts are elsewhere
}
BYTES_PER_US = 4.0e6
REPEATS, SAMPLES = 6, 5
TOO_FAR = 1e-2
SKEW = 1.0
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
FEW_TOKENS = 256

Config = dict[str, Any]
NAMES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")


def config(*values: int, bulk: bool = False) -> Config:
    return dict(zip(NAMES, values, strict=True)) | ({"USE_TMA": True} if bulk else {})


TILES_FEW = [(16, n, 128, group, 4, stages) for n in (64, 128) for group in (1, 16) for stages in (3, 4, 5)]
TILES_FEW += [(16, 128, 128, 1, 8, 4), (32, 64, 128, 1, 4, 4), (32, 128, 128, 1, 4, 4)]
TILES_MANY = [(32, 64, 128, 1, 4, 4), (32, 128, 128, 1, 4, 4), (64, 64, 128, 1, 4, 4), (128, 64, 128, 16, 4, 4)]
TILES_MANY += [(32, 128, 128, 1, 4, 3), (64, 128, 128, 1, 4, 3), (64, 128, 128, 64, 4, 3), (64, 128, 128, 16, 4, 4)]
TILES_MANY += [(64, 256, 128, 1, 8, 3), (128, 128, 128, 1, 8, 3)]


def firsts_for(tokens: int) -> list[Config]:
    """Configs of the first product."""
    tiles = TILES_FEW if tokens <= FEW_TOKENS else TILES_MANY
    return [config(*tile, bulk=bulk) for tile in tiles for bulk in (False, True)]


def seconds_of(first: Config) -> list[Config]:
    """Configs of the second product behind rows that were sorted for `first`."""
    rows = first["BLOCK_SIZE_M"]
    columns, deep = ((64, 128, 256), (2, 3, 4)) if rows == 16 else ((128,), (2, 3))
    return [
        config(rows, n, k, group, 4, stages, bulk=bulk)
        for n, k, group, stages, bulk in itertools.product(columns, (64, 128), (1, 16), deep, (True, False))
        if bulk or (n, k) == (128, 128)
    ]


def name_of(first: Config, second: Config | None = None) -> str:
    """As a report has it."""
    values = [tuple(one.values()) for one in (first, second) if one]
    return " then ".join(str(tile[:6]) + " bulk" * (len(tile) > 6) for tile in values)


@contextmanager
def choosing_tiles(lookup: Callable) -> Iterator[None]:
    """While SGLang's experts have the tiles that `lookup` gives."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    kept, fused_moe.try_get_optimal_moe_config = fused_moe.try_get_optimal_moe_config, lookup
    try:
        yield
    finally:
        fused_moe.try_get_optimal_moe_config = kept


class Rank:
    """Experts of one layer with random weights."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.weights = self._weights(shape.experts)

    @property
    def filtered(self) -> bool:
        """Whether tokens may choose experts of another GPU."""
        return self.shape.gpus > 1

    def _weights(self, experts: int) -> ExpertWeights:
        width, hidden = self.shape.width, self.shape.hidden
        return ExpertWeights(*random_weights(experts, 2 * width, hidden), *random_weights(experts, hidden, width))

    def one(self) -> ExpertWeights:
        """Of one expert more."""
        return ExpertWeights(*(tensor[0] for tensor in self._weights(1)[:4]))

    def routed(self, tokens: int, skew: float = 0.0, alike: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, experts) of each token; -1 is an expert of another GPU.

        With `skew` experts have odds of exp(skew * z), z normal: of 1, every sixth has 2.7 times the odds of the median one.
        Where `alike` all tokens choose half of those that the first one would.
        """
        shape = self.shape
        odds = torch.rand(tokens, shape.routed, device="cuda").log() / torch.exp(
            skew * torch.randn(shape.routed, device="cuda")
        )
        if alike:
            odds[:, odds[0].topk(shape.chosen // 2).indices] = 0.0
        weights, chosen = odds.exp().topk(shape.chosen)
        if self.filtered:
            chosen[chosen >= shape.experts] = -1
            chosen[0, 0] = 0  # so that this GPU has something to do
        always = torch.arange(shape.routed, shape.routed + shape.always, device="cuda").expand(tokens, -1)
        return torch.cat([weights, torch.full_like(always, 0.4, dtype=torch.float32)], 1), torch.cat([chosen, always], 1).int()

    def call(self, x: torch.Tensor, routed: tuple[torch.Tensor, torch.Tensor], lookup: Callable) -> Callable[[], torch.Tensor]:
        """SGLang's experts where `lookup` chooses their configs."""
        from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

        def run() -> torch.Tensor:
            with choosing_tiles(lookup):
                return fused_moe.outplace_fused_experts(
                    x, self.weights.first, self.weights.second, *routed, w1_scale=self.weights.first_scales,
                    w2_scale=self.weights.second_scales, block_shape=[GROUP, GROUP], use_fp8_w8a8=True,
                    routed_scaling_factor=1.0, filter_expert=self.filtered,
                )  # fmt: skip

        return run


CHANGES = [
    *({"values": values, "step": step} for values, step in ((4, 512), (8, 512), (8, 1024), (4, 1024), (16, 512))),
    *({"stages": stages} for stages in (2, 4, 5)),
    *({"warps": warps} for warps in (2, 8)),
    *({"sums": sums} for sums in (4, 16, 32)),
    *({"sum_warps": warps} for warps in (2, 8)),
    *({"ahead": ahead} for ahead in (False, True)),
]
BASES = ONE, SOME
WITH_SHARED = [*BASES, *(replace(SOME, **change) for change in ({"sums": 32}, {"warps": 2}, {"sums": 16}))]
"""Tiles of launches that have the shared expert among the others."""
EARLY = "by tensor cores"
AMONG = ", shared among them"
WHOLE = "one launch"
"""Of `--between`: both products, as a server has them."""
FEW_TILES = list(dict.fromkeys([*BASES, *(replace(tile, **change) for tile in BASES for change in CHANGES)]))


def few(
    rank: Rank,
    tokens: int,
    ways: dict[str, Callable],
    tiles: Sequence[Tile] = FEW_TILES,
    alike: bool = False,
    shared: bool = False,
) -> tuple[dict[str, float], dict[str, str]]:
    """Of both launches by tile and of SGLang's experts by lookup: microseconds a call, and what is wrong.

    Where `shared` each call has the shared expert on another stream, by SGLang's layer, or among the others.
    """
    if tokens > MOST_TOKENS or problem(rank.shape.hidden, rank.shape.width):
        return {}, {}
    x = torch.randn(tokens, rank.shape.hidden, device="cuda").bfloat16()
    routings = [rank.routed(tokens, alike=alike) for _ in range(REPEATS)]
    calls = {name: [rank.call(x, routed, lookup) for routed in routings] for name, lookup in ways.items()}
    given = x, rank.weights
    for tile in tiles:
        calls[str(tile)] = [lambda tile=tile, routed=routed: few_experts(*given, *routed, tile=tile) for routed in routings]
    among = None
    if shared:
        beside = Beside(rank, x)
        calls = {name: [beside.having(call) for call in some] for name, some in calls.items()}
        for tile in WITH_SHARED:
            calls[f"{tile}{AMONG}"] = [
                lambda tile=tile, routed=routed: few_experts(*given, *routed, shared=beside.expert, tile=tile)
                for routed in routings
            ]
        among = beside.expert
    form = rank.shape.hidden, rank.shape.width, routings[0][1].shape[1], int(shared)
    if early_experts.problem(*form) is None:
        calls[EARLY + AMONG * shared] = [
            lambda routed=routed: early_experts.early_experts(*given, *routed, shared=among) for routed in routings
        ]
    return timed(calls, calls["sglang"][0]().float())


class Beside:
    """A layer's shared expert, of random weights, on a stream of its own."""

    def __init__(self, rank: Rank, x: torch.Tensor):
        from sglang.srt.layers.activation import SiluAndMul

        self.x, self.activation, self.side = x, SiluAndMul(), SideStream(torch.cuda.Stream())
        self.expert = rank.one()

    def having(self, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """`call`, beside it the shared expert, and the sum of both."""

        def both() -> torch.Tensor:
            self.side.fork()
            found = call()
            with self.side.running():
                kept = self.run()  # until both streams have met
            self.side.join()
            found += kept[-1]
            return found

        return both

    def run(self) -> list[torch.Tensor]:
        """As a block-FP8 MLP of SGLang's on Hopper: every tensor that it makes here."""
        from sglang.srt.layers.quantization.fp8_utils import deepgemm_w8a8_block_fp8_linear_with_fallback as linear

        both = linear(self.x, self.expert.first, [GROUP, GROUP], self.expert.first_scales)
        inner = self.activation(both)
        return [both, inner, linear(inner, self.expert.second, [GROUP, GROUP], self.expert.second_scales)]


def lookup_of(first: Config, second: Config | None = None) -> Callable:
    """In place of SGLang's lookup, which returns a config, and one of the second product with its rows."""
    return lambda *_, **__: (dict(first), (dict(second) if second else None, first["BLOCK_SIZE_M"]))


Calls = Sequence[Callable[[], torch.Tensor]]


def timed(calls: dict[str, Calls], wanted: torch.Tensor) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds a call of each way, whose calls take turns and whose first is right; and what is wrong with the others."""
    right, wrong = right_ones(
        calls, lambda some: float((some[0]().float() - wanted).norm() / wanted.norm()), TOO_FAR, "SGLang's"
    )
    graphs = {
        name: captured_graph(lambda some=some: [some[turn % len(some)]() for turn in range(REPEATS)])
        for name, some in right.items()
    }
    times = interleaved({name: graph.replay for name, graph in graphs.items()}, REPEATS, SAMPLES)
    return {name: round(us, 2) for name, (us, _) in times.items()}, wrong


def cell(name: str, rank: Rank, tokens: int) -> dict:
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import try_get_optimal_moe_config

    shape = rank.shape
    x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
    routed = rank.routed(tokens)
    sglang = [rank.call(x, routed, try_get_optimal_moe_config)]
    wanted = sglang[0]().float()
    firsts = {name_of(first): first for first in firsts_for(tokens)}
    alone = {tiles: [rank.call(x, routed, lookup_of(first))] for tiles, first in firsts.items()}
    found, wrong = timed({"sglang": sglang} | alone, wanted)
    best = firsts[min(found.keys() & firsts, key=found.get)]
    pairs = {name_of(best, second): (best, second) for second in seconds_of(best)}
    more, wrong_more = timed({tiles: [rank.call(x, routed, lookup_of(*pair))] for tiles, pair in pairs.items()}, wanted)
    fastest = min(more, key=more.get)
    different = int((routed[1].unique() >= 0).sum())
    first, second = looked_up(shape, tokens)
    skewed = rank.routed(tokens, SKEW)
    ways = {
        "sglang": [rank.call(x, skewed, try_get_optimal_moe_config)],
        "best": [rank.call(x, skewed, lookup_of(*pairs[fastest]))],
    }
    again, wrong_again = timed(ways, ways["sglang"][0]().float())
    of_few, wrong_few = few(rank, tokens, {"sglang": try_get_optimal_moe_config, "best": lookup_of(*pairs[fastest])})
    return (
        named(name, shape, tokens)
        | {
            "chosen": different,
            "us": found | more,
            "skewed_us": again,
            "best": {"name": fastest, "first": pairs[fastest][0], "second": pairs[fastest][1]},
            "sglang": {"first": first, "second": second},
            "floor_us": round(different * 3 * shape.width * shape.hidden / BYTES_PER_US, 2),
            "wrong": wrong | wrong_more | wrong_again | wrong_few,
        }
        | ({"few_us": of_few} if of_few else {})
    )


def few_cell(name: str, rank: Rank, tokens: int) -> dict:
    """Both launches beside SGLang's experts alone."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import try_get_optimal_moe_config

    shape = rank.shape
    ways = {"sglang": try_get_optimal_moe_config}
    if tiles := shipped(shape, tokens):
        ways["shipped"] = lookup_of(*tiles)
    us, wrong = few(rank, tokens, ways)
    default = tile_for(tokens)
    alike_us, wrong_alike = few(rank, tokens, ways, [default], alike=True)
    floor = tokens * (shape.chosen + shape.always) * 3 * shape.width * shape.hidden / BYTES_PER_US
    found = {
        "floor_us": round(floor, 2),
        "served": str(default),
        "few_us": us,
        "alike_us": alike_us,
        "wrong": wrong | wrong_alike,
    }
    if not shape.always:
        found["beside_us"], wrong_beside = few(rank, tokens, ways, shared=True)
        found["wrong"] |= {f"{way}, beside": what for way, what in wrong_beside.items()}
    return named(name, shape, tokens) | found


def as_served(
    rank: Rank, x: torch.Tensor, routed: tuple[torch.Tensor, torch.Tensor], lookup: Callable
) -> Callable[[], torch.Tensor]:
    """This package's launches as a server has them, and `Rank.call`; `lookup` is for products that are SGLang's."""

    def run() -> torch.Tensor:
        with choosing_tiles(lookup):
            out = torch.empty_like(x)
            return expert_products.run(x, rank.weights, *routed, out, factor=1.0, filtered=rank.filtered, gpus=rank.shape.gpus)

    return run


def around(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`call` with launches around SGLang's products, where a server may have both in one launch."""
    return patch.object(whole_experts, "problem", lambda *_: "SGLang's products are timed")(call)


def between_cell(name: str, rank: Rank, tokens: int) -> dict:
    """SGLang's experts on its tiles and on ours, with this package's launches around the products, and with both in one."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import try_get_optimal_moe_config

    tiles = shipped(rank.shape, tokens)
    ways = {"sglang": try_get_optimal_moe_config} | ({"shipped": lookup_of(*tiles)} if tiles else {})
    x = torch.randn(tokens, rank.shape.hidden, device="cuda").bfloat16()
    routings = [rank.routed(tokens) for _ in range(REPEATS)]
    calls = {way: [rank.call(x, routed, lookup) for routed in routings] for way, lookup in ways.items()}
    for way, lookup in ways.items():
        calls[f"{way}, both launches"] = [around(as_served(rank, x, routed, lookup)) for routed in routings]
    if expert_products.has_one_launch(x, rank.weights, routings[0][1].shape[1], rank.shape.gpus):
        calls[WHOLE] = [as_served(rank, x, routed, try_get_optimal_moe_config) for routed in routings]
    us, wrong = timed(calls, calls["sglang"][0]().float())
    return named(name, rank.shape, tokens) | {"between_us": us, "wrong": wrong}


FIRSTS_OF_MANY = [(128, 128, 128, 16, 8, 3), (128, 128, 128, 16, 8, 4)]
"""Tiles of the first product beside those that are shipped, for blocks of more rows."""
WALKS = [
    RowsTile(columns, steps, warps, stages)
    for columns, steps, warps, stages in (
        (128, 4, 4, 3), (128, 14, 4, 2), (128, 8, 8, 2), (64, 8, 4, 3), (64, 16, 4, 2), (64, 16, 4, 4), (64, 32, 4, 3),
        (64, 16, 8, 3), (32, 32, 4, 3), (32, 32, 4, 4),
    )
]  # fmt: skip
"""Of our second product."""


def walked(call: Callable[[], torch.Tensor], tile: RowsTile | None = None, *, both: bool = False) -> Callable[[], torch.Tensor]:
    """`call` where our second product has this tile, its own where None, of any number of tokens, behind ours or SGLang's."""
    changed: list[tuple[Any, str, Any]] = [(shared_expert, "MANY", 1), (expert_products, "BOTH", 1 if both else math.inf)]
    changed += [(down_rows, "tile_for", lambda hidden: tile)] if tile else []
    for change in changed:
        call = patch.object(*change)(call)
    return call


def many_cell(name: str, rank: Rank, tokens: int) -> dict:
    """SGLang's experts on its tiles and on ours, with our second product behind the first of either, and both products ours."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import try_get_optimal_moe_config

    tiles = shipped(rank.shape, tokens)
    lookups = {"sglang": try_get_optimal_moe_config} | ({"shipped": lookup_of(*tiles)} if tiles else {})
    x, routed = torch.randn(tokens, rank.shape.hidden, device="cuda").bfloat16(), rank.routed(tokens)
    calls = {way: [rank.call(x, routed, lookup)] for way, lookup in lookups.items()}
    firsts = {way: lookup for way, lookup in lookups.items() if way == "shipped" or not tiles}
    firsts |= {str(first): lookup_of(config(*first)) for first in FIRSTS_OF_MANY}
    for (way, lookup), tile in itertools.product(firsts.items(), [None, *WALKS]):
        calls[f"{way}, ours" + (f", {tile}" if tile else "")] = [walked(as_served(rank, x, routed, lookup), tile)]
    calls["both ours"] = [walked(as_served(rank, x, routed, try_get_optimal_moe_config), both=True)]
    us, wrong = timed(calls, calls["sglang"][0]().float())
    return named(name, rank.shape, tokens) | {"many_us": us, "wrong": wrong}


def shipped(shape: Shape, tokens: int) -> tuple[Config, Config] | None:
    """Tiles of both products that this package has for this GPU and number of tokens, or None."""
    names = file_names(shape.experts, shape.width)
    first, second = (moe_configs.measured().get(name, {}).get(str(tokens)) for name in names)
    return (first, second) if first and second else None


def file_names(experts: int, width: int) -> list[str]:
    """What SGLang calls the files of the first product's tiles and of the second's, on this GPU."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_config_file_name

    return [get_config_file_name(experts, width, "fp8_w8a8", [GROUP, GROUP], down_moe=second) for second in (False, True)]


def named(name: str, shape: Shape, tokens: int) -> dict:
    """What a cell is of."""
    return {"rank": name, "experts": shape.experts, "width": shape.width, "hidden": shape.hidden, "tokens": tokens}


def looked_up(shape: Shape, tokens: int) -> tuple[Config, Config]:
    """Configs of both products that SGLang's lookup gives; one without a file of the second has the first's for both."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import try_get_optimal_moe_config

    weights = (shape.experts, 2 * shape.width, shape.hidden), (shape.experts, shape.hidden, shape.width)
    chosen = shape.chosen + shape.always
    first, (second, _) = try_get_optimal_moe_config(
        *weights, chosen, "fp8_w8a8", tokens, block_shape=[GROUP, GROUP], return_down_config=True
    )
    return first, second or first


def over_sglangs(row: dict) -> float:
    """Time of the best tiles of a row over that of SGLang's."""
    return row["us"][row["best"]["name"]] / row["us"]["sglang"]


def wins(row: dict) -> bool:
    """Whether the best tiles of a row take less time than SGLang's, and are right and faster with skewed choices too.

    A row of before skewed choices were timed has none.
    """
    skewed = row.get("skewed_us", {"best": 0.0, "sglang": 1.0})
    return over_sglangs(row) < 1 and skewed.get("best", math.inf) < skewed["sglang"]


def configs_of(rows: Sequence[dict]) -> dict[str, dict[str, Config]]:
    """Both files of this GPU, as SGLang calls them, of each number of experts: what is fastest at each number of tokens."""
    files: dict[str, dict[str, Config]] = {}
    for row in rows:
        for product, name in zip(("first", "second"), file_names(row["experts"], row["width"]), strict=True):
            files.setdefault(name, {})[str(row["tokens"])] = row["best" if wins(row) else "sglang"][product]
    return files


def write_configs(path: Path, triton: str, files: dict[str, dict[str, Config]]) -> None:
    """Put `files` beside those of other GPUs and Tritons in `path`."""
    every = json.loads(path.read_text()) if path.exists() else {}
    every[triton] = every.get(triton, {}) | files
    path.write_text(json.dumps(every, indent=1) + "\n")


def show_few(found: list[dict]) -> None:
    for row in found:
        print(row["rank"], row["tokens"], "tokens, floor", row["floor_us"], row["wrong"] or "", flush=True)
        beside = row.get("beside_us", {})
        ways = sorted(beside.keys() | row["few_us"], key=lambda way: beside.get(way) or row["few_us"][way])
        table = [(way + (" (served)" if way == row["served"] else ""), row["few_us"].get(way), beside.get(way)) for way in ways]
        print_table(("way", "us", "us beside a shared expert"), table)
        print("with half of their experts in common:", row["alike_us"], flush=True)


def show_ways(found: list[dict]) -> None:
    for row in found:
        print(row["rank"], row["tokens"], "tokens", row["wrong"] or "", flush=True)
        print_table(("way", "us"), sorted((row.get("between_us") or row["many_us"]).items(), key=lambda way: way[1]))


def show(found: list[dict]) -> None:
    table = [
        (row["rank"], row["tokens"], row["floor_us"], row["us"].get("sglang"), row["us"][row["best"]["name"]],
         row["best"]["name"], len(row["wrong"]))
        for row in found
    ]  # fmt: skip
    print_table(("rank", "tokens", "floor us", "SGLang's us", "best us", "best", "wrong"), table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--configs", type=Path, help=f"to write, as {moe_configs.FILE.name}")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--few", action="store_true", help="this package's two launches beside SGLang's experts, no more tiles")
    help_between = "launches around SGLang's products, and both products in one, beside SGLang's, no tiles"
    kinds.add_argument("--between", action="store_true", help=help_between)
    kinds.add_argument("--many", action="store_true", help="our second product beside SGLang's, by tile")
    args = parser.parse_args()
    ways = {"few": (few_cell, show_few), "between": (between_cell, show_ways), "many": (many_cell, show_ways)}
    of_cell, told = next((way for kind, way in ways.items() if getattr(args, kind)), (cell, show))
    if of_cell is not cell and args.configs:
        parser.error("--few, --between and --many compare no tiles that --configs could write: leave one out")
    start_sglang()
    import triton

    found: list[dict] = []
    for name in args.ranks:
        rank = Rank(RANKS[name])
        for tokens in args.tokens:
            found.append(of_cell(name, rank, tokens))
            write_report(args.out, {"environment": environment(), "rows": found})
            if args.configs:
                write_configs(args.configs, triton.__version__, configs_of(found))
            told(found[-1:])


if __name__ == "__main__":
    main()
