"""Products of few rows with a weight of each head's own, with what SGLang does in a second launch.

    python benchmarks/tuning/heads.py OUT.json [--rows 1 4 8 16 24 32]

Values are quantised for o_proj, whose product is behind them too; of a query the rest is turned beside its product. Weights
take turns, so that none is in the L2 cache. Every way is compared with SGLang's before it is timed. OUT.json is written after
every cell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa_backend.adapters.dsa.layer_front.builtin import quantised
from nsa_backend.adapters.dsa.layer_front.streams import SideStream
from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved, right_ones
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.kernels.early_products import MOST_ROWS, early_products
from nsa_backend.kernels.head_products import LATENT, head_queries, head_values
from nsa_backend.kernels.layer_front_weights import GROUP, FrontWeights, Scales
from nsa_backend.kernels.rope_quantise import rope_query
from nsa_backend.kernels.tile_products import tile_products
from nsa_backend.kernels.value_products import value_counters, value_products
from nsa_backend.testing.process import start_sglang

MODELS = {"DeepSeek-V3.2": (16, 128, 128, 7168), "GLM-5": (8, 192, 256, 6144)}
"""Heads of a rank under tensor parallel 8; values of a head of keys that are not turned, and of values; hidden size."""
POSITIONS, ROPE = 4096, 64
COLD_BYTES, SAMPLES, REPEATS = 300 << 20, 5, 64
TOO_FAR = 1e-2

Call = Callable[[int], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Layers:
    """What attention gives and takes in so many rows, and weights of as many layers as L2 does not hold."""

    heads: int
    inner: int
    width: int
    hidden: int
    rows: int

    def __post_init__(self):
        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda").bfloat16()

        self.attended = drawn(self.rows, self.heads, LATENT)
        self.q_nope, self.q_rope = drawn(self.rows, self.heads, self.inner + ROPE).split([self.inner, ROPE], -1)
        values, groups = self.heads * self.width, self.heads * self.width // GROUP
        copies = range(COLD_BYTES // (values * self.hidden))
        self.keys = [drawn(self.heads, LATENT, self.inner).transpose(1, 2) for _ in copies]
        self.values = [drawn(self.heads, self.width, LATENT).transpose(1, 2) for _ in copies]
        self.outputs = [
            (drawn(self.hidden, values).to(torch.float8_e4m3fn), torch.rand(self.hidden // GROUP, groups, device="cuda"))
            for _ in copies
        ]
        self.counters = value_counters(self.values[0])
        angles, norm = torch.rand(POSITIONS, ROPE // 2, device="cuda") * 6.28, drawn(LATENT)
        table = torch.cat((angles.cos(), angles.sin()), -1)
        self.front = FrontWeights(norm, norm, None, None, table, None, 1e-6, 1e-6, 0.0, False)
        self.positions = torch.randint(POSITIONS, (self.rows,), device="cuda")
        self.side = SideStream(torch.cuda.Stream())

    def multiplied(self, x: torch.Tensor, weights: list[torch.Tensor], i: int) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), weights[i % len(weights)]).transpose(0, 1)

    def query(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.side.fork()
        turned = rope_query(self.q_rope, self.front, self.positions)
        with self.side.running():
            absorbed = self.multiplied(self.q_nope, self.keys, i)
        self.side.join()
        return absorbed, turned

    def output(self, values: tuple[torch.Tensor, torch.Tensor], i: int) -> torch.Tensor:
        multiply = early_products if self.rows <= MOST_ROWS else tile_products
        return multiply(*values, self.outputs[i % len(self.outputs)])[0]


def runners(layers: Layers) -> dict[str, dict[str, Call]]:
    """By what is computed, who computes it, with the i-th weights."""

    def weight(i: int) -> torch.Tensor:
        return layers.values[i % len(layers.values)]

    values: dict[str, Call] = {
        "SGLang's": lambda i: quantised(layers.multiplied(layers.attended, layers.values, i).flatten(1), Scales.EXACT),
        "value_products": lambda i: value_products(layers.attended, weight(i), Scales.EXACT, layers.counters),
        "head_values": lambda i: head_values(layers.attended, weight(i), Scales.EXACT),
    }
    early = {
        "head_values": lambda i: head_values(
            layers.attended, weight(i), Scales.EXACT, before_ours=layers.rows <= MOST_ROWS
        ),
    }  # fmt: skip
    return {
        "values": values,
        "values, o_proj": {
            name: lambda i, call=call: layers.output(call(i), i) for name, call in (values | early).items()
        },
        "queries": {
            "SGLang's": layers.query,
            "head_queries": lambda i: head_queries(
                layers.q_nope, layers.q_rope, layers.keys[i % len(layers.keys)], layers.front, layers.positions
            ),
        },
    }  # fmt: skip


def cell(model: str, what: str, rows: int, calls: dict[str, Call]) -> dict:
    """Microseconds of every way that is right."""

    def one(call: Call) -> torch.Tensor:
        found = call(0)
        if isinstance(found, torch.Tensor):
            return found.float()
        if found[0].dtype == torch.float8_e4m3fn:
            return found[0].float() * found[1].repeat_interleave(GROUP, 1)
        return torch.cat([part.float().flatten() for part in found])

    wanted = one(calls["SGLang's"])
    right, wrong = right_ones(calls, lambda call: float((one(call) - wanted).norm() / wanted.norm()), TOO_FAR, "SGLang's")
    graphs = {name: captured_graph(lambda call=call: [call(i) for i in range(REPEATS)]) for name, call in right.items()}
    times = interleaved({name: graph.replay for name, graph in graphs.items()}, REPEATS, SAMPLES)
    return {
        "model": model, "what": what, "rows": rows, "us": {name: round(us, 2) for name, (us, _) in times.items()},
        "min_max": {name: [round(us, 2) for us in spread] for name, (_, spread) in times.items()}, "wrong": wrong,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 24, 32])
    args = parser.parse_args()
    start_sglang()
    found: list[dict] = []
    for model, shape in MODELS.items():
        for rows in args.rows:
            for what, calls in runners(Layers(*shape, rows)).items():
                found.append(cell(model, what, rows, calls))
                write_report(args.out, {"environment": environment(), "rows": found})
    ways = sorted({name for row in found for name in row["us"]})
    table = [(row["model"], row["what"], row["rows"], *(row["us"].get(way) for way in ways)) for row in found]
    print_table(("model", "what", "rows", *ways), table)


if __name__ == "__main__":
    main()
