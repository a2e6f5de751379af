"""SGLang's products of experts with launches of ours around them, SGLang's kernels interpreted, and both in one launch."""

from __future__ import annotations

import contextlib
import inspect
import logging
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from emulated import emulating, whole_experts_emulated
from rows_by_expert import in_blocks

from nsa_backend.adapters import expert_products, experts, shared_expert
from nsa_backend.adapters.dsa.layer_front import prefills
from nsa_backend.adapters.dsa.layer_front.kept_input import KEPT
from nsa_backend.kernels import down_blocks, expert_tiles, gate_up_rows, whole_experts
from nsa_backend.kernels.expert_order import Order
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.layer_front_torch import quantise
from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.releases import FEW_EXPERTS, installed
from nsa_backend.testing.interpreter import round_as_a_gpu_does

if installed() not in FEW_EXPERTS:
    pytest.skip("the runner of this release is another", allow_module_level=True)

from routed_experts import EXPERTS, HIDDEN, arguments, free_server, interpreted_runner, near, served

MANY = 6
"""Tokens that have our second product here."""


def ordered(chosen: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What SGLang's `moe_align_block_size` gives, which is CUDA's alone: order, experts of blocks, rows with padding."""
    order, of_blocks = in_blocks(chosen.flatten(), experts, block, chosen.numel())
    most = chosen.numel() + (experts + 1) * (block - 1)
    room, padded = order + [chosen.numel()] * (most - len(order)), torch.tensor([len(order)], dtype=torch.int32)
    of_blocks += [-1] * (-(-most // block) - len(of_blocks))
    return torch.tensor(room, dtype=torch.int32), torch.tensor(of_blocks, dtype=torch.int32), padded


@pytest.fixture
def prefill(monkeypatch, runner):
    """MANY tokens are those of a prefill."""
    monkeypatch.setattr(shared_expert, "MANY", MANY)
    monkeypatch.setattr(runner.module, "moe_align_block_size", ordered)
    kernels = import_module(runner.module.invoke_fused_moe_kernel.__module__)
    for name in ("sglang_per_token_group_quant_fp8", "per_token_group_quant_fp8"):
        monkeypatch.setattr(kernels, name, lambda x, group: quantise(x.float(), Scales.EXACT))
    return runner


@pytest.fixture
def runner(monkeypatch):
    round_as_a_gpu_does()
    free_server(monkeypatch)
    expert_products.tell.cache_clear()
    return interpreted_runner(monkeypatch)


@pytest.fixture
def one_launch(monkeypatch, runner):
    """Both products of some tokens on an emulated GPU, and rows of the tiles of each launch; SGLang's are never asked for."""
    served, tiles = whole_experts.whole_experts, []

    def launch(order: Order, rows: int, weights: ExpertWeights, *more: torch.Tensor) -> torch.Tensor:
        tiles.append(rows)
        form = whole_experts.Form(HIDDEN, weights.width, rows)
        return served(order, rows, weights, *more, num_sms=3, **whole_experts_emulated(form))

    monkeypatch.setattr(whole_experts, "whole_experts", launch)
    monkeypatch.setattr(runner.module, "invoke_fused_moe_kernel", lambda *_, **__: pytest.fail("SGLang's product"))
    return tiles


@pytest.fixture
def sglangs_products(monkeypatch):
    """Some tokens have no products in one launch, of whatever experts."""
    monkeypatch.setattr(whole_experts, "problem", lambda hidden, width: "SGLang's are wanted")


@pytest.mark.usefixtures("sglangs_products")
@pytest.mark.parametrize(
    ("width", "bulk", "alone", "elsewhere"),
    [(256, False, False, 0.0), (256, True, False, 0.0), (256, False, True, 0.5), (256, True, False, 0.5),
     (128, False, False, 0.0), (128, True, False, 0.0), (256, False, False, 1.0), (256, True, False, 1.0)],
)  # fmt: skip
def test_experts_are_right(runner, width, bulk, alone, elsewhere):
    """Whether SGLang copies in bulk, has tiles of the second product, and has every expert on this GPU."""
    given = arguments(6, width, elsewhere=elsewhere)
    runner.bulk, runner.alone = bulk, alone
    found = served(given)
    assert found.isfinite().all()
    assert near(found, given)


@pytest.mark.usefixtures("one_launch")
@pytest.mark.parametrize(("tokens", "elsewhere"), [(8, 0.0), (9, 0.5), (9, 1.0), (40, 0.0)])
def test_experts_with_both_products_in_one_launch_are_right(tokens, elsewhere):
    """With a row or more of an expert, more than a block of it, and all experts of other GPUs."""
    given = arguments(tokens, 256, elsewhere=elsewhere)
    found = served(given)
    assert found.isfinite().all()
    assert near(found, given)


def test_tiles_of_one_launch_have_rows_for_what_this_gpu_has_of_all_choices(monkeypatch, one_launch):
    """One that has all experts, and one of four of which each has a fourth of the tokens' choices."""
    for gpus in (1, 4):
        monkeypatch.setattr(experts, "expert_gpus", lambda gpus=gpus: gpus)
        given = arguments(32, 256, elsewhere=1 - 1 / gpus)
        assert near(served(given), given)
    assert one_launch == [32, 16]


@pytest.mark.usefixtures("one_launch")
@pytest.mark.parametrize(("tokens", "width"), [(9, 128), (7, 256)])
def test_other_widths_and_fewer_tokens_have_sglangs_products(tokens, width):
    with pytest.raises(pytest.fail.Exception, match="SGLang's product"):
        served(arguments(tokens, width))


@pytest.fixture(params=["SGLang's first product", "both ours"])
def products(monkeypatch, request):
    """Whose products many tokens have; both of ours on an emulated GPU."""
    if request.param == "both ours":
        from sglang.kernels.ops.quantization import fp8_kernel

        for module in gate_up_rows, down_blocks:
            name = module.__name__.rpartition(".")[2]
            launch = partial(getattr(module, name), num_sms=2, **emulating(module.kernel_for(HIDDEN)))
            monkeypatch.setattr(module, name, launch)
        monkeypatch.setattr(expert_products, "BOTH", MANY)
        monkeypatch.setattr(fp8_kernel, "sglang_per_token_group_quant_fp8", lambda x, group: quantise(x.float(), Scales.EXACT))


@pytest.mark.parametrize(("bulk", "elsewhere", "once"), [(False, 0.5, False), (True, 0.0, True)])
def test_experts_of_many_tokens_are_right(prefill, products, bulk, elsewhere, once):
    """Where SGLang writes sums in the place of their input they are there."""
    given, prefill.bulk = arguments(MANY, 256, elsewhere=elsewhere), bulk
    before = given | {"hidden_states": given["hidden_states"].clone()}
    if once:
        values, scales = quantise(before["hidden_states"].float(), Scales.EXACT)
        given |= {"a1_q": torch.nn.functional.pad(values.view(torch.uint8), (0, 0, 0, 2)).view(values.dtype)}
        given |= {"a1_scale": torch.nn.functional.pad(scales, (0, 0, 0, 2)).T.contiguous().T}  # as SGLang lays them
    found = served(given)
    assert near(found, before)
    assert torch.equal(given["hidden_states"], before["hidden_states"])
    assert torch.equal(served(given, inplace=True), found)
    assert torch.equal(given["hidden_states"], found)


def test_experts_multiply_what_the_norm_has_quantised(prefill):
    given = arguments(MANY, 256)
    x = given["hidden_states"].float()
    other = quantise(-x, Scales.EXACT)  # tells whose are multiplied
    wanted = served(given | {"hidden_states": -given["hidden_states"]})
    KEPT.keep(given["hidden_states"], Scales.EXACT, other)
    assert torch.equal(served(given | {"hidden_states": given["hidden_states"].view_as(x)}), wanted)
    assert KEPT.quantised is None
    assert near(served(given), given)


@pytest.fixture
def summed(monkeypatch, prefill):
    """In place of the launches: zeros, and what is to be added to them."""
    monkeypatch.setattr(
        expert_products, "run", lambda *given, shared, **_: torch.zeros_like(given[4]) if shared is None else shared.clone()
    )


def test_sums_have_what_is_to_be_added(prefill):
    given, of_shared = arguments(MANY, 256), torch.randn(MANY, HIDDEN).bfloat16()
    alone, weights = served(given), ExpertWeights(*(given[name] for name in ("w1", "w1_scale", "w2", "w2_scale")))
    of_run = given["hidden_states"], weights, given["topk_weights"], given["topk_ids"], torch.empty_like(alone)
    found = expert_products.run(*of_run, factor=given["routed_scaling_factor"], filtered=False, shared=of_shared)
    assert torch.equal(found, alone + of_shared)


def test_a_prefill_adds_its_shared_expert_to_their_sums(summed):
    """SGLang, which would add it, is given nothing to add; behind the layer nothing is left of it."""
    given, of_shared = arguments(MANY, 256), torch.randn(MANY, HIDDEN).bfloat16()
    layer, added = SimpleNamespace(_shared_expert_tp1=False), []

    def forward(layer: SimpleNamespace, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        shared = shared_expert.apart(lambda *_: of_shared, layer, hidden_states)
        sums = served(given)
        return shared_expert.add(lambda *arguments: added.append(arguments) or sums, None, sums, shared, 2.5)

    found = shared_expert.prefill_layer(forward, layer, given["hidden_states"])
    assert torch.equal(found, of_shared)
    assert [arguments[2:] for arguments in added] == [(None, 2.5)]
    for apart in ({"return_moe_output": True}, {"leave_output_sum": True}, {"tp1": True}):
        layer._shared_expert_tp1 = apart.pop("tp1", False)
        assert not shared_expert.prefill_layer(forward, layer, given["hidden_states"], **apart).any()
        assert added[-1][2] is of_shared
    assert shared_expert.take(given["hidden_states"]) is None


def layer_of_graph(**options: object) -> SimpleNamespace:
    """What a captured layer is asked; its shared expert is no block FP8."""
    bare = SimpleNamespace(swiglu_limit=1.0)
    return SimpleNamespace(**{"shared_experts": bare, "_shared_expert_tp1": False, "num_fused_shared_experts": 0} | options)


def captured(given: dict, of_shared: torch.Tensor, add=lambda sums, shared: (sums, shared), **options) -> torch.Tensor:
    """As SGLang's captured layer runs them: the experts, then the shared one, and what adds both."""

    def forward(layer: SimpleNamespace, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        sums = served(given)[..., :].contiguous()
        shared = shared_expert.apart(lambda *_: of_shared, layer, hidden_states)
        return shared_expert.add(lambda experts, routed, shared, *_: routed + shared, None, *add(sums, shared), 2.5)

    return shared_expert.captured_layer(forward, layer_of_graph(**options), given["hidden_states"])


@pytest.mark.parametrize(
    ("products", "bulk", "elsewhere"),
    [("sglangs_products", True, 0.0), ("one_launch", False, 0.0), ("one_launch", False, 0.5)],
)
def test_a_captured_layers_sums_are_added_up_with_its_shared_expert(monkeypatch, request, runner, products, bulk, elsewhere):
    """In one launch, to the bit of SGLang's two; the layer's own sum is not asked for."""
    request.getfixturevalue(products)
    runner.bulk = bulk
    given, of_shared = arguments(8, 256, elsewhere=elsewhere), torch.randn(8, HIDDEN).bfloat16()
    alone = served(given)
    monkeypatch.setattr(runner.module, "moe_combine_topk", lambda *_: pytest.fail("SGLang's sum"))
    found = captured(given, of_shared)
    assert torch.equal(found, alone + of_shared)
    assert torch.equal(captured(given, of_shared), found)


@pytest.mark.parametrize("options", [{"_shared_expert_tp1": True}, {"shared_experts": None}])
def test_a_layer_that_adds_in_another_way_has_its_sums_at_once(runner, options):
    given, of_shared = arguments(6), torch.randn(6, HIDDEN).bfloat16()
    assert torch.equal(captured(given, of_shared, **options), served(given) + of_shared)


@pytest.mark.parametrize(
    "add",
    [lambda sums, shared: (sums, shared.clone()), lambda sums, shared: (sums.clone(), shared), lambda sums, _: (sums, None)],
)
def test_sums_that_wait_are_never_left_out(runner, add):
    given, of_shared = arguments(6), torch.randn(6, HIDDEN).bfloat16()
    with pytest.raises(RuntimeError, match="SGLang adds others: set NSA_BACKEND_FEW_EXPERTS=0"):
        captured(given, of_shared, add)


def test_sums_that_nobody_adds_end_the_capture(runner):
    given = arguments(6)
    with pytest.raises(RuntimeError, match="SGLang adds nothing"):
        shared_expert.captured_layer(lambda *_: served(given), layer_of_graph(), given["hidden_states"])


def test_another_tensor_is_never_left_out(summed):
    given, of_shared = arguments(MANY, 256), torch.randn(MANY, HIDDEN).bfloat16()

    def forward(layer: SimpleNamespace, hidden_states: torch.Tensor) -> torch.Tensor:
        shared_expert.apart(lambda *_: of_shared, layer, hidden_states)
        return shared_expert.add(lambda *_: None, None, served(given), of_shared.clone(), 2.5)

    with pytest.raises(RuntimeError, match="SGLang adds another tensor to them"):
        shared_expert.prefill_layer(forward, SimpleNamespace(_shared_expert_tp1=False), given["hidden_states"])


OF_WHOLE_PREFILL = {"alt_stream": object(), "num_fused_shared_experts": 0, "_shared_expert_tp1": False}


@pytest.mark.parametrize(
    ("said", "whole", "options", "of_layer", "two"),
    [
        ("1", True, {}, {}, True),
        (None, True, {}, {}, False),
        ("1", False, {}, {}, False),
        ("1", True, {"skip_shared_experts": True}, {}, False),
        ("1", True, {}, {"alt_stream": None}, False),
        ("1", True, {}, {"num_fused_shared_experts": 1}, False),
    ],
)
def test_a_whole_prefill_has_its_shared_expert_on_another_stream_where_asked(monkeypatch, said, whole, options, of_layer, two):
    """With what SGLang's captured layer takes; where the shared expert is another's or among the others nothing changes."""
    if said is not None:
        monkeypatch.setenv(prefills.SWITCH, said)
    x, given = torch.randn(2, HIDDEN).bfloat16(), {"skip_shared_experts": False, "use_vision_topk": False} | options
    layer, called = SimpleNamespace(**OF_WHOLE_PREFILL | of_layer), []
    layer.forward_normal_dual_stream = lambda *arguments, **options: called.append((arguments, options))
    with prefills.recording(prefills.WholePrefills()) if whole else contextlib.nullcontext():
        shared_expert.prefill_layer(lambda *_, **options: called.append(options), layer, x, None, "ids", **given)
    assert called == [((x, None, "ids"), {"use_vision_topk": False})] if two else [given]


def test_sglangs_captured_layer_takes_what_that_of_a_prefill_does():
    """But whether the shared expert is left out, which its caller says by name."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    layers = DeepseekV2MoE.forward_normal, DeepseekV2MoE.forward_normal_dual_stream
    one, other = (list(inspect.signature(inspect.unwrap(layer)).parameters) for layer in layers)
    assert [name for name in one if name != "skip_shared_experts"] == other
    assert "skip_shared_experts=skip_shared_experts," in inspect.getsource(DeepseekV2MoE.forward)


@pytest.mark.parametrize("change", [{"shape": (MANY - 1, HIDDEN)}, {"dtype": torch.float32}])
def test_what_no_sum_can_have_sglang_adds(summed, change):
    of_shared = torch.zeros(change.get("shape", (MANY, HIDDEN)), dtype=change.get("dtype", torch.bfloat16))
    given = arguments(MANY, 256)

    def forward(layer: SimpleNamespace, hidden_states: torch.Tensor) -> torch.Tensor:
        shared_expert.apart(lambda *_: of_shared, layer, hidden_states)
        return shared_expert.add(lambda experts, routed, shared: shared, None, served(given), of_shared)

    assert shared_expert.prefill_layer(forward, SimpleNamespace(_shared_expert_tp1=False), given["hidden_states"]) is of_shared


@pytest.mark.parametrize(
    ("said", "tokens", "experts_of_layer", "ordered", "quantised"),
    [(None, MANY, (256, 512), False, True), (None, MANY - 1, (256, 512), False, False), (None, MANY, (32, 4096), False, False),
     (None, MANY, (256, 512), True, False), (None, MANY, None, False, False), ("1", 2, (32, 4096), True, True),
     ("0", MANY, (256, 512), False, False)],
)  # fmt: skip
def test_many_tokens_are_quantised_once(monkeypatch, said, tokens, experts_of_layer, ordered, quantised):
    """As SGLang's own switch has it, where the products are ours; where a user sets that it is the user's."""
    from sglang.srt.environ import envs

    free_server(monkeypatch).deterministic.enable_deterministic_inference = ordered
    monkeypatch.delenv(experts.SWITCH)
    monkeypatch.setattr(shared_expert, "MANY", MANY)
    weight = {} if experts_of_layer is None else {"w13_weight": torch.empty(*experts_of_layer, 1)}
    layer, switch = SimpleNamespace(experts=SimpleNamespace(**weight)), envs.SGLANG_OPT_MOE_QUANT_ONCE
    monkeypatch.setenv(switch.name, said) if said else monkeypatch.delenv(switch.name, raising=False)
    found = experts.quantised_once(lambda layer, x: "FP8" if switch.get() else None, layer, torch.zeros(tokens, 1))
    assert found == ("FP8" if quantised else None)
    assert switch.is_set() == (said is not None)


@pytest.mark.parametrize(
    ("what", "taken"),
    [("usual", True), ("not eligible", False), ("a user's switch", False), ("shared among them", False),
     ("other rows", False), ("few", False)],
)  # fmt: skip
def test_experts_take_what_the_norm_has_quantised(monkeypatch, what, taken):
    """In the form and under the rules of SGLang's own quantisation, which then does not run."""
    from sglang.srt.environ import envs
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    free_server(monkeypatch)
    monkeypatch.setattr("sglang.srt.layers.dp_attention.is_dp_attention_enabled", lambda: False)
    monkeypatch.delenv(experts.SWITCH)
    monkeypatch.setattr(shared_expert, "MANY", MANY)
    monkeypatch.setattr(experts, "is_hooked", lambda target: target == experts.QUANTISES)
    switch, kept = envs.SGLANG_OPT_MOE_QUANT_ONCE, ("values", "scales")
    monkeypatch.setenv(switch.name, "1") if what == "a user's switch" else monkeypatch.delenv(switch.name, raising=False)
    layer = DeepseekV2MoE.__new__(DeepseekV2MoE)
    vars(layer).update(
        experts=SimpleNamespace(w13_weight=torch.empty(256, 512, 1)), _moe_quant_once=None, layer_id=0,
        _compute_moe_quant_once_enabled=lambda: (switch.get() and what not in ("not eligible", "shared among them"), ""),
        num_fused_shared_experts=int(what == "shared among them"),
    )  # fmt: skip
    x = torch.zeros(MANY - 1 if what == "few" else MANY, 1)
    KEPT.keep(x, Scales.EXACT, kept)
    asked = x.clone() if what == "other rows" else x
    assert experts.take_quantised(layer, len(x)) is (taken or what in ("other rows", "shared among them"))
    found = experts.quantised_once(lambda *_: "SGLang's", layer, asked)
    assert found == (kept if taken else None if what == "few" else "SGLang's")
    assert KEPT.quantised == (None if taken else kept)
    KEPT.forget()
    assert not experts.take_quantised(SimpleNamespace(), len(x))  # a dense layer
    monkeypatch.setattr("sglang.srt.layers.dp_attention.is_dp_attention_enabled", lambda: True)
    assert not experts.take_quantised(layer, len(x))
    monkeypatch.setattr("sglang.srt.layers.dp_attention.is_dp_attention_enabled", lambda: False)
    monkeypatch.setattr(experts, "is_hooked", lambda target: False)
    assert not experts.take_quantised(layer, len(x))


def test_sglangs_layer_of_a_prefill_adds_what_comes_first():
    """By a function of this name, and asks for one quantisation by another, before either."""
    from sglang.srt.models import deepseek_v2

    caller = inspect.getsource(deepseek_v2.DeepseekV2MoE.forward)
    for option in ("return_moe_output", "leave_output_sum"):  # ours are told by name
        assert caller.count(f"{option}={option},") == 2
    source = inspect.getsource(inspect.unwrap(deepseek_v2.DeepseekV2MoE.forward_normal))
    once, first, routed, addition = (
        source.index(words)
        for words in (
            "self._maybe_quant_moe_input_once(",
            "self._forward_shared_experts(",
            "self.experts(",
            "maybe_fuse_routed_",
        )
    )
    assert once < first < routed < addition
    assert source.count("maybe_fuse_routed_scale_and_shared_add(") == 1
    assert list(inspect.signature(deepseek_v2.maybe_fuse_routed_scale_and_shared_add).parameters)[:3] == [
        "experts", "routed", "shared",
    ]  # fmt: skip
    enabled = inspect.getsource(deepseek_v2.DeepseekV2MoE._compute_moe_quant_once_enabled)
    assert "if not envs.SGLANG_OPT_MOE_QUANT_ONCE.get():" in enabled


def test_sglangs_captured_layer_adds_both_last():
    """Once its streams have met, and nowhere else; whoever wants both apart leaves before that."""
    from sglang.srt.models import deepseek_v2

    source = inspect.getsource(inspect.unwrap(deepseek_v2.DeepseekV2MoE.forward_normal_dual_stream))
    words = (
        "self.experts(hidden_states, topk_output)", "self._forward_shared_experts(",
        "current_stream.wait_stream(self.alt_stream)", "if return_moe_output or leave_output_sum:",
        "maybe_fuse_routed_scale_and_shared_add(", "if self.reduce_results:",
    )  # fmt: skip
    places = [source.index(some) for some in words]
    assert places == sorted(places)
    assert all(source.count(some) == 1 for some in words)


def test_no_prefill_in_one_graph_has_as_many_tokens():
    """There the shared expert is on another stream, and reads what sums in place would write."""
    from nsa_backend.adapters.dsa.layer_front import prefills

    assert shared_expert.MANY > prefills.MOST_ROWS


@pytest.mark.parametrize(("factor", "choices"), [(None, 3), (1.0, 2), (2.0, 2)])
def test_sums_have_sglangs_factor(runner, factor, choices):
    """SGLang adds two choices without a factor by another function."""
    given = arguments(5, choices=choices) | {"routed_scaling_factor": factor}
    before = given["hidden_states"].clone()
    assert near(served(given), given)
    assert torch.equal(given["hidden_states"], before)


def test_tiles_are_those_that_sglang_chooses(monkeypatch, runner):
    x, first, second, chosen = (arguments(33)[name] for name in ("hidden_states", "w1", "w2", "topk_ids"))
    monkeypatch.setattr(runner.module, "moe_align_block_size", lambda *_: (None, None, None))
    for runner.bulk, runner.alone in ((False, False), (True, False), (True, True)):
        sglangs = runner.module._prepare_fused_moe_run(x, first, second, chosen, **expert_products.FORM)
        tiles, of_second, second_in_bulk, first_in_bulk, *_ = sglangs
        found = expert_products.tiles_for(ExpertWeights(first, None, second, None), *chosen.shape)
        assert found == (tiles, of_second or tiles, first_in_bulk, second_in_bulk)


@pytest.mark.parametrize(
    ("said", "experts", "width", "served"),
    [(None, 256, 256, True), (None, 257, 256, True), (None, 256, 512, False), (None, 32, 256, False), ("1", 32, 256, True)],
)
def test_who_asks_for_nothing_has_them_of_experts_that_were_timed(monkeypatch, said, experts, width, served):
    monkeypatch.setenv(expert_products.SWITCH, said) if said else monkeypatch.delenv(expert_products.SWITCH, raising=False)
    assert serves(experts=experts, width=width) is served


@pytest.mark.parametrize(("said", "others"), [(None, False), ("1", True)])
def test_experts_that_eight_gpus_divide_have_one_launch_unasked_and_nothing_else(monkeypatch, said, others):
    monkeypatch.setenv(expert_products.SWITCH, said) if said else monkeypatch.delenv(expert_products.SWITCH, raising=False)
    divided = {"experts": 32, "width": 2048, "gpus": 8}
    assert [serves(tokens, hidden=7168, **divided) for tokens in (8, 1024)] == [True, True]
    assert [serves(tokens, hidden=7168, **divided) for tokens in (5, 7)] == [others, others]
    assert not serves(4096, hidden=7168, **divided)
    assert serves(8, hidden=6144, **divided) is others


def serves(
    tokens: int = 6, choices: int = 8, hidden: int = 1024, experts: int = EXPERTS, width: int = 256, gpus: int = 1
) -> bool:
    first = torch.empty(1, dtype=torch.float8_e4m3fn).expand(experts, 2 * width, hidden)
    x, chosen = torch.empty(tokens, hidden), torch.empty(tokens, choices)
    return expert_products.serves(x, ExpertWeights(first, None, None, None), chosen, gpus)


def test_one_choice_and_odd_widths_are_sglangs(monkeypatch):
    """And more choices than a launch orders; all of which a user may ask for."""
    monkeypatch.setenv(expert_products.SWITCH, "1")
    assert serves()
    assert serves(tokens=4096)
    of_more = [serves(tokens=1024, choices=choices, experts=256) for choices in (9, 10)]
    assert of_more == [True, False]
    assert not any((serves(choices=1), serves(hidden=512), serves(width=192)))
    assert not any((serves(4096, choices=1), serves(4096, hidden=192), serves(4096, width=512)))


def test_experts_of_more_rows_than_a_tile_has_are_sglangs(monkeypatch):
    """On average: of tokens that choose experts of several GPUs, each has a part."""
    monkeypatch.setenv(expert_products.SWITCH, "1")
    assert [serves(tokens, experts=32) for tokens in (128, 192, 193)] == [True, True, False]
    assert serves(1024, experts=32, gpus=8)
    assert not serves(1024, experts=32, gpus=4)


@pytest.fixture
def compiled(monkeypatch):
    """Kernels and devices that were compiled for; nothing is captured."""
    expert_products._compile.cache_clear()
    found = []
    monkeypatch.delenv(expert_products.SWITCH, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        expert_tiles, "compiled_on", lambda kernel, device: found.append((kernel.source.stem, kernel.hidden, device))
    )
    monkeypatch.setattr(
        whole_experts, "compile_ahead",
        lambda device, hidden, width, rows: found.extend(("whole_experts", hidden, device.index) for _ in rows),
    )  # fmt: skip
    yield found
    expert_products._compile.cache_clear()


def of_gpu(experts: int, width: int, hidden: int = 7168) -> ExpertWeights:
    """Of which nothing but shapes and places is known."""
    first = mock.MagicMock(is_cuda=True, shape=(experts, 2 * width, hidden), device=torch.device("cuda", 1))
    first.__len__.return_value = experts
    return ExpertWeights(first, None, None, None)


def test_a_servers_first_forward_compiles_what_later_ones_have(compiled, monkeypatch):
    kernels = *["whole_experts"] * len(whole_experts.ROWS), "gate_up_rows", "down_blocks"
    for _ in range(2):
        expert_products.compile_ahead(of_gpu(256, 256), 8)
    assert compiled == [(kernel, 7168, 1) for kernel in kernels]
    for others in (of_gpu(32, 256), of_gpu(256, 512), of_gpu(256, 256, 7000), of_gpu(256, 256, 7040)):
        expert_products.compile_ahead(others, 8)
    assert len(compiled) == len(kernels)
    expert_products.compile_ahead(of_gpu(32, 2048), 8, 8)
    assert compiled[len(kernels) :] == [(kernel, 7168, 1) for kernel in kernels[: len(whole_experts.ROWS)]]
    del compiled[len(kernels) :]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    expert_products.compile_ahead(of_gpu(257, 256, 6144), 8)
    assert len(compiled) == len(kernels)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    expert_products.compile_ahead(of_gpu(257, 256, 6144), 8)
    assert compiled[len(kernels) :] == [(kernel, 6144, 1) for kernel in kernels]


def test_who_asks_of_another_hidden_size_has_our_second_product_alone(prefill, monkeypatch):
    """Of one whose halves are no whole steps of `down_blocks`."""
    monkeypatch.setattr(expert_products, "BOTH", MANY)
    monkeypatch.setattr(down_blocks, "HIDDEN", range(2 * HIDDEN, 3 * HIDDEN))
    monkeypatch.setattr(expert_products, "both_ours", None)
    given = arguments(MANY, 256)
    assert near(served(given), given)


@pytest.mark.parametrize("tokens", [1, 6])
def test_any_forward_with_launches_of_ours_is_asked_for_it(runner, monkeypatch, tokens):
    asked = []
    monkeypatch.setattr(expert_products, "compile_ahead", lambda weights, *_: asked.append(weights))
    given = arguments(tokens, elsewhere=1.0)
    served(given)
    assert [weights.first.data_ptr() for weights in asked] == [given["w1"].data_ptr()]


@pytest.mark.parametrize(
    ("width", "tokens", "choices", "said"),
    [
        (128, (5, 9), 2, "5 to 128 tokens have one launch before both products and one between"),
        (256, (5, 7), 2, "5 to 7 tokens have one launch before both products and one between"),
        (256, (8, 9), 2, "8 to 144 tokens have both products in one launch"),
        (256, (73, 74), 4, "73 to 128 tokens have one launch before both products and one between"),
    ],
)
def test_the_log_has_it_once(caplog, request, runner, width, tokens, choices, said):
    if said.endswith("both products in one launch"):
        request.getfixturevalue("one_launch")
    with caplog.at_level(logging.INFO, expert_products.__name__):
        for count in tokens:
            served(arguments(count, width, choices=choices, elsewhere=1.0))
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == f"nsa_backend: experts of {said}, {EXPERTS} experts of {width}"
