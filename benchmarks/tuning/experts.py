"""Block-FP8 experts of a rank as SGLang's Triton runner calls them: which tiles are fastest, and the configs that follow.

    python benchmarks/tuning/experts.py OUT.json [--experts 256 257] [--tokens 1 2 4 ...] [--configs MOE_CONFIGS.json]

Tokens choose experts at random. Tiles of both products are compared first, then tiles of the second alone, with and without
bulk copies (TMA). Each is compared with what SGLang chooses before it is timed, beside the time that the bytes take. OUT.json
is written after every cell, and so is the file of `nsa_backend.adapters.moe_configs` where --configs names one.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nsa_backend.adapters import moe_configs
from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.testing.process import start_sglang

HIDDEN = {256: 7168, 257: 6144}
"""Columns of a token by experts: of DeepSeek-V3.2, and of GLM-5, whose shared expert SGLang puts among the others."""
ROUTED, WIDTH, CHOSEN, GROUP = 256, 256, 8, 128  # of one of eight ranks
BYTES_PER_US = 4.0e6
REPEATS, SAMPLES = 6, 5
TOO_FAR = 1e-2
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
FEW_TOKENS = 256

Config = dict[str, Any]
NAMES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")


def config(*values: int, bulk: bool = False) -> Config:
    return dict(zip(NAMES, values, strict=True)) | ({"USE_TMA": True} if bulk else {})


FIRST_FEW = [config(16, n, 128, group, 4, stages) for n in (64, 128) for group in (1, 16) for stages in (3, 4, 5)]
FIRST_FEW += [config(16, 128, 128, 1, 8, 4), config(32, 64, 128, 1, 4, 4), config(32, 128, 128, 1, 4, 4)]
FIRST_MANY = [config(*tile, 4, 4) for tile in ((32, 64, 128, 1), (32, 128, 128, 1), (64, 64, 128, 1), (128, 64, 128, 16))]
FIRST_MANY += [config(*tile, 4, 3) for tile in ((32, 128, 128, 1), (64, 128, 128, 1), (64, 128, 128, 64))]
FIRST_MANY += [config(64, 128, 128, 16, 4, 4), config(64, 256, 128, 1, 8, 3), config(128, 128, 128, 1, 8, 3)]


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


class Rank:
    """Experts of one layer with random weights; past `ROUTED`, every token has them all."""

    def __init__(self, experts: int):
        self.experts, self.hidden = experts, HIDDEN[experts]
        self.first = self._weights(2 * WIDTH, self.hidden)
        self.second = self._weights(self.hidden, WIDTH)

    def _weights(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        of_bytes = torch.randint(0x20, 0x40, (self.experts, rows, columns), device="cuda", dtype=torch.uint8)  # 0.06 to 1.9
        of_bytes = (of_bytes | torch.randint_like(of_bytes, 2) << 7).view(torch.float8_e4m3fn)
        scales = torch.rand(self.experts, rows // GROUP, columns // GROUP, device="cuda") * 1e-3
        return of_bytes, scales

    def routed(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, experts) of each token."""
        weights, chosen = torch.rand(tokens, ROUTED, device="cuda").topk(CHOSEN)
        always = torch.arange(ROUTED, self.experts, device="cuda").expand(tokens, -1)
        return torch.cat([weights, torch.full_like(always, 0.4, dtype=torch.float32)], 1), torch.cat([chosen, always], 1).int()

    def call(self, x: torch.Tensor, routed: tuple[torch.Tensor, torch.Tensor], lookup: Callable) -> Callable[[], torch.Tensor]:
        """SGLang's experts where `lookup` chooses their configs."""
        from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

        def run() -> torch.Tensor:
            kept, fused_moe.try_get_optimal_moe_config = fused_moe.try_get_optimal_moe_config, lookup
            try:
                return fused_moe.outplace_fused_experts(
                    x, self.first[0], self.second[0], *routed, w1_scale=self.first[1], w2_scale=self.second[1],
                    block_shape=[GROUP, GROUP], use_fp8_w8a8=True, routed_scaling_factor=1.0, filter_expert=False,
                )  # fmt: skip
            finally:
                fused_moe.try_get_optimal_moe_config = kept

        return run


def lookup_of(first: Config, second: Config | None = None) -> Callable:
    """In place of SGLang's lookup, which returns a config, and one of the second product with its rows."""
    return lambda *_, **__: (dict(first), (dict(second) if second else None, first["BLOCK_SIZE_M"]))


def timed(calls: dict[str, Callable[[], torch.Tensor]], wanted: torch.Tensor) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds of each call that is right, and what is wrong with the others."""
    graphs, wrong = {}, {}
    for name, call in calls.items():
        try:
            distance = float((call().float() - wanted).norm() / wanted.norm())
            if not distance < TOO_FAR:
                wrong[name] = f"relative distance {distance:.1e}"
                continue
            graphs[name] = captured_graph(lambda call=call: [call() for _ in range(REPEATS)])
        except Exception as error:  # whatever a compiler raises is this tile's finding
            wrong[name] = (str(error) or type(error).__name__).splitlines()[0][:100]
    times = interleaved({name: graph.replay for name, graph in graphs.items()}, REPEATS, SAMPLES)
    return {name: round(us, 2) for name, (us, _) in times.items()}, wrong


def cell(rank: Rank, tokens: int) -> dict:
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import try_get_optimal_moe_config

    x = torch.randn(tokens, rank.hidden, device="cuda").bfloat16()
    routed = rank.routed(tokens)
    sglang = rank.call(x, routed, try_get_optimal_moe_config)
    wanted = sglang().float()
    firsts = {name_of(first): first for first in (FIRST_FEW if tokens <= FEW_TOKENS else FIRST_MANY)}
    found, wrong = timed(
        {"sglang": sglang} | {name: rank.call(x, routed, lookup_of(first)) for name, first in firsts.items()}, wanted
    )
    best = firsts[min(found.keys() & firsts, key=found.get)]
    pairs = {name_of(best, second): (best, second) for second in seconds_of(best)}
    more, wrong_more = timed({name: rank.call(x, routed, lookup_of(*pair)) for name, pair in pairs.items()}, wanted)
    name = min(more, key=more.get)
    different = routed[1].unique().numel()
    return {
        "experts": rank.experts,
        "hidden": rank.hidden,
        "tokens": tokens,
        "chosen": different,
        "us": found | more,
        "best": {"name": name, "first": pairs[name][0], "second": pairs[name][1]},
        "floor_us": round(different * 3 * WIDTH * rank.hidden / BYTES_PER_US, 2),
        "wrong": wrong | wrong_more,
    }


def configs_of(rows: Sequence[dict], device: str) -> dict[str, dict[str, Config]]:
    """Both files, as SGLang calls them, of each number of experts: the best of each number of tokens."""
    files: dict[str, dict[str, Config]] = {}
    for row in rows:
        name = f"E={row['experts']},N={WIDTH},device_name={device},dtype=fp8_w8a8,block_shape=[{GROUP}, {GROUP}]"
        files.setdefault(f"{name}.json", {})[str(row["tokens"])] = row["best"]["first"]
        files.setdefault(f"{name}_down.json", {})[str(row["tokens"])] = row["best"]["second"]
    return files


def write_configs(path: Path, triton: str, files: dict[str, dict[str, Config]]) -> None:
    """Put `files` beside those of other GPUs and Tritons in `path`."""
    every = json.loads(path.read_text()) if path.exists() else {}
    every[triton] = every.get(triton, {}) | files
    path.write_text(json.dumps(every, indent=1) + "\n")


def show(found: list[dict]) -> None:
    table = [
        (row["experts"], row["tokens"], row["floor_us"], row["us"].get("sglang"), row["us"][row["best"]["name"]],
         row["best"]["name"], len(row["wrong"]))
        for row in found
    ]  # fmt: skip
    print_table(("experts", "tokens", "floor us", "SGLang's us", "best us", "best", "wrong"), table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, nargs="+", choices=HIDDEN, default=list(HIDDEN))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--configs", type=Path, help=f"to write, as {moe_configs.FILE.name}")
    args = parser.parse_args()
    start_sglang()
    import triton
    from sglang.srt.utils import get_device_name

    found: list[dict] = []
    for experts in args.experts:
        rank = Rank(experts)
        for tokens in args.tokens:
            found.append(cell(rank, tokens))
            write_report(args.out, {"environment": environment(), "rows": found})
            if args.configs:
                write_configs(args.configs, triton.__version__, configs_of(found, get_device_name().replace(" ", "_")))
            show(found[-1:])
    show(found)


if __name__ == "__main__":
    main()
