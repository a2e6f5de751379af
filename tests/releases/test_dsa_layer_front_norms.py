"""Norms of a layer whose front is ours: one launch, whose quantised result the front is given, and SGLang's for all else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from emulated import compiled_here
from safetensors.torch import load_file
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.models.deepseek_v2 import DeepseekV2DecoderLayer, DeepseekV2MoE
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang_models import CLASSES, forward, one_rank

from nsa_backend.adapters.dsa.layer_front import kept_input, norms, projections
from nsa_backend.adapters.dsa.layer_front.front import LayerFront
from nsa_backend.adapters.dsa.layer_front.kept_input import KEPT, quantised_input
from nsa_backend.adapters.routers import LayerRouter
from nsa_backend.benchmarks.checkpoints import faithful
from nsa_backend.kernels.layer_front_torch import add_norm_torch
from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.kernels.projection_inputs import quantise
from nsa_backend.testing.interpreter import round_as_a_gpu_does

WIDTH = 256
SHAPE = faithful.Shape(hidden=256, heads=8, experts=2, experts_per_token=1, expert_dim=16)


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    """Of a server that captures and asks for no order of sums; nothing is kept of another test."""
    round_as_a_gpu_does()
    compiled_here(monkeypatch)
    server = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: server)
    monkeypatch.setattr(dsa_indexer, "get_is_capture_mode", lambda: True)
    KEPT.forget()
    return server


def norm_of(width: int = WIDTH, kind: type = RMSNorm, **options: object) -> RMSNorm:
    norm = kind(width, **options).bfloat16()
    norm.weight.data = (1 + torch.randn(width) / 8).bfloat16()
    return norm


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(count)
    return tuple(torch.randn(2, count, WIDTH).bfloat16())


def taken(norm: RMSNorm, scales: Scales | None = Scales.EXACT, next_is_ours=lambda rows: True) -> RMSNorm:
    norm.forward = norms.LayerNorm(norm, scales, next_is_ours)
    return norm


def test_the_front_is_given_what_the_norm_has_quantised(monkeypatch):
    monkeypatch.setattr(kept_input, "quantise", lambda *_, **__: pytest.fail("it was quantised again"))
    norm = taken(norm_of())
    x, residual = rows(3)
    wanted, total = add_norm_torch(x, residual, norm.weight.data, norm.variance_epsilon)
    normed, added = norm(x, residual)
    assert normed is x
    assert added is residual
    assert torch.equal(residual, total)
    assert torch.allclose(x.float(), wanted.float(), rtol=2**-7)
    values, scales = quantised_input(x, Scales.EXACT)
    assert torch.equal(values.float(), quantise(x, Scales.EXACT)[0].float())
    assert scales.shape == (3, WIDTH // 128)


@pytest.mark.parametrize("what", ["another tensor", "other scales", "a second time", "after another norm"])
def test_anything_else_is_quantised_when_it_is_asked_for(monkeypatch, what):
    quantised = []
    monkeypatch.setattr(kept_input, "quantise", lambda x, scales, **_: quantised.append((x, scales)))
    norm = taken(norm_of())
    x, residual = rows(3)
    norm(x, residual)
    asked = (x.clone() if what == "another tensor" else x), (Scales.POWERS_OF_TWO if what == "other scales" else Scales.EXACT)
    if what == "a second time":
        assert quantised_input(*asked) is not None
    if what == "after another norm":
        taken(norm_of(), None)(*rows(2))
    quantised_input(*asked)
    assert len(quantised) == 1


def of_eager(monkeypatch) -> tuple:
    monkeypatch.setattr(dsa_indexer, "get_is_capture_mode", lambda: False)
    return rows(2)


@pytest.mark.parametrize(
    "given",
    [
        of_eager,
        lambda _: rows(norms.MOST_ROWS + 1),
        lambda _: (rows(2)[0], None),
        lambda _: tuple(x.float() for x in rows(2)),
        lambda _: (*rows(2), torch.ones(2, WIDTH)),
        lambda _: (rows(4)[0][::2], rows(2)[1]),
        lambda _: (rows(2)[0], rows(1)[1]),
        lambda _: tuple(x[None] for x in rows(2)),
    ],
)
def test_other_calls_are_sglangs(monkeypatch, given):
    norm, own = norm_of(), []
    norm.forward = lambda *arguments: own.append(arguments)
    norm.forward = norms.LayerNorm(norm, Scales.EXACT, lambda rows: True)
    norm(*given(monkeypatch))
    assert len(own) == 1
    assert KEPT.quantised is None


def test_many_rows_are_quantised_where_they_are_multiplied(monkeypatch):
    """In any forward, for qkv_a and wk, or for experts; where nobody asks, or rows are no fours, norms are SGLang's."""
    monkeypatch.setattr(dsa_indexer, "get_is_capture_mode", lambda: False)
    asked, given = [], rows(norms.MOST_ROWS + 4)
    norm, own = norm_of(), []
    norm.forward = lambda *arguments: own.append(arguments)
    for of_many, served in ((lambda rows: Scales.EXACT, True), (lambda rows: asked.append(rows), False), (None, True)):
        norm.forward = norms.LayerNorm(norm, Scales.POWERS_OF_TWO, lambda rows: pytest.fail("it began early"), of_many)
        KEPT.forget()
        norm(*given)
        norm.forward = norm.forward.own
        assert (KEPT.x is given[0], len(own)) == (served, not served)
        own.clear()
    assert KEPT.scales is Scales.POWERS_OF_TWO
    assert asked == [norms.MOST_ROWS + 4]
    norm.forward = norms.LayerNorm(norm, Scales.EXACT, lambda rows: True)
    norm(*rows(norms.MOST_ROWS + 3))
    assert len(own) == 1
    assert KEPT.quantised is None


@pytest.mark.parametrize("once", [False, True])
def test_a_projection_takes_what_the_norm_has_quantised_of_its_input(once):
    given = []
    linear = SimpleNamespace(
        quant_method=SimpleNamespace(apply=lambda *arguments, **options: given.append((arguments, options)))
    )
    projections.take_input(linear, Scales.EXACT, once=once)
    x, quantised = rows(3)[0], ("values", "scales")
    KEPT.keep(x, Scales.EXACT, quantised)
    apply = linear.quant_method.apply
    apply(linear, x, None)
    apply(linear, x, bias=None)
    apply(linear, quantised)
    assert given == [
        ((linear, quantised, None), {}),
        ((linear, x if once else quantised), {"bias": None}),
        ((linear, quantised), {}),
    ]


@pytest.mark.parametrize("ours", [False, True])
def test_a_kernel_of_ours_behind_it_begins_early(monkeypatch, ours):
    said = []
    monkeypatch.setattr(norms, "add_norm", lambda *_, before_ours: said.append(before_ours))
    taken(norm_of(), next_is_ours=lambda count: ours and count == 2)(*rows(2))
    assert said == [ours]


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        (norm_of(), None),
        (norm_of(kind=GemmaRMSNorm), "it is GemmaRMSNorm"),
        (norm_of(192), "rows of 192 values: groups of 128 up to 8192 are served"),
        (norm_of(cast_x_before_out_mul=True), "it norms in another way"),
        (norm_of(var_hidden_size=128), "it norms in another way"),
        (taken(norm_of()), "another extension's"),
        (None, "it is NoneType"),
    ],
)
def test_which_norms_are_sglangs(norm, why):
    problem = norms.problem(norm)
    assert problem is None if why is None else why in problem


def test_norms_of_a_server_that_asks_for_an_order_of_sums_are_sglangs(captured):
    captured.deterministic.enable_deterministic_inference = True
    assert "an order" in norms.problem(norm_of())


@pytest.mark.parametrize(("indexer", "most", "early"), [("indexer", 128, True), ("indexer", 8, False), (None, 128, False)])
def test_products_of_a_layer_begin_early_behind_the_first_norm(indexer, most, early):
    """Those that its input goes to first: of a layer that selects nothing one product alone. Of more rows none."""
    front = LayerFront.__new__(LayerFront)
    front.attention = SimpleNamespace(indexer=indexer)
    front.first_products, front.latent = SimpleNamespace(most_rows=most), SimpleNamespace(most_rows=8)
    assert front.begins_with_ours(9) is early
    assert front.begins_with_ours(8)
    assert not front.begins_with_ours(33)


def test_routers_begin_early_behind_the_second_norm():
    ours = LayerRouter.__new__(LayerRouter)
    for forward_of_gate, count, early in ((ours, 32, True), (ours, 33, False), (lambda x: x, 1, False)):
        layer = SimpleNamespace(mlp=SimpleNamespace(gate=SimpleNamespace(forward=forward_of_gate)))
        assert norms.routes(layer, count) is early
    assert not norms.routes(SimpleNamespace(mlp=SimpleNamespace()), 1)  # a dense layer


class Decoder(torch.nn.Module):
    """A layer with both norms; its front is ours or SGLang's."""

    def __init__(self, ours: bool, second: type = RMSNorm):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm_of(), norm_of(kind=second)
        self.self_attn = torch.nn.Module()
        front = LayerFront.__new__(LayerFront)
        front.attention = SimpleNamespace(fused_qkv_a_proj_with_mqa="qkv_a", indexer=None)
        front.latent = SimpleNamespace(most_rows=8)
        self.self_attn.forward_absorb_prepare = front if ours else (lambda: None)
        self.mlp = torch.nn.Module()


def test_both_norms_of_layers_with_our_front_are_ours(monkeypatch, caplog):
    """The first has its input in FP8, and each knows what is behind it; a norm of another kind stays SGLang's."""
    caplog.set_level("INFO")
    told = []
    monkeypatch.setattr(norms, "scales_of", {"qkv_a": Scales.POWERS_OF_TWO}.__getitem__)
    monkeypatch.setattr(norms, "take_input", lambda *arguments, once: told.append((*arguments, once)))
    monkeypatch.setattr(norms.experts, "take_quantised", lambda mlp, rows: mlp is model[0].mlp and rows == 2048)
    model = torch.nn.ModuleList([Decoder(True), Decoder(False), Decoder(True, GemmaRMSNorm)])
    assert norms.take(model) == 3
    assert told == [("qkv_a", Scales.POWERS_OF_TWO, True)] * 2
    taken = [[isinstance(norm.forward, norms.LayerNorm) for norm in norms_of(layer)] for layer in model]
    assert taken == [[True, True], [False, False], [True, False]]
    first, second = (norm.forward for norm in norms_of(model[0]))
    assert (first.scales, second.scales) == (Scales.POWERS_OF_TWO, None)
    assert [first.next_is_ours(count) for count in (8, 9)] == [True, False]
    assert [first.scales_of_many(count) for count in (129, 2048)] == [Scales.POWERS_OF_TWO] * 2
    assert [second.scales_of_many(count) for count in (129, 2048)] == [None, Scales.EXACT]
    assert not second.next_is_ours(1)
    model[0].mlp.gate = SimpleNamespace(forward=LayerRouter.__new__(LayerRouter))
    assert second.next_is_ours(1)
    assert "3 norms are launches of this package: up to 128 rows in captured forwards" in caplog.text
    assert norms.take(model) == 0


def norms_of(layer: Decoder) -> tuple[RMSNorm, RMSNorm]:
    return layer.input_layernorm, layer.post_attention_layernorm


def test_a_layers_front_and_experts_have_the_very_tensors_that_norms_gave(tmp_path, monkeypatch):
    """Through SGLang's own layers: else every layer would quantise twice."""
    monkeypatch.undo()  # the whole model asks a server of its own
    with one_rank(monkeypatch):
        folder = faithful.write(tmp_path, shape=SHAPE)
        config = get_config(str(folder), trust_remote_code=False)
        model = CLASSES[config.architectures[0]][0](config)
        model.load_weights(iter(load_file(str(folder / "model.safetensors")).items()))
        given, asked, of_experts, asked_by_experts, multiplied = [], [], [], [], []
        for layer in (module for module in model.modules() if isinstance(module, DeepseekV2DecoderLayer)):
            norm, prepare = layer.input_layernorm.forward, layer.self_attn.forward_absorb_prepare
            layer.input_layernorm.forward = lambda *arguments, norm=norm: noted(given, norm(*arguments))
            layer.self_attn.forward_absorb_prepare = lambda positions, *rest, prepare=prepare: prepare(
                positions, noted(asked, rest[0]), *rest[1:]
            )
            method = layer.self_attn.fused_qkv_a_proj_with_mqa.quant_method
            method.apply = lambda linear, x, *rest, apply=method.apply: apply(linear, noted(multiplied, x), *rest)
            if isinstance(layer.mlp, DeepseekV2MoE):
                norm = layer.post_attention_layernorm.forward
                layer.post_attention_layernorm.forward = lambda *rest, norm=norm: noted(of_experts, norm(*rest))
                layer.mlp._maybe_quant_moe_input_once = asked_by_experts.append
        forward(model, torch.randint(2, 64, (5,)), monkeypatch, AttnForwardMethod.MLA)
    assert len(asked) == len(given) == config.num_hidden_layers
    assert all(one is other is third for one, other, third in zip(asked, given, multiplied, strict=True))
    assert asked_by_experts
    assert all(one is other for one, other in zip(asked_by_experts, of_experts, strict=True))


def noted(found: list, what: object) -> object:
    """`what`; its first tensor is noted."""
    found.append(what[0] if isinstance(what, tuple) else what)
    return what
