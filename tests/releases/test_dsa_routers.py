"""Routers of few tokens by one launch: choices are what SGLang's torch code has, and whatever else is asked stays SGLang's."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.adapters import routers
from nsa_backend.kernels.router_torch import route_torch
from nsa_backend.releases import FEW_EXPERTS, installed

if installed() not in FEW_EXPERTS:
    pytest.skip("the router of this release is another", allow_module_level=True)

from routed_experts import free_server
from sglang.srt.layers.moe import topk
from sglang.srt.models import deepseek_v2

HIDDEN, EXPERTS = 1024, 256
MODELS = {
    "DeepSeek-V3.2": {"top_k": 8, "num_expert_group": 8, "topk_group": 4},
    "GLM-5": {"top_k": 9, "num_expert_group": 1, "topk_group": 1, "shared": 1},
}


class Layer(deepseek_v2.DeepseekV2MoE):
    """A layer with a gate and what chooses, and no experts."""

    def __init__(self, top_k: int, shared: int = 0, scaled: bool = False, **options: object):
        torch.nn.Module.__init__(self)
        config = SimpleNamespace(n_routed_experts=EXPERTS, hidden_size=HIDDEN, topk_method="noaux_tc")
        self.gate = deepseek_v2.MoEGate(config, None)
        self.gate.weight.data = torch.randn(EXPERTS, HIDDEN).bfloat16() * HIDDEN**-0.5
        self.gate.e_score_correction_bias.data = torch.randn(EXPERTS) / 8
        self.topk = topk.TopK(
            top_k - shared, layer_id=0, use_grouped_topk=True, scoring_func="sigmoid", routed_scaling_factor=2.5,
            correction_bias=self.gate.e_score_correction_bias, apply_routed_scaling_factor_on_output=scaled,
            output_format=topk.TopKOutputFormat.STANDARD, **options,
        )  # fmt: skip
        self.topk.topk_config.top_k = top_k
        self.topk.topk_config.shared_experts = topk.SharedExpertsConfig(num_fused_shared_experts=shared)


@pytest.fixture
def launches(monkeypatch):
    """Rows of each launch, which is torch's here, of layers on the CPU."""
    free_server(monkeypatch)
    rows = []

    def route(hidden, weight, bias, choice, arrived, **factors):
        assert arrived.tolist() == [0]
        rows.append(len(hidden))
        return route_torch(hidden, weight, bias, choice, **factors)

    monkeypatch.setattr(routers, "DEVICES", ("cpu",))
    monkeypatch.setattr(routers.kernels, "route", route)
    monkeypatch.setattr(routers, "hook", lambda *_: None)
    monkeypatch.setattr(routers, "KEPT", routers.Kept())
    return rows


@pytest.fixture
def sglangs(monkeypatch):
    """What SGLang's torch code chose; it stands for its kernels."""
    asked = []

    def choose(*arguments, **options):
        asked.append(options)
        return topk.biased_grouped_topk_impl(*arguments, **options)

    choose.__signature__ = inspect.signature(topk.biased_grouped_topk_gpu)
    monkeypatch.setattr(topk, "biased_grouped_topk", partial(routers.chosen, choose))
    return asked


def chosen_by(layer: Layer, x: torch.Tensor, logits: torch.Tensor | None = None) -> topk.StandardTopKOutput:
    logits = layer.gate(x) if logits is None else logits
    return topk.select_experts(x, logits, layer.topk.topk_config, layer_id=0)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("which", MODELS)
def test_choices_are_sglangs(launches, sglangs, which, scaled):
    torch.manual_seed(0)
    layer, x = Layer(**MODELS[which], scaled=scaled), torch.randn(5, HIDDEN).bfloat16()
    assert routers.take(torch.nn.ModuleList([layer])) == 1
    found = chosen_by(layer, x)
    assert launches == [5]
    assert not sglangs
    wanted = chosen_by(layer, x, found.router_logits.clone())  # other logits, which nothing was kept for
    assert len(sglangs) == 1
    of_all = [torch.zeros(5, EXPERTS + 1).scatter(1, out.topk_ids.long(), out.topk_weights) for out in (found, wanted)]
    assert torch.allclose(*of_all, rtol=1e-5)
    assert torch.equal(*(shares > 0 for shares in of_all))
    assert torch.allclose(found.router_logits, x.float() @ layer.gate.weight.float().T, rtol=1e-4, atol=1e-4)


def test_more_rows_and_other_rows_are_sglangs(launches):
    layer, own = Layer(**MODELS["DeepSeek-V3.2"]), []
    layer.gate.forward = lambda x, *_: own.append(len(x))
    taken = routers.LayerRouter(layer)
    rows = torch.randn(64, HIDDEN).bfloat16()
    for x in (rows[:33], rows[:0], rows[:2].float(), rows[:8].repeat(1, 2)[:, :HIDDEN]):
        taken(x)
    assert own == [33, 0, 2, 8]
    assert not launches
    taken(rows[:32])
    assert launches == [32]


@pytest.mark.parametrize("name", ["topk", "topk_group", "num_fused_shared_experts", "routed_scaling_factor", "renormalize"])
def test_what_is_asked_in_another_form_is_sglangs(launches, sglangs, name):
    layer = Layer(**MODELS["DeepSeek-V3.2"])
    routers.take(torch.nn.ModuleList([layer]))
    x = torch.randn(2, HIDDEN).bfloat16()
    options = {
        "topk": 8, "renormalize": True, "num_expert_group": 8, "topk_group": 4, "num_fused_shared_experts": 0,
        "routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": False,
    }  # fmt: skip
    given = {"hidden_states": x, "correction_bias": layer.gate.e_score_correction_bias}
    topk.biased_grouped_topk(**given, gating_output=layer.gate(x), **options)
    assert not sglangs
    other = {"topk": 6, "topk_group": 3, "num_fused_shared_experts": 1, "routed_scaling_factor": 1.0, "renormalize": False}
    topk.biased_grouped_topk(**given, gating_output=layer.gate(x), **options | {name: other[name]})
    assert len(sglangs) == 1


def of_another_class(layer: Layer) -> None:
    layer.gate.__class__ = type("OtherGate", (deepseek_v2.MoEGate,), {})


def with_forward(layer: Layer) -> None:
    layer.gate.forward = lambda x: x


def of_bfloat16(layer: Layer) -> None:
    layer.gate.e_score_correction_bias.data = layer.gate.e_score_correction_bias.data.bfloat16()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (of_another_class, "it is OtherGate"),
        (with_forward, "another extension's"),
        (of_bfloat16, "a bias of torch.bfloat16"),
        (lambda layer: setattr(layer.gate.weight, "data", layer.gate.weight.data.float()), "weights of torch.float32"),
        (lambda layer: setattr(layer.topk.topk_config, "scoring_func", "softmax"), "scoring_func"),
        (lambda layer: setattr(layer.topk.topk_config, "renormalize", False), "renormalize"),
        (lambda layer: setattr(layer.topk.topk_config, "correction_bias", torch.zeros(EXPERTS)), "another bias"),
        (lambda layer: setattr(layer.topk.topk_config, "num_expert_group", 3), "1 of 3 groups"),
    ],
)
def test_other_routers_are_sglangs(launches, caplog, change, why):
    caplog.set_level("INFO")
    layer, other = Layer(8, num_expert_group=1, topk_group=1), Layer(8, num_expert_group=1, topk_group=1)
    change(other)
    assert routers.take(torch.nn.ModuleList([layer, other])) == 1
    assert "the router of 1 of 2 layers is one launch of up to 32 tokens; SGLang's own serves the others" in caplog.text
    assert why in caplog.text
    assert not isinstance(other.gate.forward, routers.LayerRouter)


def test_a_server_that_asks_for_an_order_of_sums_has_sglangs(monkeypatch, launches):
    free_server(monkeypatch).deterministic.enable_deterministic_inference = True
    assert routers.take(torch.nn.ModuleList([Layer(**MODELS["GLM-5"])])) == 0


def test_a_model_is_taken_once(launches):
    model = torch.nn.ModuleList([Layer(**MODELS["GLM-5"])])
    assert routers.take(model) == 1
    forward = model[0].gate.forward
    assert routers.take(model) == 1
    assert model[0].gate.forward is forward
    assert routers.take(torch.nn.ModuleList()) == 0
