"""What stands between two halves of a layer: norms with quantisation, and routers of few rows, beside SGLang's launches.

    python benchmarks/tuning/routers.py OUT.json [--rows 1 2 4 8 16 32 64 128 2048 8192]

Weights of routers take turns, so that none is in the L2 cache. Routers are also timed behind a norm, which is ours or
SGLang's, since ours has its weights by the time that the norm is there. Every way is compared with SGLang's before it is timed.
OUT.json is written after every cell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from nsa_backend.adapters.dsa.layer_front.builtin import quantised
from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved, right_ones
from nsa_backend.benchmarks.reports.report import environment, print_table, write_report
from nsa_backend.kernels import add_norm as norms_of_ours
from nsa_backend.kernels.add_norm import add_norm
from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.kernels.router import EXPERTS, MOST_ROWS, SERVED, Choice, Division, counter, route
from nsa_backend.testing.process import start_sglang

MODELS = {"DeepSeek-V3.2": (7168, Choice(8, groups=8, kept=4)), "GLM-5": (6144, Choice(8, shared=True))}
DIVISIONS = SERVED, Division(8, 4), Division(16, 4)
EACH = 1, 2, 4
"""Of eight values that a thread of a norm has."""
COLD_BYTES, SAMPLES, REPEATS, EPS = 300 << 20, 5, 64, 1e-6
TOO_FAR = 1e-2

Call = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Layers:
    """Rows, and norms and gates of as many layers as L2 does not hold."""

    hidden: int
    choice: Choice
    rows: int

    def __post_init__(self):
        from sglang.srt.models.deepseek_v2 import MoEGate

        config = SimpleNamespace(n_routed_experts=EXPERTS, hidden_size=self.hidden, topk_method="noaux_tc")
        self.x, self.residual = torch.randn(2, self.rows, self.hidden, device="cuda").bfloat16()
        self.norm = torch.ones(self.hidden, device="cuda").bfloat16()
        self.gates: list[Any] = []
        for _ in range(COLD_BYTES // (EXPERTS * self.hidden * 2)):
            gate = MoEGate(config, None).to("cuda").bfloat16()
            gate.weight.data.normal_(std=self.hidden**-0.5)
            gate.e_score_correction_bias.data = torch.randn(EXPERTS, device="cuda") / 8
            self.gates.append(gate)
        self.arrived = {division: counter(torch.device("cuda")) for division in DIVISIONS}

    def gate(self, i: int) -> Any:
        return self.gates[i % len(self.gates)]

    def ours(self, x: torch.Tensor, i: int, division: Division = SERVED) -> tuple[torch.Tensor, torch.Tensor]:
        """(shares, chosen)."""
        gate = self.gate(i)
        given = x, gate.weight.data, gate.e_score_correction_bias.data, self.choice, self.arrived[division]
        return route(*given, division=division)[1:]

    def sglangs(self, x: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        from sglang.srt.layers.moe.topk import biased_grouped_topk

        gate, of = self.gate(i), self.choice
        return biased_grouped_topk(
            x, gate(x), gate.e_score_correction_bias, of.chosen + of.shared, True, of.groups, of.kept,
            num_fused_shared_experts=int(of.shared), routed_scaling_factor=1.0,
        )  # fmt: skip


def runners(layers: Layers) -> dict[str, dict[str, Call]]:
    """By what is computed, who computes it, with the i-th weights."""
    from sglang.srt.layers.layernorm import fused_add_rmsnorm

    served = norms_of_ours.EACH

    def normed(ours: bool, each: int = served, **options: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        x, found = layers.x.clone(), None  # a copy, in its place the norm
        residual = layers.residual.clone()
        if ours:
            norms_of_ours.EACH = each
            found = add_norm(x, residual, layers.norm, EPS, **options)
            norms_of_ours.EACH = served
        else:
            fused_add_rmsnorm(x, residual, layers.norm, EPS)
        return x, found

    norms: dict[str, dict[str, Call]] = {
        "norm": {"SGLang's": lambda i: normed(False)} | {
            f"add_norm {each}": lambda i, each=each: normed(True, each) for each in EACH
        },
        "norm, quantise": {"SGLang's": lambda i: quantised(normed(False)[0], Scales.EXACT)} | {
            f"add_norm {each}": lambda i, each=each: normed(True, each, scales=Scales.EXACT)[1] for each in EACH
        },
    }  # fmt: skip
    if layers.rows > MOST_ROWS:
        return norms
    return norms | {
        "router": {
            "SGLang's": lambda i: layers.sglangs(layers.x, i),
        }
        | {
            str(division): lambda i, division=division: layers.ours(layers.x, i, division)
            for division in DIVISIONS
            if division.chunks(layers.hidden)
        },
        "norm, router": {
            "SGLang's": lambda i: layers.sglangs(normed(False)[0], i),
            "router": lambda i: layers.ours(normed(False)[0], i),
            "add_norm, router": lambda i: layers.ours(normed(True, before_ours=True)[0], i),
        },
    }


def dense(shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """float32 [rows, experts and a shared one]: every expert's share."""
    return torch.zeros(len(chosen), EXPERTS + 1, device="cuda").scatter(1, chosen.long(), shares)


def cell(model: str, what: str, rows: int, calls: dict[str, Call]) -> dict:
    """Microseconds of every way that is right; where there is a norm, with two copies of rows, in whose place it is."""

    def one(call: Call) -> torch.Tensor:
        found = call(0)
        if found[1] is None:
            return found[0].float()
        return dense(*found) if found[1].dtype == torch.int32 else found[0].float() * found[1].repeat_interleave(128, 1)

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
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 2048, 8192])
    args = parser.parse_args()
    start_sglang()
    found: list[dict] = []
    for model, (hidden, choice) in MODELS.items():
        for rows in args.rows:
            layers = Layers(hidden, choice, rows)
            for what, calls in runners(layers).items():
                found.append(cell(model, what, rows, calls))
                write_report(args.out, {"environment": environment(), "rows": found})
                print(found[-1], flush=True)
    print_table(("model", "what", "rows", "us"), [(row["model"], row["what"], row["rows"], str(row["us"])) for row in found])


if __name__ == "__main__":
    main()
