"""SGLang's Triton experts of few tokens in two launches, the layer's shared expert among them where SGLang captures."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.adapters import expert_products, few_experts, shared_expert
from nsa_backend.kernels.few_experts import ExpertWeights, Tile
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.releases import FEW_EXPERTS, installed
from nsa_backend.testing.interpreter import round_as_a_gpu_does

if installed() not in FEW_EXPERTS:
    pytest.skip("the runner of this release is another", allow_module_level=True)

from routed_experts import HIDDEN, SGLANGS, WIDTH, arguments, free_server, near, served


@pytest.fixture(autouse=True)
def server(monkeypatch):
    round_as_a_gpu_does()
    return free_server(monkeypatch)


@pytest.fixture
def large_tiles(monkeypatch):
    """Few programs, which the interpreter runs one after the other; which tile serves is what tests of the kernels ask."""
    monkeypatch.setattr(few_experts.kernels, "tile_for", lambda tokens: Tile(values=64, sums=128))


def test_experts_of_few_tokens_are_not_sglangs():
    given = arguments(2)
    found = served(given)
    assert found is not given["hidden_states"]
    assert near(found, given)


@pytest.mark.usefixtures("large_tiles")
def test_without_a_factor_the_sum_is_as_it_is():
    once, times = (served(arguments(1), routed_scaling_factor=factor) for factor in (None, 2.0))
    assert torch.equal(2 * once, times)


@pytest.mark.parametrize(
    ("choices", "width", "said", "most"),
    [(8, 256, None, 4), (9, 256, None, 4), (8, 128, None, 8), (8, 512, None, 2), (9, 128, None, 0), (8, 1024, None, 0),
     (9, 128, "1", 2), (6, 1024, "1", 2), (8, 256, "1", 4), (12, 256, "1", 2)],
)  # fmt: skip
def test_a_width_or_a_number_of_choices_that_was_not_timed_is_to_be_asked_for(monkeypatch, choices, width, said, most):
    monkeypatch.setenv(few_experts.SWITCH, said) if said else monkeypatch.delenv(few_experts.SWITCH)
    weights = ExpertWeights(torch.empty(1, 2 * width, HIDDEN), None, None, None)
    few = [n for n in range(1, 18) if few_experts.serves(torch.empty(n, HIDDEN), weights, torch.empty(n, choices))]
    assert few == list(range(1, most + 1))


@pytest.mark.parametrize(
    ("choices", "width", "whose"), [(8, 256, "early_experts"), (9, 256, "early_experts"), (8, 128, "few_experts")]
)
def test_on_a_gpu_tensor_cores_multiply_experts_of_256(choices, width, whose):
    class OnGpu(list):
        is_cuda, shape = True, (1, 7168)

    assert few_experts.launches_of(OnGpu(range(1)), width, choices, shared=True).__name__ == whose


@pytest.fixture(params=[None, "ue8m0"])
def layer(request, monkeypatch):
    """A layer of SGLang's with a shared expert of block FP8, and nothing else; DeepSeek-V3.2's scale_fmt is ue8m0."""
    from sglang.srt.layers.quantization import fp8_utils
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.deepseek_v2 import DeepseekV2MLP
    from sglang_models import one_rank

    given = arguments(2)
    block_fp8 = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[GROUP, GROUP])
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    with one_rank(monkeypatch), torch.no_grad():
        expert = DeepseekV2MLP(HIDDEN, WIDTH, "silu", block_fp8, reduce_results=False, prefix="shared_experts")
    for linear, name in ((expert.gate_up_proj, "w1"), (expert.down_proj, "w2")):
        linear.weight.data.copy_(given[name][-1])
        linear.weight_scale_inv.data.copy_(given[f"{name}_scale"][-1])
        run = fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback  # as on Hopper
        linear.quant_method.w8a8_block_fp8_linear = partial(run, act_scale_ue8m0=True) if request.param else run
    return SimpleNamespace(shared_experts=expert, _shared_expert_tp1=False, num_fused_shared_experts=0)


def captured(layer: SimpleNamespace, given: dict, **options) -> tuple:
    """What the experts of a captured layer give, and then its shared expert: (sums, what is to be added to them)."""

    def forward(layer: SimpleNamespace, hidden_states: torch.Tensor, **_: object) -> tuple:
        sums = served(given, hidden_states=hidden_states)
        return sums, shared_expert.apart(lambda *_, **__: SGLANGS, layer, hidden_states)

    return shared_expert.captured_layer(forward, layer, given["hidden_states"], **options)


def of_layer(layer: SimpleNamespace) -> ExpertWeights:
    """Of the layer's shared expert."""
    linears = layer.shared_experts.gate_up_proj, layer.shared_experts.down_proj
    powers = isinstance(linears[0].quant_method.w8a8_block_fp8_linear, partial)
    weights = (part for linear in linears for part in (linear.weight.data, linear.weight_scale_inv.data))
    return ExpertWeights(*weights, Scales.POWERS_OF_TWO if powers else Scales.EXACT)


@pytest.mark.usefixtures("large_tiles")
def test_a_captured_layers_shared_expert_is_among_the_others(layer):
    """And SGLang, which adds what it gives, has nothing to add."""
    given = arguments(2)
    sums, added = captured(layer, given)
    assert added is None
    assert near(sums, given, of_layer(layer))
    assert not near(sums, given)


def test_another_layer_does_not_have_it(monkeypatch, layer):
    """What one layer had is forgotten; a caller that wants both apart has them so."""
    given, handed = arguments(2), []
    launch = lambda *_, shared, out, **__: handed.append(shared) or out  # noqa: E731
    monkeypatch.setattr(few_experts.kernels, "few_experts", launch)
    _, added = captured(layer, given)
    assert added is None
    served(given)
    for option in ("return_moe_output", "leave_output_sum"):
        _, added = captured(layer, given, **{option: True})
        assert added == SGLANGS
    assert [shared is None for shared in handed] == [False, True, True, True]


def test_with_more_tokens_it_is_sglangs(monkeypatch, layer):
    monkeypatch.setattr(expert_products, "run", lambda *_, **__: "SGLang's products")
    assert captured(layer, arguments(3)) == (SGLANGS, SGLANGS)
    assert captured(layer, arguments(6)) == captured(layer, arguments(9)) == ("SGLang's products", SGLANGS)


@pytest.mark.parametrize(
    "change",
    [
        {"shared_experts": None},
        {"_shared_expert_tp1": True},
        {"shared_experts.swiglu_limit": 10.0},
        {"shared_experts.gate_up_proj.set_lora": True},
        {"shared_experts.down_proj.quant_method": None},
    ],
)
@pytest.mark.usefixtures("large_tiles")
def test_other_shared_experts_are_sglangs(layer, change):
    """Those among SGLang's others, on every rank as a whole, clamped, with LoRA or in another format."""
    ((path, value),) = change.items()
    *parts, name = path.split(".")
    owner = layer
    for part in parts:
        owner = getattr(owner, part)
    setattr(owner, name, value)
    given = arguments(2)
    sums, added = captured(layer, given)
    assert added == SGLANGS
    assert near(sums, given)


def test_sglang_adds_what_the_shared_expert_gives_and_nothing_where_that_is_none():
    """Its layer asks for the shared expert behind the others, and takes None for an answer."""
    from sglang.srt.layers.quantization.mxfp4_flashinfer_trtllm_moe import maybe_fuse_routed_scale_and_shared_add
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    source = inspect.getsource(inspect.unwrap(DeepseekV2MoE.forward_normal_dual_stream))
    assert source.index("self.experts(") < source.index("shared_output = self._forward_shared_experts(")
    assert source.count("self._forward_shared_experts(") == 1
    assert source.count("maybe_fuse_routed_scale_and_shared_add(") == 1
    experts, routed = SimpleNamespace(quant_method=None), torch.ones(2, 4)
    assert maybe_fuse_routed_scale_and_shared_add(experts, routed.clone(), None, 2.5).eq(1).all()
    assert maybe_fuse_routed_scale_and_shared_add(experts, routed.clone(), routed, 2.5).eq(2).all()
