"""A layer's front in two launches beside SGLang's own sequence, on the CPU: SGLang's layer, its caches and its selections.

SGLang's layer runs whole; only its CUDA kernels are torch here, one step each, with the rounding of the kernel. That these
kernels round so, a GPU alone can show: tests/gpu/test_layer_front_bits.py.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.runtime.interpreter
from installed_source import signature
from layer_on_cpu import HIDDEN, ROWS, TOPK, BlockFp8, a_layer, assert_same_bits, in_front, poisoned_pool
from sglang.srt.layers.attention import graph_variants
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
from sglang.srt.runtime_context import get_parallel

from nsa_backend import registration
from nsa_backend.adapters.dsa.layer_front import builtin, front, kept_input, options, projections, rule, short, take, values
from nsa_backend.adapters.dsa.layer_front.front import LayerFront
from nsa_backend.adapters.dsa.layer_front.projections import scales_of
from nsa_backend.adapters.dsa.layer_front.same_bits import differing_parts
from nsa_backend.adapters.dsa.layer_front.values import LayerValues
from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.calls.whole_front import Backend
from nsa_backend.kernels import early_products, head_products, tile_products
from nsa_backend.kernels import layer_front_torch as steps
from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.releases import LAYER_FRONTS, installed, layer_front_problem


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(take, "device_problem", lambda: None)
    yield from a_layer(monkeypatch)


@pytest.fixture(params=[False, True], ids=["deepseek", "glm"])
def either_layer(request, monkeypatch):
    monkeypatch.setattr(take, "device_problem", lambda: None)
    yield from a_layer(monkeypatch, fused=request.param)


@pytest.fixture(autouse=True)
def _variants_as_they_were(monkeypatch):
    """What a server of short graphs puts into SGLang's runner is undone."""
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as runner

    monkeypatch.setattr(short, "hook", lambda *arguments: None)
    monkeypatch.setattr(runner, "create_attention_graph_variants", runner.create_attention_graph_variants)


def prepared(attention, monkeypatch, mode, on: bool, slots, ranks: int = 1, rank: int = 0, selection=None):
    """What the layer's front returns and leaves in the caches of a rank; `chosen` is what the logits read."""
    pool, chosen = poisoned_pool(), {}

    def select(self, batch, layer_id, q, weights, metadata):
        chosen["query"], chosen["gates"] = q, weights
        scores = (q.float() * weights).sum(1) @ pool.index_keys[:, : 128 * PAGE_SIZE].reshape(-1, 128).view(q.dtype).float().T
        return scores.nan_to_num().topk(TOPK).indices.sort().values.int()

    monkeypatch.setattr(dsa_indexer.Indexer, "_get_topk_paged", select)
    prepare = LayerFront(attention, (Backend,)) if on else attention.forward_absorb_prepare
    found = in_front(attention, monkeypatch, mode, prepare, Backend(pool), slots, selection)
    q_rope, k_rope, q_nope, k_nope, *_, topk, _, _ = found
    if k_nope is not None:  # the backend's write, which skips padding
        real = (slots != 0) & (slots % ranks == rank)
        pool.kv[slots[real] // ranks] = torch.cat([k_nope, k_rope], -1)[real]
    assert (k_nope is None) == on
    return {"q_rope": q_rope, "q_nope": q_nope, "topk": topk, "kv": pool.kv, "index keys": pool.index_keys, **chosen}


MODES = [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2]


def divide_up_to(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have products of so many rows divided; behind 0 every projection is SGLang's."""
    for name in ("FEW_ROWS", "MORE_ROWS"):
        monkeypatch.setattr(projections, name, rows)
    if rows:  # in tiles, as rows of these layers are too short for registers
        monkeypatch.setattr(early_products, "MOST_ROWS", 0)
        monkeypatch.setattr(early_products, "problem", lambda *columns, gates: None)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("form", [None, *Scales])
def test_a_layer_of_sglang_leaves_the_same_caches_and_chooses_the_same(either_layer, monkeypatch, mode, form):
    layer, slots = either_layer, torch.tensor([70, 200, 65, 131, 255 if mode.is_decode() else 0])
    assert rule.layer_problem(layer) is None
    divide_up_to(0, monkeypatch)
    if form is not None:
        for module, name in (
            (layer, "fused_qkv_a_proj_with_mqa"),
            (layer, "q_b_proj"),
            (layer.indexer, "wq_b"),
            *(() if layer.indexer.use_dsa_indexer_fusion else ((layer.indexer, "wk"),)),
        ):
            setattr(module, name, BlockFp8(getattr(module, name), form))
        for module in (front, projections):
            monkeypatch.setattr(module, "scales_of", lambda linear: linear.form)
    ours, theirs = (prepared(layer, monkeypatch, mode, on, slots) for on in (True, False))
    assert_same_bits(ours, theirs)
    assert (ours["kv"][0] == 7.0).all()


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", ["a shared layer", "a later draft step"])
@pytest.mark.parametrize("form", [None, *Scales])
def test_a_layer_that_attends_to_an_earlier_selection(either_layer, monkeypatch, mode, form, kind):
    """Of GLM-5.2: most layers have no indexer, and its draft steps after the first take that one's selection."""
    layer, slots = either_layer, torch.tensor([70, 200, 65, 131, 255])
    if kind == "a shared layer":
        layer.indexer = None
    layer.skip_topk, layer.is_nextn = True, layer.indexer is not None
    assert rule.layer_problem(layer) is None
    if form is not None:
        for name in ("fused_qkv_a_proj_with_mqa", "q_b_proj"):
            setattr(layer, name, BlockFp8(getattr(layer, name), form))
        if layer.indexer is not None:
            layer.indexer.wq_b = BlockFp8(layer.indexer.wq_b, form)
        for module in (front, projections):
            monkeypatch.setattr(module, "scales_of", lambda linear: getattr(linear, "form", None))
    selection = torch.arange(ROWS * TOPK, dtype=torch.int32).view(ROWS, TOPK)
    ours, theirs = (prepared(layer, monkeypatch, mode, on, slots, selection=selection) for on in (True, False))
    assert ours["topk"] is selection
    assert (ours["index keys"] == 0x5A).all()
    assert_same_bits(ours, theirs)


class Short:
    """The indexer's metadata of short rows, whose top-k keeps what every token is."""

    def __init__(self):
        self.made = torch.arange(ROWS * TOPK, dtype=torch.int32).view(ROWS, TOPK)

    def get_seqlens_expanded(self):
        return torch.ones(ROWS, dtype=torch.int32)

    def topk_transform(self, logits, topk):
        return self.made

    def every_token(self, topk):
        assert topk == TOPK
        return self.made


@pytest.mark.parametrize("most", [ROWS, ROWS - 1])
def test_queries_of_few_rows_that_choose_nothing_are_made_ready_in_one_launch(layer, monkeypatch, most):
    """Of more rows, as everywhere, products are SGLang's beside a launch that turns."""
    layer.w_kc = layer.w_kc.transpose(1, 2).contiguous().transpose(1, 2)  # as SGLang has it once weights are loaded
    monkeypatch.setattr(head_products, "MOST_ROWS", most)
    layer.indexer, layer.skip_topk = None, True
    launched = []
    for name in ("head_queries", "rope_query"):
        recorded(launched, front, name, monkeypatch)
    slots, selection = torch.tensor([70, 200, 65, 131, 255]), torch.zeros(ROWS, TOPK, dtype=torch.int32)
    ours, theirs = (prepared(layer, monkeypatch, ForwardMode.DECODE, on, slots, selection=selection) for on in (True, False))
    assert [name for name, _ in launched] == (["head_queries"] if most == ROWS else ["rope_query"])
    one, other = ours.pop("q_nope").float(), theirs.pop("q_nope").float()
    assert (one - other).norm() < 0.01 * other.norm()
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode.name)
@pytest.mark.parametrize("form", [None, Scales.POWERS_OF_TWO])
def test_a_graph_of_short_requests_has_neither_query_nor_scores(either_layer, monkeypatch, mode, form):
    """SGLang's own layer does so too where it captures such graphs, of decode alone; both write the same index keys."""
    layer, metadata = either_layer, Short()
    divide_up_to(0, monkeypatch)
    monkeypatch.setattr(capture_mode, "get_capture_attention_variant", lambda: graph_variants.DSA_DENSE)
    monkeypatch.setattr(Backend, "get_indexer_metadata", lambda *arguments: metadata)
    if form is not None:
        fused = layer.indexer.use_dsa_indexer_fusion
        for path in ("fused_qkv_a_proj_with_mqa", "q_b_proj", "indexer.wq_b", *([] if fused else ["indexer.wk"])):
            layer.set_submodule(path, BlockFp8(layer.get_submodule(path), form))
        for module in (front, projections):
            monkeypatch.setattr(module, "scales_of", lambda linear: linear.form)
    queries = []
    layer.indexer.wq_b.register_forward_pre_hook(lambda *arguments: queries.append(mode))
    slots = torch.tensor([70, 200, 65, 131, 255])
    ours = prepared(layer, monkeypatch, mode, True, slots)
    assert not queries
    theirs = prepared(layer, monkeypatch, mode, False, slots)
    assert bool(queries) == mode.is_target_verify()
    if queries:
        for name in ("query", "gates", "topk"):
            theirs.pop(name)
        assert ours.pop("topk") is metadata.made
    assert_same_bits(ours, theirs)
    assert ours.get("topk", metadata.made) is metadata.made
    assert "query" not in ours
    assert (ours["index keys"] != 0x5A).any()


def test_every_token_is_made_by_the_first_layer_of_every_forward():
    made = []
    metadata = SimpleNamespace(every_token=lambda topk: made.append(topk) or torch.full((1, topk), len(made)))
    every = short.EveryToken()
    first, second = ([every.of(layer, metadata, 4) for layer in (2, 3, 6)] for _ in range(2))
    assert made == [4, 4]
    assert all(found is first[0] for found in first)
    assert all(found is second[0] for found in second)
    assert first[0] is not second[0]


def test_sglang_captures_both_kinds_once_they_are_offered(layer, monkeypatch):
    """Its runner makes its variants by this name when it is built, and chooses by the longest request."""
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as runner

    monkeypatch.setenv("NSA_BACKEND_SHORT_GRAPHS", "1")
    monkeypatch.setenv("NSA_BACKEND_SHORT_PREFILLS", "0")
    assert "else create_attention_graph_variants(model_runner.model_config.hf_config)" in inspect.getsource(
        runner.DecodeCudaGraphRunner.__init__
    )
    assert take.take_layer_fronts(torch.nn.ModuleList([layer]), None, served_args(), (Backend,), demanded=False) == 1
    variants = runner.create_attention_graph_variants(None)
    assert variants.capture_labels == (graph_variants.DSA_DENSE, graph_variants.DSA_SPARSE)
    assert (type(variants), variants.index_topk) == (short.ShortVariants, TOPK)
    layer.forward_absorb_prepare = layer.forward_absorb_prepare.own
    monkeypatch.setattr(short.served, "changes_needed", lambda args: [])
    with_drafts = served_args(speculative_algorithm="EAGLE")
    assert take.take_layer_fronts(torch.nn.ModuleList([layer]), None, with_drafts, (Backend,), demanded=False) == 1
    variants = runner.create_attention_graph_variants(None)
    assert (type(variants), variants.index_topk) == (short.RoundVariants, TOPK)
    layer.forward_absorb_prepare = layer.forward_absorb_prepare.own
    layer.use_dsa = False
    arguments = torch.nn.ModuleList([layer]), None, served_args(), (Backend,), False
    with pytest.raises(ValueError, match="NSA_BACKEND_SHORT_GRAPHS=1 and no layer has our front"):
        take.take_layer_fronts(*arguments)
    assert take.take_layer_fronts(*arguments, of_target=False) == 0  # a draft model may have layers of another kind


def test_graphs_of_short_requests_are_refused_before_weights_are_loaded(monkeypatch):
    assert short.short_problems(served_args()) == []
    assert short.wanted(served_args())
    assert short.short_problems(served_args(dcp_size=2)) == []
    assert not short.wanted(served_args(dcp_size=2))
    with monkeypatch.context() as patch:
        patch.setenv(short.SWITCH, "1")
        assert short.wanted(served_args(dcp_size=2))
    assert short.wanted(served_args(enable_dp_attention=True))
    assert short.wanted(served_args(ep_size=2))
    assert not short.wanted(served_args(enable_dp_attention=True, ep_size=2))
    with_drafts = served_args(speculative_algorithm="EAGLE")
    monkeypatch.setattr(short.served, "changes_needed", lambda args: [])
    assert short.wanted(with_drafts)
    assert short.wanted(served_args(speculative_algorithm="EAGLE", enable_dp_attention=True))
    monkeypatch.setattr(short.served, "changes_needed", lambda args: ["drop --speculative-adaptive"])
    assert "one graph alone have them: drop --speculative-adaptive" in short.short_problems(with_drafts)[0]
    monkeypatch.setenv("NSA_BACKEND_SHORT_GRAPHS", "0")
    assert not short.wanted(served_args())
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "0")
    assert "NSA_BACKEND_ROUND_GRAPH=0" in short.short_problems(with_drafts)[0]
    monkeypatch.setenv("NSA_BACKEND_LAYER_FRONT", "0")
    assert "NSA_BACKEND_LAYER_FRONT=0" in short.short_problems(served_args())[0]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_ranks_that_divide_the_kv_write_their_own_and_gather_queries(either_layer, monkeypatch, rank, shared):
    """As SGLang's sequence does, whose gather is the last that it does."""
    layer, group = either_layer, SimpleNamespace(world_size=2, all_gather=lambda mine, dim: torch.cat([mine, -mine], dim))
    layer.dcp_size, selection = 2, torch.zeros(ROWS, TOPK, dtype=torch.int32) if shared else None
    if shared:
        layer.indexer, layer.skip_topk = None, True
    with get_parallel().override(dcp_group=group, attn_dcp_size=2, attn_dcp_rank=rank, dcp_replicate_q_proj=False):
        assert rule.layer_problem(layer) is None
        arguments = (layer, monkeypatch, ForwardMode.TARGET_VERIFY)
        slots = torch.tensor([70, 200, 65, 131, 0])
        sides = [prepared(*arguments, on, slots, 2, rank, selection) for on in (True, False)]
    assert_same_bits(*sides)
    assert sides[0]["q_nope"].shape[1] == 2 * layer.num_local_heads
    written = (sides[0]["kv"] != 7.0).flatten(1).any(1).nonzero().flatten().tolist()
    assert written == ([35, 100] if rank == 0 else [32, 65])


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_divide_the_kv_have_graphs_of_short_requests(either_layer, monkeypatch, rank):
    """All tokens' slots, of which the attention behind picks a rank's own."""
    layer, metadata = either_layer, Short()
    group = SimpleNamespace(world_size=2, all_gather=lambda mine, dim: torch.cat([mine, -mine], dim))
    monkeypatch.setattr(Backend, "get_indexer_metadata", lambda *arguments: metadata)
    layer.dcp_size, sides = 2, []
    with get_parallel().override(dcp_group=group, attn_dcp_size=2, attn_dcp_rank=rank, dcp_replicate_q_proj=False):
        for variant in (graph_variants.DSA_DENSE, graph_variants.DSA_SPARSE):
            monkeypatch.setattr(capture_mode, "get_capture_attention_variant", lambda variant=variant: variant)
            slots = torch.tensor([70, 200, 65, 131, 0])
            sides.append(prepared(layer, monkeypatch, ForwardMode.TARGET_VERIFY, True, slots, 2, rank))
    short_one, usual = sides
    assert short_one.pop("topk") is metadata.made
    assert "query" not in short_one
    assert_same_bits(short_one, {name: usual[name] for name in short_one})
    assert short_one["q_nope"].shape[1] == 2 * layer.num_local_heads


@pytest.mark.parametrize(
    ("mode", "form", "rows_divided"),
    [
        (ForwardMode.DECODE, None, 0),
        (ForwardMode.TARGET_VERIFY, Scales.EXACT, 0),
        (ForwardMode.TARGET_VERIFY, Scales.EXACT, ROWS),
    ],
)
def test_ranks_that_have_the_querys_projection_whole_gather_no_query(either_layer, monkeypatch, mode, form, rows_divided):
    """With --dcp-replicate-q-proj, which SGLang chooses where ranks exchange all to all."""
    layer, heads, generator = either_layer, either_layer.num_local_heads, torch.Generator().manual_seed(1)
    gathered = []
    divide_up_to(rows_divided, monkeypatch)
    monkeypatch.setattr(projections, "LEAST_INNER", HIDDEN)
    whole = ReplicatedLinear(layer.q_lora_rank, 2 * heads * layer.qk_head_dim, bias=False, params_dtype=torch.bfloat16)
    other = 0.1 * torch.randn(layer.q_b_proj.weight.shape, generator=generator).bfloat16()
    whole.weight.data = torch.cat([layer.q_b_proj.weight.data, other])
    layer.dcp_size, layer.w_kc_qrep = 2, torch.cat([layer.w_kc, 2 * layer.w_kc])
    if form is None:
        layer.q_b_proj_qrep_weight = whole.weight.data
    else:
        of_key = [] if layer.indexer.use_dsa_indexer_fusion else ["indexer.wk"]
        for path in ("fused_qkv_a_proj_with_mqa", "q_b_proj", "indexer.wq_b", *of_key):
            layer.set_submodule(path, BlockFp8(layer.get_submodule(path), form))
        layer.q_b_proj_qrep = BlockFp8(whole, form)
        for module in (front, projections):
            monkeypatch.setattr(module, "scales_of", lambda linear: linear.form)

    def all_gather(mine, dim):
        gathered.append(mine.shape)
        return torch.cat([mine, -mine], dim)

    group, slots = SimpleNamespace(world_size=2, all_gather=all_gather), torch.tensor([70, 200, 65, 131, 0])
    parallel = {"dcp_group": group, "attn_dcp_size": 2, "attn_dcp_rank": 1, "dcp_replicate_q_proj": True}
    with get_parallel().override(**parallel):
        if form is None:
            assert rule.layer_problem(layer) is None
        sides = [prepared(layer, monkeypatch, mode, on, slots, 2, 1) for on in (True, False)]
    if form is None or rows_divided == 0:
        assert_same_bits(*sides)
    else:  # sums in another order
        for name in ("q_nope", "q_rope"):
            one, other = (side[name].float() for side in sides)
            assert (one - other).norm() < 0.01 * other.norm(), name
    assert sides[0]["q_nope"].shape[1] == 2 * heads
    assert not gathered


def test_few_rows_take_all_products_from_two_launches(either_layer, monkeypatch):
    """And what a launch takes for one of ours behind it is one: it may begin early, and waits."""
    layer, fused = either_layer, either_layer.indexer.use_dsa_indexer_fusion
    paths = ["fused_qkv_a_proj_with_mqa", "q_b_proj", "indexer.wq_b", *([] if fused else ["indexer.wk"])]
    for path in paths:
        layer.set_submodule(path, BlockFp8(layer.get_submodule(path), Scales.EXACT))
    for module in (front, projections):
        monkeypatch.setattr(module, "scales_of", lambda linear: linear.form)
    monkeypatch.setattr(projections, "LEAST_INNER", HIDDEN)
    launched = []
    for module, name in (
        (kept_input, "quantise"),
        (tile_products, "tile_products"),
        *((front, name) for name in ("norm_rope_store", "rope_quantise")),
        *((kind, "forward") for kind in (BlockFp8, ReplicatedLinear)),
    ):
        recorded(launched, module, name, monkeypatch)
    slots, found, launches = torch.tensor([70, 200, 65, 131, 255]), [], []
    for most, early in ((ROWS, ROWS), (ROWS, ROWS - 1), (ROWS - 1, ROWS)):
        divide_up_to(most, monkeypatch)
        monkeypatch.setattr(projections, "MOST_ROWS_EARLY", early)
        found.append(prepared(layer, monkeypatch, ForwardMode.DECODE, True, slots))
        launches.append(list(launched))
        launched.clear()
    ours = [("quantise", True), ("tile_products", True), ("norm_rope_store", True), ("tile_products", True)]
    assert launches[0] == [*ours, ("rope_quantise", False)]
    assert launches[1] == [(name, name == "tile_products") for name, _ in launches[0]]  # more rows let nothing begin early
    assert {name for name, _ in launches[2]} == {"quantise", "forward", "norm_rope_store", "rope_quantise"}
    assert not any(before_ours for _, before_ours in launches[2])
    for one, other in zip(*(given["kv"][slots].float() for given in found[1:]), strict=True):
        assert (one - other).norm() < 0.01 * other.norm()
    assert torch.equal(found[0]["topk"], found[2]["topk"])
    assert_same_bits(found[0], found[1])


@pytest.mark.parametrize(("columns", "most"), [((3072, 8192), 128), ((2048, 4096), 128), ((24576, 8192), 32)])
def test_both_queries_have_one_launch_of_as_many_rows_as_were_timed(monkeypatch, columns, most):
    """Under DP attention, where a rank has the query of all heads, of fewer."""
    q_b, wq_b = (SimpleNamespace(weight=torch.empty(width, 1536)) for width in columns)
    monkeypatch.setattr(projections, "scales_of", lambda linear: Scales.EXACT)
    products = projections.QueryProducts.of(SimpleNamespace(indexer=SimpleNamespace(wq_b=wq_b), q_b_proj=q_b))
    assert projections.has(products, most)
    assert not projections.has(products, most + 1)


@pytest.mark.parametrize("most", [ROWS, ROWS - 1])
def test_few_rows_that_choose_nothing_have_weights_that_come_early(either_layer, monkeypatch, most):
    """Both products are equal to SGLang's, which multiplies more rows itself."""
    layer, slots, launched = either_layer, torch.tensor([70, 200, 65, 131, 255]), []
    layer.indexer, layer.skip_topk = None, True
    for name in ("fused_qkv_a_proj_with_mqa", "q_b_proj"):
        setattr(layer, name, BlockFp8(getattr(layer, name), Scales.EXACT))
    for module in (front, projections):
        monkeypatch.setattr(module, "scales_of", lambda linear: getattr(linear, "form", None))
    monkeypatch.setattr(projections, "come_early", lambda weights, most: True)
    monkeypatch.setattr(projections, "FEW_ROWS_ALONE", most)

    def multiply(x: tuple[torch.Tensor, torch.Tensor], first: tuple) -> tuple[torch.Tensor]:
        linear = next(one for one in (layer.fused_qkv_a_proj_with_mqa, layer.q_b_proj) if one.weight is first[0])
        launched.append(("multiply", True))
        return (linear.multiplied(x),)

    monkeypatch.setattr(projections, "multiply", multiply)
    for module, name in ((kept_input, "quantise"), (front, "norm_rope_store")):
        recorded(launched, module, name, monkeypatch)
    selection = torch.zeros(ROWS, TOPK, dtype=torch.int32)
    ours, theirs = (prepared(layer, monkeypatch, ForwardMode.DECODE, on, slots, selection=selection) for on in (True, False))
    assert_same_bits(ours, theirs)
    few = [("quantise", True), ("multiply", True), ("norm_rope_store", True), ("multiply", True)]
    assert launched == (few if most == ROWS else [("quantise", False), ("norm_rope_store", False)])


def test_a_projection_by_itself_has_no_more_columns_than_were_timed(monkeypatch):
    """Under DP attention the query of all heads has twice as many."""
    monkeypatch.setattr(projections, "scales_of", lambda linear: linear.form)
    for columns, form, served in ((11264, Scales.EXACT, True), (24576, Scales.EXACT, False), (3072, None, False)):
        linear = SimpleNamespace(weight=torch.empty(columns, 1536), form=form)
        assert (projections.EarlyProduct.of(linear) is not None) is served


def recorded(launched: list, module: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `module.name` note its calls, and what it is told of the launch behind it."""
    call = getattr(module, name)

    def noting(*args, **kwargs):
        launched.append((name, kwargs.get("before_ours", False)))
        return call(*args, **kwargs)

    monkeypatch.setattr(module, name, noting)


@pytest.mark.parametrize("what", ["nothing", "eager", "prefill", "another backend", "scattered", "llama"])
def test_what_a_layer_alone_does_not_tell_goes_to_sglangs_own(layer, monkeypatch, what):
    own, batch = [], SimpleNamespace(forward_mode=ForwardMode.DECODE, out_cache_loc=torch.ones(ROWS, dtype=torch.int64))
    layer.forward_absorb_prepare = lambda *arguments: own.append(arguments)
    prepare, x = LayerFront(layer, (Backend,)), torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    backend = Backend(poisoned_pool())
    context = SimpleNamespace(input_scattered=what == "scattered")
    monkeypatch.setattr("sglang.srt.layers.layer_boundary.get_attn_tp_context", lambda: context)
    monkeypatch.setattr(prepare, "_forward", lambda *arguments: (x, x, x))
    if what == "eager":
        monkeypatch.setattr(dsa_indexer, "get_is_capture_mode", lambda: False)
    elif what == "prefill":
        batch.forward_mode = ForwardMode.EXTEND
    elif what == "another backend":
        backend = SimpleNamespace(token_to_kv_pool=poisoned_pool())
    arguments = (torch.zeros(ROWS, dtype=torch.int64), x, batch, None, x if what == "llama" else None, None)
    with forward_context(ForwardContext(attn_backend=backend)):
        prepare(*arguments)
    assert own == ([] if what == "nothing" else [arguments])


def test_the_layer_calls_what_is_replaced_as_it_is_replaced():
    """By name on the instance, with these arguments in this order; and what it returns goes to attention as it is."""
    theirs = list(inspect.signature(DeepseekV2AttentionMLA.forward_absorb_prepare).parameters)[1:]
    assert list(inspect.signature(LayerFront.__call__).parameters)[1:] == theirs
    source = inspect.getsource(DeepseekV2AttentionMLA.forward_prepare)
    assert "self.forward_absorb_prepare(" in source
    core = list(inspect.signature(DeepseekV2AttentionMLA.forward_absorb_core).parameters)[1:]
    assert core[:10] == [
        "q_pe", "k_pe", "q_nope_out", "k_nope", "forward_batch", "zero_allocator", "positions", "topk_indices",
        "llama_4_scaling", "fusion_plan",
    ]  # fmt: skip
    assert list(inspect.signature(LayerValues.__call__).parameters)[1:] == core
    assert "self.forward_absorb_core(*inner_state)" in inspect.getsource(DeepseekV2AttentionMLA.forward_core)


@pytest.fixture
def layer_of_values(layer, monkeypatch):
    """A layer behind whose attention o_proj has FP8 weights; its attention is a fixed one."""
    generator = torch.Generator().manual_seed(4)
    layer.o_proj = BlockFp8(layer.o_proj, Scales.POWERS_OF_TWO)
    layer.w_vc = torch.randn(layer.num_local_heads, 128, 512, generator=generator).bfloat16().transpose(1, 2)
    layer.current_attention_backend = "dsa"
    monkeypatch.setattr(values, "scales_of", lambda linear: getattr(linear, "form", None))
    attended = torch.randn(ROWS, layer.num_local_heads * 512, generator=generator).bfloat16()
    attend = lambda *given, **named: attended[: len(given[0])] + (named.get("topk_indices") is None)  # noqa: E731
    monkeypatch.setattr(layer.attn_mqa, "forward", attend)
    return layer


def behind_attention(core, rows: int, selection: torch.Tensor | None, k: torch.Tensor | None = None):
    """What a layer returns of `rows` rows."""
    q = torch.zeros(rows, 4, 512, dtype=torch.bfloat16)
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    return core(q[..., :64], k, q, k, batch, None, torch.zeros(rows, dtype=torch.int64), selection, None, None)


@pytest.mark.parametrize("shared", [None, False, True])
def test_values_in_one_launch_are_sglangs_and_the_selection_goes_on(layer_of_values, shared):
    layer, selection = layer_of_values, torch.zeros(ROWS, TOPK, dtype=torch.int32)
    layer.next_skip_topk = shared
    ours, theirs = (behind_attention(core, ROWS, selection) for core in (LayerValues(layer), layer.forward_absorb_core))
    if shared is not None:
        assert ours[1] is (selection if shared else None)
        assert theirs[1] is ours[1]
        ours, theirs = ours[0], theirs[0]
    assert (ours - theirs).float().norm() < 0.01 * theirs.float().norm()


@pytest.mark.parametrize(("of_heads", "early"), [(ROWS, ROWS), (ROWS, ROWS - 1), (ROWS - 1, ROWS)])
def test_values_of_few_rows_have_their_weights_early_and_let_o_proj_begin(layer_of_values, monkeypatch, of_heads, early):
    """What lets o_proj begin is followed by our own product, which waits; of more rows nothing comes early."""
    layer_of_values.next_skip_topk = None
    core, launched = LayerValues(layer_of_values), []
    core.most_of_heads, core.most_early = of_heads, early
    for name in ("head_values", "value_products"):
        recorded(launched, values, name, monkeypatch)
    ours, theirs = (behind_attention(one, ROWS, None) for one in (core, layer_of_values.forward_absorb_core))
    assert (ours - theirs).float().norm() < 0.01 * theirs.float().norm()
    assert launched == [("head_values", early == ROWS) if of_heads == ROWS else ("value_products", False)]


def test_o_proj_of_more_rows_or_of_bfloat16_is_sglangs(layer_of_values, monkeypatch):
    o_proj, x = layer_of_values.o_proj, torch.randn(projections.FEW_ROWS_ALONE + 1, 512).bfloat16()
    wanted = o_proj(x)[0]
    LayerValues(layer_of_values)
    monkeypatch.setattr(projections, "multiply", lambda *_: pytest.fail("ours ran"))
    for given in (x, steps.quantise(x.float(), o_proj.form)):
        assert torch.equal(o_proj(given)[0], wanted)


def test_values_of_calls_that_our_front_has_not_served_are_sglangs(layer_of_values, monkeypatch):
    own = []
    layer_of_values.forward_absorb_core = lambda *arguments: own.append(arguments)
    core = LayerValues(layer_of_values)
    behind_attention(core, ROWS, None, torch.zeros(ROWS, 1, 512))
    core.most_rows = ROWS - 1
    behind_attention(core, ROWS, None)
    assert len(own) == 2
    behind_attention(core, ROWS - 1, None)
    assert len(own) == 2


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("w_vc", None, "not bfloat16"),
        ("v_head_dim", 192, "192 wide"),
        ("dcp_size", 2, "divide"),
        ("o_proj", torch.nn.Linear(1, 1), "bfloat16"),
    ],
)
def test_values_that_are_sglangs_say_why(layer_of_values, name, value, why):
    assert values.values_problem(layer_of_values) is None
    setattr(layer_of_values, name, value)
    assert why in values.values_problem(layer_of_values)


def test_values_come_with_the_front(layer_of_values, monkeypatch, caplog):
    caplog.set_level("INFO", "nsa_backend")
    monkeypatch.setattr(take, "layer_problem", lambda layer: None)
    sglangs = layer_of_values.forward_absorb_core
    for found in ("of 1, values for o_proj are one launch", "of 1, SGLang serves, because o_proj has weights of bfloat16"):
        taken = take.take_layer_fronts(torch.nn.ModuleList([layer_of_values]), None, served_args(), (Backend,), demanded=False)
        assert taken == 1
        assert found in caplog.messages[-1]
        assert isinstance(layer_of_values.forward_absorb_core, LayerValues) == ("one launch" in found)
        layer_of_values.forward_absorb_prepare = layer_of_values.forward_absorb_prepare.own
        layer_of_values.forward_absorb_core = sglangs
        layer_of_values.o_proj = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("part", "name", "value", "why"),
    [
        ("", "use_dsa", False, "no sparse layer"),
        ("indexer", "n_heads", 12, "128 wide"),
        ("indexer", "k_norm", torch.nn.Identity(), "norms"),
        ("q_b_proj", "set_lora", True, "LoRA"),
        ("", "learnable_sink_param", 1, "sinks"),
        ("", "use_deep_gemm_bmm", True, "absorbed"),
        ("q_a_layernorm", "cast_x_before_out_mul", True, "norms"),
        ("indexer.wk", "quant_method", object(), "under object"),
    ],
)
def test_a_layer_that_is_sglangs_says_why(layer, part, name, value, why):
    thing = layer.get_submodule(part) if part else layer
    setattr(thing, name, value)
    assert why in rule.layer_problem(layer)
    with pytest.raises(ValueError, match="NSA_BACKEND_LAYER_FRONT=1 and no layer can"):
        take.take_layer_fronts(torch.nn.ModuleList([layer]), None, served_args(), (Backend,), demanded=True)
    assert take.take_layer_fronts(torch.nn.ModuleList([layer]), None, served_args(), (Backend,), demanded=False) == 0


def served_args(**changed):
    served = {needed.attribute: needed.served[0] for needed in (*options.NEEDED, *short.UNTRIED, *short.OF_RANKS)}
    served |= {
        "speculative_algorithm": None,
        "kv_cache_dtype": "auto",
        "dsa_decode_backend": "fa3",
        "dsa_prefill_backend": "fa3",
        "enable_dp_attention": False,
        "attn_dp_size": 1,
        "attention_backend": "dsa",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
    }
    return SimpleNamespace(**served | changed)


@pytest.mark.parametrize(("asked", "calls"), [(None, [False, False]), ("1", [True, False]), ("0", [])])
def test_a_server_that_asks_for_nothing_starts_without_a_layer_that_can(monkeypatch, asked, calls):
    """Unasked, layers that cannot have it are SGLang's; =1 demands it of the target, as a draft model has other layers."""
    demanded = []
    monkeypatch.setattr(registration.adapter, "take_layer_fronts", lambda runner, backends, wanted: demanded.append(wanted))
    monkeypatch.setattr(registration.adapter, "clear_padding_on_resume", lambda pool: None)
    monkeypatch.setattr(registration.adapter, "settings", lambda runner: SimpleNamespace(num_steps=3))
    config = SimpleNamespace(attention=SimpleNamespace(device_sm=0))
    backend = SimpleNamespace(config=config, log_start=lambda steps: None)
    monkeypatch.setattr(registration, "NativeSparseAttnBackend", lambda runner: backend)
    monkeypatch.delenv("NSA_BACKEND_LAYER_FRONT", raising=False)
    if asked is not None:
        monkeypatch.setenv("NSA_BACKEND_LAYER_FRONT", asked)
    for is_draft in (False, True):
        registration.create_backend(SimpleNamespace(is_draft_worker=is_draft, token_to_kv_pool=None))
    assert demanded == (calls if LAYER_FRONTS.get(installed(), False) or asked == "1" else [])


def test_layers_are_taken_once_and_the_log_says_so(layer, caplog, monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_SHORT_PREFILLS", "0")
    model = torch.nn.ModuleList([layer])
    with caplog.at_level("INFO"):
        assert [take.take_layer_fronts(model, None, served_args(), (Backend,), demanded=True) for _ in range(2)] == [1, 1]
    assert isinstance(layer.forward_absorb_prepare, LayerFront)
    assert [line for line in caplog.messages if "the front of 1 of 1 layers" in line] == caplog.messages[:1]


@pytest.mark.parametrize("either_layer", [True], indirect=True, ids=["glm"])
def test_layers_that_share_a_selection_have_it_too(either_layer):
    either_layer.indexer, either_layer.skip_topk = None, True
    assert take.take_layer_fronts(torch.nn.ModuleList([either_layer]), None, served_args(), (Backend,), demanded=False) == 1
    assert isinstance(either_layer.forward_absorb_prepare, LayerFront)


def test_later_draft_steps_attend_to_what_the_first_selected(layer, monkeypatch):
    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    layer.forward_absorb_prepare = lambda *arguments: 1 / 0
    layer.skip_topk = layer.is_nextn = True
    prepare = LayerFront(layer, (Backend,))
    monkeypatch.setattr(prepare, "_serves", lambda *arguments: True)
    monkeypatch.setattr(prepare, "_with_selection", lambda *arguments: (x, x, arguments[-1]))
    found = prepare(torch.zeros(ROWS, dtype=torch.int64), x, SimpleNamespace(), None, None, x + 1)
    assert torch.equal(found[7], x + 1)


@pytest.mark.parametrize("either_layer", [True], indirect=True, ids=["glm"])
def test_the_look_at_start_looks_at_layers_without_an_indexer_too(either_layer, monkeypatch):
    from sglang.kernels.ops.kvcache import mla_buffer

    def write(cache, slots, *parts):
        cache[slots[slots != 0]] = torch.cat(parts, -1)[slots != 0]

    either_layer.indexer = None
    kv = torch.empty(1, 1, 576, dtype=torch.bfloat16)
    monkeypatch.setattr(mla_buffer, "set_mla_kv_buffer_triton", write)
    assert differing_parts(either_layer, kv, None, rows=3) == []
    whole = either_layer.rotary_emb.forward
    monkeypatch.setattr(either_layer.rotary_emb, "forward", lambda positions, *rest: whole(positions * 0 + 1, *rest))
    found = differing_parts(either_layer, kv, None, rows=3)
    assert [part for part in found if "normal" in part] == ["KV of normal rows", "rotated query of normal rows"]


@pytest.mark.parametrize("option", [*(needed.attribute for needed in options.NEEDED), "trtllm"])
def test_options_that_leave_no_room_are_refused_before_weights_are_loaded(option):
    assert adapter.front_problems(served_args()) == ([] if layer_front_problem() is None else [layer_front_problem()])
    bad = {"dsa_decode_backend": "trtllm", "kv_cache_dtype": "fp8_e4m3"} if option == "trtllm" else {option: "other"}
    (problem,) = adapter.front_problems(served_args(**bad))
    named = {needed.attribute: needed.option for needed in options.NEEDED}.get(option, option)
    assert named in problem or problem == layer_front_problem()


@pytest.fixture
def clamps_of_a_gpu(monkeypatch):
    """Triton's interpreter clamps what is no number to the lower bound, as numpy does, and its PTX to the upper one."""
    builder = triton.runtime.interpreter.InterpreterBuilder

    def clamp(self, x, low, high, propagate):
        return self.ternary_op(x, low, high, lambda x, low, high: np.where(np.isnan(x), high, np.clip(x, low, high)))

    monkeypatch.setattr(builder, "create_clampf", clamp)


@pytest.mark.parametrize(
    ("broken", "dtype", "scales"),
    [
        (None, torch.bfloat16, Scales.POWERS_OF_TWO),
        (None, torch.float8_e4m3fn, None),
        ("rotate_activation", torch.bfloat16, None),
        ("act_quant", torch.float8_e4m3fn, None),
        ("set_mla_kv_buffer_triton", torch.float8_e4m3fn, Scales.POWERS_OF_TWO),
    ],
)
@pytest.mark.usefixtures("clamps_of_a_gpu")
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_the_look_at_start_sees_other_bits(layer, monkeypatch, dtype, scales, broken):
    """Against SGLang's own Triton kernels where they are Triton, interpreted; with one that writes otherwise too."""
    from sglang.kernels.ops.kvcache import dsa_fused_store_index_cache, mla_buffer
    from sglang.kernels.ops.quantization import act_quant_triton

    def write(cache, slots, nope, rope):
        cache[slots[slots != 0]] = torch.cat([nope, rope], -1)[slots != 0]

    monkeypatch.setattr(mla_buffer, "set_mla_kv_buffer_triton", write)
    monkeypatch.setattr(dsa_fused_store_index_cache, "fused_store_index_k_cache", dsa_indexer.fused_store_index_k_cache)
    monkeypatch.setattr(builtin, "quantised", lambda x, scales: x if scales is None else steps.quantise(x.float(), scales))
    kv = torch.empty(1, 1, 576 if dtype == torch.bfloat16 else 656, dtype=dtype)
    where = {"rotate_activation": dsa_indexer, "act_quant": act_quant_triton, "set_mla_kv_buffer_triton": mla_buffer}
    if broken:
        whole = getattr(where[broken], broken)
        nudged = {
            "rotate_activation": lambda x: whole(x) * 2,
            "act_quant": lambda x, *rest: [part.clone().fill_(1) for part in whole(x, *rest)],
            "set_mla_kv_buffer_triton": lambda cache, slots, nope, rope: whole(cache, slots, nope, 0 * rope),
        }
        monkeypatch.setattr(where[broken], broken, nudged[broken])
    torch.manual_seed(0)
    found = differing_parts(layer, kv, scales, rows=3)
    parts = {"rotate_activation": {"index keys", "gates"}, "act_quant": {"index query", "gates"}}.get(broken, set())
    parts |= {f"{part} alone" for part in parts} | ({"KV"} if broken == "set_mla_kv_buffer_triton" else set())
    assert {part.split(" of normal")[0] for part in found if "normal" in part} == parts
    assert broken or found == []


@pytest.mark.parametrize("broken", [None, "fused_k_indexer_norm_rope_store", "fused_q_indexer_rope_first_quant"])
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("either_layer", [True], indirect=True, ids=["glm"])
def test_the_look_at_start_sees_other_bits_of_a_fused_indexer(either_layer, monkeypatch, broken):
    from sglang.kernels.ops.attention.dsa import indexer_k, indexer_q
    from sglang.kernels.ops.kvcache import mla_buffer

    monkeypatch.setattr(
        mla_buffer,
        "set_mla_kv_buffer_triton",
        lambda cache, slots, *parts: cache.index_put_((slots[slots != 0],), torch.cat(parts, -1)[slots != 0]),
    )
    for module, name in ((indexer_k, "fused_k_indexer_norm_rope_store"), (indexer_q, "fused_q_indexer_rope_first_quant")):
        whole, nudged = getattr(dsa_indexer, name), (lambda x: x.flip(-1)) if name == broken else (lambda x: x)
        monkeypatch.setattr(module, name, lambda x, *rest, whole=whole, nudged=nudged: whole(nudged(x), *rest))
    found = differing_parts(either_layer, torch.empty(1, 1, 576, dtype=torch.bfloat16), None, rows=3)
    parts = {
        "fused_k_indexer_norm_rope_store": ["index keys"],
        "fused_q_indexer_rope_first_quant": ["index query", "gates"],
    }
    assert [part for part in found if "normal" in part] == [f"{part} of normal rows" for part in parts.get(broken, [])]
    assert broken or found == []


@pytest.mark.parametrize(("scale_fmt", "form"), [(None, Scales.EXACT), ("ue8m0", Scales.POWERS_OF_TWO)])
def test_the_form_of_scales_is_the_checkpoints(monkeypatch, scale_fmt, form):
    """As SGLang's own linear layer quantises its input for DeepGEMM on Hopper."""
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.quantization import fp8, fp8_utils

    backend = SimpleNamespace(is_auto=lambda: True, is_deep_gemm=lambda: False)
    monkeypatch.setattr(fp8_utils, "get_fp8_gemm_runner_backend", lambda: backend)
    monkeypatch.setattr(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True)
    monkeypatch.setattr(deep_gemm_wrapper, "DEEPGEMM_SCALE_UE8M0", False)
    config = fp8.Fp8Config(True, "dynamic", None, [128, 128])
    config.scale_fmt = scale_fmt
    method = fp8.Fp8LinearMethod(config)
    weight = torch.zeros(192, 256, dtype=torch.float8_e4m3fn)
    assert scales_of(SimpleNamespace(quant_method=method, prefix="wk", weight=weight)) is form
    for change in ({"weight": weight[:96]}, {"block_fp8_mxfp8_ready": True}, {"set_lora": True}, {"bias": weight}):
        with pytest.raises(ValueError, match="wk has"):
            scales_of(SimpleNamespace(**{"quant_method": method, "prefix": "wk", "weight": weight} | change))


def test_sglangs_writer_still_skips_slot_0():
    """Padding rows write their KV nowhere, which the first launch repeats."""
    found = signature("sglang.kernels.ops.kvcache.mla_buffer", "set_mla_kv_buffer_triton").parameters
    assert "reserved_skip_index" in found
