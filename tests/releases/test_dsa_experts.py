"""SGLang's Triton experts by launches of this package: which forwards have which, and what is left to SGLang."""

from __future__ import annotations

import contextlib
import inspect
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from nsa_backend import registration
from nsa_backend.adapters import expert_products, experts, few_experts, shared_expert
from nsa_backend.kernels.layer_front_weights import GROUP
from nsa_backend.releases import FEW_EXPERTS, installed
from nsa_backend.testing.interpreter import round_as_a_gpu_does

if installed() not in FEW_EXPERTS:
    pytest.skip("the runner of this release is another", allow_module_level=True)

from routed_experts import (
    CHOICES,
    EXPERTS,
    HIDDEN,
    SGLANGS,
    WIDTH,
    arguments,
    free_server,
    interpreted_runner,
    near,
    served,
    signature,
)

FEW, SOME = 2, 6
"""Tokens that have two launches, and launches around SGLang's products."""


@pytest.fixture
def server(monkeypatch):
    return free_server(monkeypatch)


@pytest.fixture
def launched(monkeypatch, server):
    """In place of the launches, whose results are nothing here: where each was to write."""
    places = []

    def place(*tensors: torch.Tensor, **_: object) -> torch.Tensor:
        places.append(tensors[4])
        return tensors[4]

    for way in (few_experts, expert_products):
        monkeypatch.setattr(way, "run", place)
    return places


def test_tokens_choose_launches(monkeypatch, server):
    ways = {}
    for way in (few_experts, expert_products):
        monkeypatch.setattr(way, "run", lambda x, *_, way=way, **__: ways.update({len(x): way}))
    monkeypatch.setattr("nsa_backend.kernels.down_rows.problem", lambda hidden, width: None)
    monkeypatch.setattr(shared_expert, "MANY", 140)
    counts = 1, 2, 3, 4, 5, 8, 33, 128, 129, 140
    left = [tokens for tokens in counts if served(arguments(tokens)) == SGLANGS]
    assert ways == dict.fromkeys((1, 2), few_experts) | dict.fromkeys((5, 8, 33, 128, 140), expert_products)
    assert left == [3, 4, 129]


def test_experts_that_nothing_serves_are_left_at_once(monkeypatch, server):
    """A forward asks in every layer."""
    monkeypatch.delenv(experts.SWITCH)
    monkeypatch.setattr(expert_products, "TIMED", set())
    asked = []
    monkeypatch.setattr(experts, "is_served", lambda of: asked.append(len(of["hidden_states"])))
    assert {served(arguments(tokens)) for tokens in (few_experts.MOST, few_experts.MOST + 1, 140)} == {SGLANGS}
    assert asked == [few_experts.MOST]


def test_a_long_prefill_compiles_what_fewer_tokens_will_have(monkeypatch, server):
    """Where it comes first and has no launch itself: a forward that is captured compiles nothing."""
    monkeypatch.delenv(experts.SWITCH)
    given = arguments(140)
    monkeypatch.setattr(expert_products, "TIMED", set())
    monkeypatch.setattr(expert_products, "TIMED_IN_ONE_LAUNCH", {(EXPERTS, WIDTH, HIDDEN)})
    monkeypatch.setattr(shared_expert, "MANY", 140)
    monkeypatch.setattr(expert_products, "ONE_LAUNCH", range(8, 140))
    compiled = []
    monkeypatch.setattr(expert_products, "compile_ahead", lambda weights, *_: compiled.append(len(weights.first)))
    assert served(given) == SGLANGS
    assert compiled == [EXPERTS]


@pytest.mark.parametrize("tokens", [FEW, SOME])
def test_a_layer_of_sglangs_has_them(monkeypatch, tokens):
    """From its forward on, with what a server of one rank has set up: none of our conditions is ever met by accident."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang_models import one_rank

    round_as_a_gpu_does()
    monkeypatch.setenv(experts.SWITCH, "1")
    given = arguments(tokens)
    runner = interpreted_runner(monkeypatch).module
    monkeypatch.setattr(runner, "outplace_fused_experts", inspect.unwrap(runner.outplace_fused_experts))  # whose op is CUDA's
    monkeypatch.setattr(runner, "fused_experts", partial(experts.apart, runner.fused_experts))
    original = lambda *_, **__: pytest.fail("SGLang's launches ran")  # noqa: E731
    original.__signature__ = signature()
    monkeypatch.setattr(runner, "fused_experts_impl", partial(experts.experts, original))
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
        chosen = StandardTopKOutput(given["topk_weights"], given["topk_ids"], torch.zeros(tokens, EXPERTS))
        before = given["hidden_states"].clone()
        found = layer(given["hidden_states"], chosen)
    assert torch.equal(given["hidden_states"], before)  # which the shared expert may not have read yet
    assert near(found, given)


OTHER = {
    "activation": "gelu", "is_gated": False, "use_fp8_w8a8": False, "block_shape": None, "per_channel_quant": True,
    "apply_router_weight_on_input": True, "no_combine": True, "defer_sum": True, "gemm1_limit": 7.0, "swiglu_limit": 10.0,
    "a1_q": torch.zeros(1), "a1_scale": torch.zeros(1), "b1": torch.zeros(1), "use_int8_w8a8": True,
    "fuse_swiglu_interleaved": True, "inplace": True,
}  # fmt: skip


@pytest.mark.parametrize("tokens", [FEW, SOME])
@pytest.mark.parametrize("name", OTHER)
def test_other_experts_are_sglangs(launched, tokens, name):
    assert served(arguments(tokens), **{name: OTHER[name]}) == SGLANGS
    assert not launched


@pytest.mark.parametrize("tokens", [FEW, SOME])
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("topk_ids", (CHOICES,), torch.int64),
        ("topk_ids", (CHOICES - 1,), torch.int32),  # fewer than there are shares
        ("w1_scale", (2, 4), torch.int32),  # scales that are packed
        ("hidden_states", (HIDDEN,), torch.float16),
        ("hidden_states", (HIDDEN // 2,), torch.bfloat16),  # narrower than the weights
        ("w1", (2 * 192, HIDDEN), torch.float8_e4m3fn),
        ("w1", (2 * WIDTH, HIDDEN), torch.bfloat16),
    ],
)
def test_other_tensors_are_sglangs(launched, tokens, name, shape, dtype):
    rows = EXPERTS if name.startswith("w") else tokens
    assert served(arguments(tokens), **{name: torch.zeros(rows, *shape).to(dtype)}) == SGLANGS
    assert not launched


@pytest.mark.parametrize("tokens", [FEW, SOME])
@pytest.mark.parametrize(
    "part", [("moe", "enable_fused_moe_sum_all_reduce"), ("deterministic", "enable_deterministic_inference")]
)
def test_servers_that_want_sums_otherwise_are_sglangs(launched, server, tokens, part):
    group, option = part
    setattr(getattr(server, group), option, True)
    assert served(arguments(tokens)) == SGLANGS


@pytest.mark.parametrize("tokens", [FEW, SOME])
def test_the_sum_is_where_sglang_has_it(monkeypatch, launched, tokens):
    """In memory that NCCL knows where ranks allocate alike, which they do without DP attention."""
    asked, given = [], arguments(tokens)

    @contextlib.contextmanager
    def memory(group, disabled):
        asked.append(disabled)
        yield

    monkeypatch.setattr("sglang.srt.distributed.device_communicators.pynccl_allocator.use_symmetric_memory", memory)
    for answer in (True, False):
        monkeypatch.setattr("sglang.srt.layers.dp_attention.is_allocation_symmetric", lambda answer=answer: answer)
        assert served(given) is launched[-1]
    assert asked == [False, True]
    assert all(place.shape == (tokens, HIDDEN) and place is not given["hidden_states"] for place in launched)


def test_every_argument_of_sglangs_function_is_known():
    """One that is new may change what is computed."""
    tensors = {"hidden_states", "w1", "w2", "topk_weights", "topk_ids", "w1_scale", "w2_scale"}
    of_others = {"routed_scaling_factor", "filter_expert", "gate_up_interleaved", "no_combine_keep_router_weight"}
    parameters = signature().parameters
    assert set(parameters) == tensors | of_others | set(experts.SERVED)
    for name, value in experts.SERVED.items():
        if name not in ("use_fp8_w8a8", "block_shape"):
            assert parameters[name].default == value


def test_the_hooks_are_where_sglang_looks(monkeypatch):
    hooked = []
    monkeypatch.setattr(experts, "hook", lambda path, around, kind: hooked.append((path, around)))
    experts.take()
    assert hooked == [
        (f"{experts.RUNNER}.fused_experts", experts.apart),
        (f"{experts.RUNNER}.fused_experts_impl", experts.experts),
        (f"{experts.LAYER}.forward_normal_dual_stream", shared_expert.captured_layer),
        (f"{experts.LAYER}._forward_shared_experts", shared_expert.apart),
        (f"{experts.LAYER}.forward_normal", shared_expert.prefill_layer),
        (f"{experts.LAYER}._maybe_quant_moe_input_once", experts.quantised_once),
        (experts.ADDITION, shared_expert.add),
        (experts.CHOICES, experts.choices_where_they_are),
    ]
    module = import_module(experts.RUNNER)
    for operator in (module.outplace_fused_experts, module.inplace_fused_experts):
        assert " fused_experts_impl(\n" in inspect.getsource(operator)


@pytest.mark.parametrize(
    ("fields", "options", "copied"),
    [({}, {}, False), ({}, {"num_token_non_padded": torch.tensor(2)}, True),
     ({"fused_shared_experts_scaling_factor": 0.5}, {}, True), ({"top_k": 10}, {}, None), ({"shared": 0}, {}, False)],
)  # fmt: skip
def test_choices_with_a_shared_expert_are_left_where_they_are(monkeypatch, fields, options, copied):
    """With nothing to map, and no rows to mask, they are what SGLang copies on a GPU; where it does more it is asked."""
    from sglang.srt.configs.shared_experts import SharedExpertsConfig
    from sglang.srt.layers.moe import topk

    monkeypatch.setattr(topk, "_is_cuda", True)
    shared = SharedExpertsConfig(num_fused_shared_experts=fields.get("shared", 1))
    config = topk.TopKConfig(**{"top_k": 9, "shared_experts": shared} | {k: v for k, v in fields.items() if k != "shared"})
    chosen, shares = torch.randint(0, 256, (3, 9), dtype=torch.int32), torch.rand(3, 9)
    given = {"topk_config": config, "router_logits": torch.zeros(3, 256), "layer_id": 5} | options
    wanted = topk._post_process_topk_ids(chosen.clone(), shares.clone(), **given)
    asked, ids = [], chosen.clone()

    def original(*arguments: object, **more: object) -> tuple:
        asked.append(True)
        return topk._post_process_topk_ids(*arguments, **more)

    found = experts.choices_where_they_are(original, topk_ids=ids, topk_weights=shares.clone(), **given)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert bool(asked) is bool(fields or options)
    if copied is not None:
        assert (found[0].data_ptr() != ids.data_ptr()) is copied


@pytest.mark.parametrize(
    ("tokens", "inplace", "handed"), [(8, True, False), (1024, True, False), (1025, True, True), (8, False, False)]
)
def test_sums_behind_our_launches_have_a_place_of_their_own(tokens, inplace, handed):
    """SGLang's shared expert reads their input on another stream. A layer's own config stays as it is."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    config, seen = MoeRunnerConfig(inplace=inplace), []
    words = list(inspect.signature(inspect.unwrap(import_module(experts.RUNNER).fused_experts)).parameters)[:5]
    given = dict(zip(words, (torch.zeros(tokens, 1), None, None, None, config), strict=True))
    experts.apart(lambda *arguments, **options: seen.append((arguments[4].inplace, options)), **given, use_fp8_w8a8=True)
    assert seen == [(handed, {"use_fp8_w8a8": True})]
    assert config.inplace is inplace


@pytest.mark.parametrize(
    ("said", "release", "device_sm", "wanted"),
    [(None, "0.5.23", 90, True), (None, "0.5.17", 90, False), (None, "0.5.23", 100, False), ("0", "0.5.23", 90, False),
     ("1", "0.5.23", 90, True)],
)  # fmt: skip
def test_who_asks_for_nothing_has_them_where_they_were_timed(monkeypatch, said, release, device_sm, wanted):
    monkeypatch.delenv(experts.SWITCH, raising=False)
    if said is not None:
        monkeypatch.setenv(experts.SWITCH, said)
    monkeypatch.setattr("nsa_backend.releases.installed", lambda: release)
    assert experts.wanted(device_sm) is wanted


@pytest.mark.parametrize("wanted", [False, True])
def test_a_server_has_them_where_they_are_wanted(monkeypatch, wanted):
    found = []
    backend = SimpleNamespace(config=SimpleNamespace(attention=SimpleNamespace(device_sm=90)))
    monkeypatch.setattr(registration, "NativeSparseAttnBackend", lambda runner: backend)
    monkeypatch.setattr(registration, "adapter", SimpleNamespace(**dict.fromkeys(
        ("take_context_parts", "score_at_once", "divide_indexer", "take_moe_configs", "clear_padding_on_resume"),
        lambda *_: None,
    )))  # fmt: skip
    monkeypatch.setattr(registration, "wants_layer_fronts", lambda: False)
    monkeypatch.setattr(experts, "wanted", lambda device_sm: wanted)
    monkeypatch.setattr(experts, "take", lambda: found.append(experts))
    monkeypatch.setattr(registration.routers, "take", found.append)
    registration.create_backend(SimpleNamespace(is_draft_worker=True, token_to_kv_pool=None, model="model"))
    assert found == ([experts, "model"] if wanted else [])
