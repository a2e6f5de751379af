"""SGLang's Triton runner with experts of few tokens in two launches: what is left to it, and what is not."""

from __future__ import annotations

import contextlib
import inspect
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.adapters import few_experts
from nsa_backend.kernels.few_experts_torch import few_experts_torch
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.releases import FEW_EXPERTS, installed
from nsa_backend.testing.interpreter import round_as_a_gpu_does

if installed() not in FEW_EXPERTS:
    pytest.skip("the runner of this release is another", allow_module_level=True)

HIDDEN, WIDTH, EXPERTS, CHOICES = 1024, 128, 9, 8


@pytest.fixture(scope="module")
def signature():
    """Of SGLang's function."""
    module, name = import_module(few_experts.MODULE), "fused_experts_impl"
    assert f"return {name}(" in inspect.getsource(module.outplace_fused_experts)
    assert f"{name}(" in inspect.getsource(module.inplace_fused_experts)
    return inspect.signature(inspect.unwrap(getattr(module, name)))


@pytest.fixture
def call(monkeypatch, signature):
    """Returns a function of arguments to what `experts` gives, and whether SGLang's function was asked."""
    round_as_a_gpu_does()
    monkeypatch.setenv(few_experts.SWITCH, "1")
    server = SimpleNamespace(
        moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: server)

    def asked(given: dict) -> tuple[torch.Tensor | None, bool]:
        left = []
        original = lambda *arguments, **options: left.append((arguments, options))  # noqa: E731
        original.__signature__ = signature
        found = few_experts.experts(
            original, given["hidden_states"], **{k: v for k, v in given.items() if k != "hidden_states"}
        )
        return found, bool(left)

    asked.server = server
    return asked


@pytest.fixture
def launches(monkeypatch):
    """In place of the launches, whose results are nothing here: where each was to write."""
    places = []

    def launched(*tensors: torch.Tensor, factor: float, shared: None, out: torch.Tensor) -> torch.Tensor:
        places.append(out)
        return out

    monkeypatch.setattr(few_experts.kernels, "few_experts", launched)
    return places


def arguments(tokens: int = 2, width: int = WIDTH) -> dict:
    """As SGLang's Triton runner hands them over, for block-FP8 experts."""
    generator = torch.Generator().manual_seed(tokens)

    def fp8(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return 0.02 + 0.1 * torch.rand(shape, generator=generator)

    chosen = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :CHOICES].int().contiguous()
    return {
        "hidden_states": torch.randn(tokens, HIDDEN, generator=generator).bfloat16(),
        "w1": fp8(EXPERTS, 2 * width, HIDDEN), "w1_scale": scales(EXPERTS, 2 * width // GROUP, HIDDEN // GROUP),
        "w2": fp8(EXPERTS, HIDDEN, width), "w2_scale": scales(EXPERTS, HIDDEN // GROUP, width // GROUP),
        "topk_weights": torch.rand(tokens, CHOICES, generator=generator), "topk_ids": chosen,
        "use_fp8_w8a8": True, "block_shape": [GROUP, GROUP], "routed_scaling_factor": 2.5, "filter_expert": False,
    }  # fmt: skip


def test_experts_of_few_tokens_are_not_sglangs(call):
    given = arguments()
    names = "hidden_states", "w1", "w1_scale", "w2", "w2_scale", "topk_weights", "topk_ids"
    wanted = few_experts_torch(*(given[name] for name in names), factor=2.5).float()
    found, left = call(given)
    assert not left
    assert found is not given["hidden_states"]
    assert (found.float() - wanted).norm() < 5e-3 * wanted.norm()


def test_a_layer_of_sglangs_has_them(monkeypatch, signature):
    """From its forward on, with what a server of one rank has set up: none of our conditions is ever met by accident."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang_models import one_rank

    round_as_a_gpu_does()
    monkeypatch.setenv(few_experts.SWITCH, "1")
    given = arguments()
    runner = import_module(few_experts.MODULE)
    monkeypatch.setattr(runner, "outplace_fused_experts", inspect.unwrap(runner.outplace_fused_experts))  # whose op is CUDA's
    monkeypatch.setattr(runner, "fused_experts", partial(few_experts.apart, runner.fused_experts))
    original = lambda *_, **__: pytest.fail("SGLang's launches ran")  # noqa: E731
    original.__signature__ = signature
    monkeypatch.setattr(runner, "fused_experts_impl", partial(few_experts.experts, original))
    block_fp8 = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[GROUP, GROUP])
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    with one_rank(monkeypatch), torch.no_grad():
        layer = FusedMoE(
            EXPERTS, HIDDEN, WIDTH, layer_id=0, top_k=CHOICES, quant_config=block_fp8, prefix="model.layers.0.mlp.experts",
            routed_scaling_factor=2.5,
        )  # fmt: skip
        for name, value in (("w13_weight", "w1"), ("w2_weight", "w2")):
            getattr(layer, name).copy_(given[value])
            getattr(layer, f"{name}_scale_inv").copy_(given[f"{value}_scale"])
        layer.quant_method.process_weights_after_loading(layer)
        chosen = StandardTopKOutput(given["topk_weights"], given["topk_ids"], torch.zeros(2, EXPERTS))
        before = given["hidden_states"].clone()
        found = layer(given["hidden_states"], chosen)
    assert torch.equal(given["hidden_states"], before)  # which the shared expert may not have read yet
    names = "hidden_states", "w1", "w1_scale", "w2", "w2_scale", "topk_weights", "topk_ids"
    wanted = few_experts_torch(*(given[name] for name in names), factor=2.5).float()
    assert (found.float() - wanted).norm() < 5e-3 * wanted.norm()


def test_without_a_factor_the_sum_is_as_it_is(call):
    given = arguments(1)
    (once, _), (times, _) = (call(given | {"routed_scaling_factor": factor}) for factor in (None, 2.0))
    assert torch.equal(2 * once, times)


OTHER = {
    "activation": "gelu", "is_gated": False, "use_fp8_w8a8": False, "block_shape": None, "per_channel_quant": True,
    "apply_router_weight_on_input": True, "no_combine": True, "defer_sum": True, "gemm1_limit": 7.0, "swiglu_limit": 10.0,
    "a1_q": torch.zeros(1), "a1_scale": torch.zeros(1), "b1": torch.zeros(1), "use_int8_w8a8": True,
    "fuse_swiglu_interleaved": True, "inplace": True,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_other_experts_are(call, name):
    assert call(arguments() | {name: OTHER[name]}) == (None, True)


@pytest.mark.parametrize(
    "change",
    [
        {"topk_ids": torch.zeros(2, CHOICES, dtype=torch.int64)},
        {"w1_scale": torch.zeros(EXPERTS, 2, 4, dtype=torch.int32)},  # scales that are packed
        {"hidden_states": torch.zeros(2, HIDDEN, dtype=torch.float16)},
        {"w1": torch.zeros(EXPERTS, 2 * 96, HIDDEN).to(torch.float8_e4m3fn)},
    ],
)
def test_other_tensors_are(call, change):
    assert call(arguments() | change) == (None, True)


@pytest.mark.parametrize(
    ("choices", "width", "said", "most"),
    [(8, 256, None, 4), (9, 256, None, 2), (8, 128, None, 8), (8, 512, None, 2), (9, 128, None, 0), (8, 1024, None, 0),
     (9, 128, "1", 2), (6, 1024, "1", 2), (8, 256, "1", 4)],
)  # fmt: skip
def test_more_tokens_are(call, launches, monkeypatch, choices, width, said, most):
    """And of a width or a number of choices that was not timed, unless they are asked for."""
    monkeypatch.setenv(few_experts.SWITCH, said) if said else monkeypatch.delenv(few_experts.SWITCH)
    counts = sorted({1, most, most + 1, 17} - {0})
    for tokens in counts:
        given = arguments(tokens, width)
        given |= {name: given[name][:, :1].repeat(1, choices) for name in ("topk_weights", "topk_ids")}
        assert call(given)[1] is (tokens > most)
    assert [len(place) for place in launches] == [tokens for tokens in counts if tokens <= most]


@pytest.mark.parametrize(
    "part", [("moe", "enable_fused_moe_sum_all_reduce"), ("deterministic", "enable_deterministic_inference")]
)
def test_servers_that_want_sums_otherwise_are(call, part):
    group, option = part
    setattr(getattr(call.server, group), option, True)
    assert call(arguments()) == (None, True)


def test_the_sum_is_where_sglang_has_it(call, launches, monkeypatch):
    """In memory that NCCL knows where ranks allocate alike, which they do without DP attention."""
    asked, alike = [], [True, False]

    @contextlib.contextmanager
    def memory(group, disabled):
        asked.append(disabled)
        yield

    monkeypatch.setattr("sglang.srt.distributed.device_communicators.pynccl_allocator.use_symmetric_memory", memory)
    for answer in alike:
        monkeypatch.setattr("sglang.srt.layers.dp_attention.is_allocation_symmetric", lambda answer=answer: answer)
        assert not call(arguments())[1]
    assert asked == [False, True]
    assert len(launches) == 2


def test_every_argument_of_sglangs_function_is_known(signature):
    """One that is new may change what is computed."""
    tensors = {"hidden_states", "w1", "w2", "topk_weights", "topk_ids", "w1_scale", "w2_scale"}
    of_others = {"routed_scaling_factor", "filter_expert", "gate_up_interleaved", "no_combine_keep_router_weight"}
    assert set(signature.parameters) == tensors | of_others | set(few_experts.SERVED)
    for name, value in few_experts.SERVED.items():
        if name not in ("use_fp8_w8a8", "block_shape"):
            assert signature.parameters[name].default == value


def test_the_hook_is_where_both_of_sglangs_operators_look(monkeypatch):
    hooked = []
    monkeypatch.setattr(few_experts, "hook", lambda path, around, kind: hooked.append((path, around)))
    few_experts.take()
    of_runner = [
        (f"{few_experts.MODULE}.fused_experts", few_experts.apart),
        (f"{few_experts.MODULE}.fused_experts_impl", few_experts.experts),
    ]
    of_layer = [
        (f"{few_experts.LAYER}.forward_normal_dual_stream", few_experts.captured_layer),
        (f"{few_experts.LAYER}._forward_shared_experts", few_experts.shared_apart),
    ]
    assert hooked == of_runner + of_layer


@pytest.fixture(params=[None, "ue8m0"])
def layer(request, monkeypatch):
    """A layer of SGLang's with a shared expert of block FP8, and nothing else; DeepSeek-V3.2's scale_fmt is ue8m0."""
    from sglang.srt.layers.quantization import fp8_utils
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.deepseek_v2 import DeepseekV2MLP
    from sglang_models import one_rank

    given = arguments()
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


SGLANGS = "SGLang's"


def captured(layer: SimpleNamespace, given: dict, signature: inspect.Signature, **options) -> tuple:
    """What the experts of a captured layer give, and then its shared expert: (sums, what is to be added to them)."""

    def left(*_: object, **__: object) -> str:
        return SGLANGS

    left.__signature__ = signature

    def forward(layer: SimpleNamespace, hidden_states: torch.Tensor, **_: object) -> tuple:
        rest = {name: value for name, value in given.items() if name != "hidden_states"}
        sums = few_experts.experts(left, hidden_states, **rest)
        return sums, few_experts.shared_apart(lambda *_, **__: SGLANGS, layer, hidden_states)

    return few_experts.captured_layer(forward, layer, given["hidden_states"], **options)


def of_every_expert(given: dict, layer: SimpleNamespace | None) -> torch.Tensor:
    names = "hidden_states", "w1", "w1_scale", "w2", "w2_scale", "topk_weights", "topk_ids"
    shared = None
    if layer is not None:
        expert = layer.shared_experts
        powers = isinstance(expert.gate_up_proj.quant_method.w8a8_block_fp8_linear, partial)
        scales = Scales.POWERS_OF_TWO if powers else Scales.EXACT
        linears = expert.gate_up_proj, expert.down_proj
        weights = (part for linear in linears for part in (linear.weight.data, linear.weight_scale_inv.data))
        shared = few_experts.kernels.Expert(*weights, scales)
    return few_experts_torch(*(given[name] for name in names), factor=2.5, shared=shared).float()


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found.float() - wanted).norm() < 5e-3 * wanted.norm())


def test_a_captured_layers_shared_expert_is_among_the_others(call, layer, signature):
    """And SGLang, which adds what it gives, has nothing to add."""
    given = arguments()
    sums, added = captured(layer, given, signature)
    assert added is None
    assert near(sums, of_every_expert(given, layer))
    assert not near(sums, of_every_expert(given, None))


def test_another_layer_does_not_have_it(call, layer, signature):
    """What one layer had is forgotten; a caller that wants both apart has them so."""
    given = arguments()
    captured(layer, given, signature)
    assert near(call(given)[0], of_every_expert(given, None))
    for option in ("return_moe_output", "leave_output_sum"):
        sums, added = captured(layer, given, signature, **{option: True})
        assert added == SGLANGS
        assert near(sums, of_every_expert(given, None))


def test_with_more_tokens_it_is_sglangs(call, layer, signature):
    assert captured(layer, arguments(9), signature) == (SGLANGS, SGLANGS)


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
def test_other_shared_experts_are_sglangs(call, layer, signature, change):
    """Those among SGLang's others, on every rank as a whole, clamped, with LoRA or in another format."""
    ((path, value),) = change.items()
    *parts, name = path.split(".")
    owner = layer
    for part in parts:
        owner = getattr(owner, part)
    setattr(owner, name, value)
    given = arguments()
    sums, added = captured(layer, given, signature)
    assert added == SGLANGS
    assert near(sums, of_every_expert(given, None))


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


@pytest.mark.parametrize(
    ("said", "release", "device_sm", "wanted"),
    [(None, "0.5.23", 90, True), (None, "0.5.17", 90, False), (None, "0.5.23", 100, False), ("0", "0.5.23", 90, False),
     ("1", "0.5.23", 90, True)],
)  # fmt: skip
def test_who_asks_for_nothing_has_them_where_they_were_timed(monkeypatch, said, release, device_sm, wanted):
    monkeypatch.delenv(few_experts.SWITCH, raising=False)
    if said is not None:
        monkeypatch.setenv(few_experts.SWITCH, said)
    monkeypatch.setattr("nsa_backend.releases.installed", lambda: release)
    assert few_experts.wanted(device_sm) is wanted


@pytest.mark.parametrize(
    ("tokens", "inplace", "handed"), [(8, True, False), (128, True, False), (129, True, True), (8, False, False)]
)
def test_sums_behind_our_launches_have_a_place_of_their_own(tokens, inplace, handed):
    """SGLang's shared expert reads their input on another stream. A layer's own config stays as it is."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    config, seen = MoeRunnerConfig(inplace=inplace), []
    words = list(inspect.signature(inspect.unwrap(import_module(few_experts.MODULE).fused_experts)).parameters)[:5]
    given = dict(zip(words, (torch.zeros(tokens, 1), None, None, None, config), strict=True))
    few_experts.apart(lambda *arguments, **options: seen.append((arguments[4].inplace, options)), **given, use_fp8_w8a8=True)
    assert seen == [(handed, {"use_fp8_w8a8": True})]
    assert config.inplace is inplace
