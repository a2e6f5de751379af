"""SGLang's MoE layers with their router in one launch: what is left to SGLang, and what is not."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.adapters import few_experts, router
from nsa_backend.kernels import router as kernels
from nsa_backend.releases import ROUTERS, installed
from nsa_backend.testing.interpreter import round_as_a_gpu_does

if installed() not in ROUTERS:
    pytest.skip("the router of this release is another", allow_module_level=True)

EXPERTS, HIDDEN = 256, 1024
GROUPED, UNGROUPED = "DeepSeek-V3.2", "GLM-5"
FEW = kernels.Tile(values=64, step=512)
"""Few programs, of which the interpreter runs one after the other."""


@pytest.fixture
def layer(monkeypatch, request):
    """A layer's gate and `TopK` of SGLang's, of the model that a test names, and whom they ask."""
    from sglang.srt.configs.shared_experts import SharedExpertsConfig
    from sglang.srt.layers.moe import topk
    from sglang.srt.layers.moe.topk import TopK, TopKOutputFormat
    from sglang.srt.models.deepseek_v2 import MoEGate
    from sglang_models import one_rank

    round_as_a_gpu_does()
    monkeypatch.setattr(kernels, "tile_for", lambda rows: FEW)
    monkeypatch.setattr(topk, "fused_topk_deepseek", object(), raising=False)  # as on a GPU
    groups, kept = (8, 4) if request.param == GROUPED else (1, 1)
    config = SimpleNamespace(n_routed_experts=EXPERTS, hidden_size=HIDDEN, topk_method="noaux_tc", architectures=[])
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    with one_rank(monkeypatch), torch.no_grad():
        gate = MoEGate(config, None)
        generator = torch.Generator().manual_seed(1)
        gate.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator) / 32)
        gate.e_score_correction_bias.copy_(torch.randn(EXPERTS, generator=generator) / 8)
        chooser = TopK(
            top_k=8, layer_id=3, use_grouped_topk=True, num_expert_group=groups, topk_group=kept, renormalize=True,
            scoring_func="sigmoid", correction_bias=gate.e_score_correction_bias, routed_scaling_factor=2.5,
            apply_routed_scaling_factor_on_output=False, output_format=TopKOutputFormat.STANDARD,
        )  # fmt: skip
        if request.param == UNGROUPED:
            chooser.topk_config.top_k = 9
            chooser.topk_config.shared_experts = SharedExpertsConfig(num_fused_shared_experts=1)
        monkeypatch.setattr(MoEGate, "forward", unbound(router.gate, MoEGate.forward))
        monkeypatch.setattr(topk, "select_experts", partial(router.select, topk.select_experts))
        yield SimpleNamespace(gate=gate, topk=chooser, _enable_a2a_moe=False)


def unbound(around, original):
    """What a hook makes of a method."""
    return lambda *arguments, **options: around(original, *arguments, **options)


@pytest.fixture
def launches(monkeypatch):
    """Rows of each launch."""
    rows, launched = [], kernels.route

    def route(x: torch.Tensor, *arguments: object, **options: bool) -> kernels.Routed:
        rows.append(len(x))
        return launched(x, *arguments, **options)

    monkeypatch.setattr(kernels, "route", route)
    return rows


def hidden_states(rows: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16()


def routed(layer: SimpleNamespace, x: torch.Tensor, **options) -> tuple:
    """What a layer's `TopK` gives, as its forward asks for it."""
    forward = lambda layer, x: layer.topk.forward_cuda(x, layer.gate(x), **options)  # noqa: E731
    return router.layer_of_few(forward, layer, x)


def by_sglang(layer: SimpleNamespace, x: torch.Tensor) -> tuple:
    """The same of a layer that nothing of ours is around: SGLang's torch functions, which sum in another order."""
    logits = x.float() @ layer.gate.weight.float().T
    return layer.topk.forward_cuda(x, logits)


def same(found: tuple, wanted: tuple) -> None:
    """The same experts with the same shares, in any order."""
    for one, other in zip(ordered_by_expert(found), ordered_by_expert(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)


def ordered_by_expert(output: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, order = output.topk_ids.sort(dim=1)
    return chosen, output.topk_weights.gather(1, order)


both = pytest.mark.parametrize("layer", [GROUPED, UNGROUPED], indirect=True)
grouped = pytest.mark.parametrize("layer", [GROUPED], indirect=True)


@both
@pytest.mark.parametrize("rows", [1, 3])
def test_few_tokens_choose_as_by_sglang(layer, launches, rows):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    x = hidden_states(rows)
    found = routed(layer, x)
    assert launches == [rows]
    assert isinstance(found, StandardTopKOutput)
    assert found.topk_ids.dtype == torch.int32
    same(found, by_sglang(layer, x))
    torch.testing.assert_close(found.router_logits, x.float() @ layer.gate.weight.float().T, rtol=0, atol=2e-5)


@both
def test_a_factor_on_the_output_is_in_the_shares(layer, launches):
    layer.topk.topk_config.apply_routed_scaling_factor_on_output = True
    x = hidden_states(2)
    same(routed(layer, x), by_sglang(layer, x))
    assert launches == [2]


@grouped
def test_more_tokens_are_sglangs(layer, launches):
    for rows in (0, kernels.MOST_ROWS + 1):
        assert router.layer_of_few(lambda layer, x: router._ROUTING.get(), layer, hidden_states(rows)) is None
    assert router.layer_of_few(lambda layer, x: router._ROUTING.get(), layer, hidden_states(kernels.MOST_ROWS)) is not None
    assert router._ROUTING.get() is None


OTHER = {
    "use_grouped_topk": False, "renormalize": False, "scoring_func": "softmax", "custom_routing_function": len,
    "fused_shared_experts_scaling_factor": 0.5, "output_format": None, "correction_bias": torch.zeros(EXPERTS), "top_k": 9,
    "topk_group": 5, "num_expert_group": 4,
}  # fmt: skip


@grouped
@pytest.mark.parametrize("name", OTHER)
def test_other_choices_are(layer, name):
    assert router.choice_of(layer) is not None
    setattr(layer.topk.topk_config, name, OTHER[name])
    assert router.choice_of(layer) is None


@pytest.mark.parametrize("layer", [UNGROUPED], indirect=True)
@pytest.mark.parametrize("top_k", [8, 2])
def test_a_shared_expert_behind_few_others_is(layer, top_k):
    """SGLang has those by another kernel."""
    layer.topk.topk_config.top_k = top_k
    assert router.choice_of(layer) is None


@grouped
@pytest.mark.parametrize(
    "change",
    [
        {"_enable_a2a_moe": True},
        {"gate.e_score_correction_bias": None},
        {"gate.e_score_correction_bias_vl": torch.nn.Parameter(torch.zeros(EXPERTS))},
        {"topk.enable_waterfill": True},
        {"topk.is_torch_compile": True},
        {"gate": torch.nn.Linear(1, 1)},
        {"topk": torch.nn.Linear(1, 1)},
    ],
)
def test_other_layers_are(layer, change):
    ((path, value),) = change.items()
    *parts, name = path.split(".")
    owner = layer
    for part in parts:
        owner = getattr(owner, part)
    setattr(owner, name, value)
    assert router.choice_of(layer) is None


@grouped
def test_choices_that_are_recorded_or_changed_are(layer, monkeypatch):
    watched = {
        "sglang.srt.state_capturer.routed_experts.get_global_experts_capturer": lambda: object(),
        "sglang.srt.eplb.expert_distribution.get_global_expert_distribution_recorder": lambda: object(),
        "sglang.kernels.fused_op.get_fused_op_backend": lambda: "torch",
        "sglang.srt.runtime_context.get_exec": lambda: SimpleNamespace(
            deterministic=SimpleNamespace(enable_deterministic_inference=True), moe=SimpleNamespace(ep_dispatch_algorithm=None)
        ),
    }
    for path, value in watched.items():
        with monkeypatch.context() as patched:
            patched.setattr(path, value)
            assert router.choice_of(layer) is None
    for name in (
        "SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK",
        "SGLANG_SIMULATE_UNIFORM_EXPERTS",
        "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
    ):
        with monkeypatch.context() as patched:
            patched.setenv(name, "1")
            assert router.choice_of(layer) is None
    for inputs in ((torch.tensor(1), None), (None, object())):  # padded rows under expert parallel; EPLB
        with monkeypatch.context() as patched:
            patched.setattr(layer.topk, "routing_inputs", lambda inputs=inputs: inputs)
            assert router.choice_of(layer) is None
    assert router.choice_of(layer) is not None


@grouped
@pytest.mark.parametrize(
    ("weight", "x"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.bfloat16, None)],
)
def test_other_tensors_are(layer, weight, x):
    choice, tensor = router.choice_of(layer), torch.zeros(EXPERTS, HIDDEN, dtype=weight)
    rows = torch.zeros(2, 2 * HIDDEN).bfloat16()[:, :HIDDEN] if x is None else torch.zeros(2, HIDDEN, dtype=x)
    assert router.fits(tensor.bfloat16(), torch.zeros(2, HIDDEN).bfloat16(), choice)
    assert not router.fits(tensor, rows, choice)


@grouped
def test_who_asks_for_more_than_a_choice_has_sglangs(layer, launches):
    """By the launch's logits: rows that are padded choose no expert."""
    x = hidden_states(3)
    found = routed(layer, x, num_token_non_padded=torch.tensor(2))
    assert launches == [3]
    assert found.topk_ids[2].eq(-1).all()
    wanted = by_sglang(layer, x)
    assert torch.equal(found.topk_ids[:2].sort(dim=1).values, wanted.topk_ids[:2].sort(dim=1).values)


@grouped
def test_other_logits_than_the_launchs_have_sglangs(layer, launches):
    x = hidden_states(2)
    forward = lambda layer, x: layer.topk.forward_cuda(x, layer.gate(x).neg())  # noqa: E731
    found = router.layer_of_few(forward, layer, x)
    same(found, layer.topk.forward_cuda(x, -(x.float() @ layer.gate.weight.float().T)))


@grouped
def test_what_one_layer_chose_no_other_has(layer, launches):
    x = hidden_states(1)
    routed(layer, x)
    other = SimpleNamespace(gate=SimpleNamespace(), topk=layer.topk, _enable_a2a_moe=False)
    router.layer_of_few(lambda other, x: layer.gate(x), other, x)  # whose own gate is another
    assert launches == [1]


@grouped
def test_a_counter_is_made_where_nothing_is_captured(layer, monkeypatch):
    """One that is there serves captures too."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    state = router.state_of(layer.gate)
    on_gpu = torch.nn.Module()
    on_gpu.weight = SimpleNamespace(is_cuda=True)
    assert router.state_of(on_gpu) is None
    router._GATES[on_gpu] = state
    assert router.state_of(on_gpu) is state


@grouped
def test_experts_that_were_ours_are_let_begin_early(layer, monkeypatch):
    """Of as many tokens, and where they take these very choices."""
    early, launched, ours = [], kernels.route, True

    def route(*arguments: object, before_ours: bool) -> kernels.Routed:
        early.append(before_ours)
        return launched(*arguments, before_ours=before_ours)

    def forward(layer: SimpleNamespace, x: torch.Tensor) -> None:
        chosen = layer.topk.forward_cuda(x, layer.gate(x)).topk_ids
        few_experts._WATCHED.get().append(chosen if ours else chosen.clone())

    monkeypatch.setattr(kernels, "route", route)
    for tokens in (1, 1, 2, 1):
        router.layer_of_few(forward, layer, hidden_states(tokens))
    assert early == [False, True, False, True]
    ours = False
    for _ in range(2):
        router.layer_of_few(forward, layer, hidden_states(1))
    assert early[4:] == [True, False]
    assert few_experts._WATCHED.get() is None


def test_the_hooks_are_where_sglang_looks(monkeypatch):
    """Its layer asks its gate and then `TopK`, which asks the function of its module; nothing lies between."""
    from sglang.srt.layers.moe.topk import TopK, select_experts
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE, MoEGate

    hooked = []
    monkeypatch.setattr(router, "hook", lambda path, around, kind: hooked.append((path, around)))
    router.take()
    assert hooked == [(router.LAYER, router.layer_of_few), (router.GATE, router.gate), (router.SELECT, router.select)]
    for method in (DeepseekV2MoE.forward_normal, DeepseekV2MoE.forward_normal_dual_stream):
        source = inspect.getsource(inspect.unwrap(method))
        assert source.index("self.gate(hidden_states") < source.index("self.topk(")
    assert "topk_output = select_experts(" in inspect.getsource(inspect.unwrap(TopK.forward_cuda))
    known = {
        "layer_id",
        "num_token_non_padded",
        "expert_location_dispatch_info",
        "dynamic_expert_bias",
        "router_logits_partials",
    }
    parameters = inspect.signature(inspect.unwrap(select_experts)).parameters
    assert set(parameters) == known | {"hidden_states", "router_logits", "topk_config"}
    assert list(inspect.signature(inspect.unwrap(MoEGate.forward)).parameters)[:2] == ["self", "hidden_states"]


@pytest.mark.parametrize(
    ("said", "device_sm", "wanted"), [(None, 90, False), ("1", 90, True), ("1", 100, False), ("0", 90, False)]
)
def test_only_who_asks_for_it_has_it(monkeypatch, said, device_sm, wanted):
    monkeypatch.delenv(router.SWITCH, raising=False)
    if said is not None:
        monkeypatch.setenv(router.SWITCH, said)
    assert router.wanted(device_sm) is wanted
