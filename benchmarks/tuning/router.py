"""A MoE layer's router of few tokens: SGLang's gate and choice of experts beside this package's one launch, in some tiles.

    python benchmarks/tuning/router.py OUT.json [--ranks v3.2-tp8 glm-5-tp8] [--tokens 1 2 4 8 16]

SGLang's is its own layer's gate and `TopK`, which a server calls. Each call has another layer's weights than the one before, so
that no call finds them in L2, and ways take turns. A tile that does not choose as SGLang does for all these layers is said to
be wrong, though it is timed; a row in a hundred may tie within the rounding of sums. OUT.json is written after every cell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from nsa_backend.adapters import router as adapter
from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.kernels.router import Choice, Routed, Tile, counter, route, tile_for
from nsa_backend.testing.process import start_sglang


@dataclass(frozen=True)
class Shape:
    """A model's router."""

    hidden: int
    groups: int
    kept: int
    shared: int  # experts that SGLang has put among the others
    experts: int = 256
    routed: int = 8


RANKS = {"v3.2-tp8": Shape(7168, 8, 4, 0), "glm-5-tp8": Shape(6144, 1, 1, 1)}
TOKENS = (1, 2, 4, 8, 16)
LAYERS = 32
"""Whose weights are 100 MB and more, and an H200's L2 has 60."""
SAMPLES = 9
BYTES_PER_US = 4.0e6
ROWS_THAT_TIE = 0.01
SHARES_APART = 1e-3
"""Of equal choices, relative; logits that sum in another order move a share by less."""
SUMS = [
    *(Tile(1, warps=warps) for warps in (1, 2, 4)),
    *(Tile(2, warps=warps) for warps in (2, 4, 8)),
    *(Tile(2, 2, 512, warps) for warps in (1, 2)),
    *(Tile(4, 4, 256, warps) for warps in (1, 2, 4)),
]
DOTS = [
    *(Tile(16, 8, 128, warps, dots=True) for warps in (2, 4, 8)),
    *(Tile(16, 16, 64, warps, dots=True) for warps in (1, 2, 4)),
    *(Tile(32, 16, 64, warps, dots=True) for warps in (4, 8)),
    Tile(64, 32, 32, 4, dots=True),
]
MOST_ROWS_OF_SUMS = 4
"""Beyond these tensor cores take less time; a warp has registers for the choices of as many rows."""


def tiles_for(tokens: int) -> list[Tile]:
    """Those to compare, the one that a server takes first."""
    some = [*SUMS, *DOTS] if tokens <= MOST_ROWS_OF_SUMS else [replace(SUMS[-1], splits=8, values=8, step=128), *DOTS]
    fitting = [tile for tile in some if tokens <= MOST_ROWS_OF_SUMS * tile.warps]
    return list(dict.fromkeys([tile_for(tokens), *fitting]))


class Layer:
    """SGLang's gate and `TopK` of a layer, and what the launch needs of it."""

    def __init__(self, shape: Shape, number: int = 0, device: str = "cuda"):
        from sglang.srt.configs.shared_experts import SharedExpertsConfig
        from sglang.srt.layers.moe.topk import TopK, TopKOutputFormat
        from sglang.srt.models.deepseek_v2 import MoEGate

        config = SimpleNamespace(n_routed_experts=shape.experts, hidden_size=shape.hidden, topk_method="noaux_tc")
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            self.gate = MoEGate(config, None).to(device)
        finally:
            torch.set_default_dtype(default)
        with torch.no_grad():
            self.gate.weight.copy_(torch.randn(shape.experts, shape.hidden, device=device) * shape.hidden**-0.5)
            self.gate.e_score_correction_bias.copy_(torch.randn(shape.experts, device=device) / 16)
        self.topk = TopK(
            top_k=shape.routed, layer_id=number, is_draft=False, use_grouped_topk=True, num_expert_group=shape.groups,
            topk_group=shape.kept, renormalize=True, scoring_func="sigmoid", routed_scaling_factor=2.5,
            correction_bias=self.gate.e_score_correction_bias, output_format=TopKOutputFormat.STANDARD,
        )  # fmt: skip
        if shape.shared:  # as where the model that is loaded has them so
            self.topk.topk_config.top_k = shape.routed + shape.shared
            self.topk.topk_config.shared_experts = SharedExpertsConfig(num_fused_shared_experts=shape.shared)
        self._enable_a2a_moe = False
        self.arrived = counter(self.gate.weight)

    def by_sglang(self, x: torch.Tensor) -> Routed:
        """As `DeepseekV2MoE` asks for it."""
        found = self.topk.forward_cuda(x, self.gate(x))
        return Routed(found.topk_weights, found.topk_ids, found.router_logits)

    def choice(self) -> Choice:
        """As a server would have it.

        Raises:
            RuntimeError: a server would leave this layer to SGLang.
        """
        if (choice := adapter.choice_of(self)) is None:
            raise RuntimeError("the adapter leaves this layer to SGLang: what is timed would be served nowhere")
        return choice

    def by_launch(self, x: torch.Tensor, choice: Choice, tile: Tile | None = None, *, before_ours: bool = False) -> Routed:
        bias = self.gate.e_score_correction_bias.data
        return route(x, self.gate.weight.data, bias, self.arrived, choice, tile, before_ours=before_ours)


def apart(found: list[Routed], wanted: list[Routed]) -> str | None:
    """What is wrong with choices, or None."""
    chosen, other = (torch.cat([routed.chosen for routed in some]) for some in (found, wanted))
    alike = (chosen == other).all(dim=1)
    tied = float((~alike).sum() / len(alike))
    shares, others = (torch.cat([routed.shares for routed in some])[alike] for some in (found, wanted))
    far = float(((shares - others).abs() / others.abs()).max()) if len(shares) else 1.0
    if tied <= ROWS_THAT_TIE + 1 / len(alike) and far <= SHARES_APART:  # one row may always tie
        return None
    return f"{tied:.1%} of rows choose otherwise, shares of the others are up to {far:.1e} apart"


def cell(name: str, layers: list[Layer], shape: Shape, tokens: int) -> dict:
    """Microseconds of a router by each way, of one that is captured behind those of other layers."""
    xs = [torch.randn(tokens, shape.hidden, device="cuda").bfloat16() for _ in layers]
    choice = layers[0].choice()
    ways: dict[str, Callable[[], list[Routed]]] = {
        "sglang": lambda: [layer.by_sglang(x) for layer, x in zip(layers, xs, strict=True)]
    }
    for tile in tiles_for(tokens):
        ways[str(tile)] = lambda tile=tile: [layer.by_launch(x, choice, tile) for layer, x in zip(layers, xs, strict=True)]
    wanted, replays, wrong = ways["sglang"](), {}, {}
    for way, call in ways.items():
        try:
            problem = apart(call(), wanted)
            replays[way] = captured_graph(call).replay
        except Exception as error:  # whatever a compiler or a library raises is a finding
            problem = (str(error) or type(error).__name__).splitlines()[0]
        if problem is not None:
            wrong[way] = problem
    times = interleaved(replays, len(layers), SAMPLES)
    return {
        "rank": name, "tokens": tokens, "hidden": shape.hidden, "served": str(tile_for(tokens)),
        "floor_us": round(shape.experts * shape.hidden * 2 / BYTES_PER_US, 2),
        "us": {way: round(us, 2) for way, (us, _) in times.items()},
        "range_us": {way: [round(us, 2) for us in ends] for way, (_, ends) in times.items()},
        "wrong": wrong,
    }  # fmt: skip


def show(row: dict) -> None:
    print(row["rank"], row["tokens"], "tokens, floor", row["floor_us"], row["wrong"] or "", flush=True)
    named = [(way + (" (served)" if way == row["served"] else ""), us, *row["range_us"][way]) for way, us in row["us"].items()]
    print_table(("way", "us", "least", "most"), sorted(named, key=lambda line: line[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    args = parser.parse_args()
    start_sglang()
    found: list[dict] = []
    for name in args.ranks:
        layers = [Layer(RANKS[name], number) for number in range(LAYERS)]
        for tokens in args.tokens:
            found.append(cell(name, layers, RANKS[name], tokens))
            write_report(args.out, {"environment": environment(), "rows": found})
            show(found[-1])


if __name__ == "__main__":
    main()
