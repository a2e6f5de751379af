"""Index queries and keys of prefills in pieces by our launches: SGLang's layer leaves the same keys and scores the same."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from layer_on_cpu import HIDDEN, INDEX_HEADS, TOPK, a_layer, assert_same_bits, poisoned_pool
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.layers.attention.dsa import dsa_prefill_cuda_graph as sglangs
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from nsa_backend.adapters import divided_indexer
from nsa_backend.adapters.dsa.layer_front import index_prefills
from nsa_backend.adapters.dsa.layer_front.kept_input import KEPT
from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.projection_inputs import quantise

TOKENS, PADDED = 6, 8


class Metadata:
    """Of rows that all are long; `room` is where their selections are to lie."""

    room = None

    def __init__(self, layer: int):
        self.of_layer = layer

    def long_rows(self, *asked) -> None:
        return None

    @contextmanager
    def writing(self, out):
        self.room = out
        yield
        self.room = None


class Backend:
    def __init__(self, pool):
        self.token_to_kv_pool = pool

    def get_indexer_metadata(self, layer_id, batch):
        return Metadata(layer_id)


@pytest.fixture(params=[False, True], ids=["deepseek", "glm"])
def layer(request, monkeypatch):
    """Whose indexer has our launches; SGLang's piece is there as a function, which its operator is on a GPU."""
    for attention in a_layer(monkeypatch, fused=request.param):
        monkeypatch.setattr(dsa_indexer, "get_is_capture_mode", lambda: False)
        monkeypatch.setattr(index_prefills, "hook", lambda *arguments: None)
        index_prefills.take([attention], (Backend,))
        source = inspect.getsource(sglangs)
        begin = source.index("def pcg_dsa_indexer_prefill_split")
        there: dict = {}
        exec(source[begin : source.index("\nbcg_dsa_indexer_prefill_split")], vars(sglangs), there)
        monkeypatch.setattr(sglangs, "_is_cuda", True)
        monkeypatch.setattr(sglangs, "pcg_dsa_indexer_prefill_split", there["pcg_dsa_indexer_prefill_split"])
        gates = dsa_indexer.Indexer._get_logits_head_gate
        monkeypatch.setattr(dsa_indexer.Indexer, "_get_logits_head_gate", inspect.unwrap(gates))  # without its compiler
        yield attention


def selected(layer, monkeypatch, piece, lengths: int = 5000, **changed) -> dict[str, torch.Tensor]:
    """What a prefill of TOKENS rows, in a graph of PADDED, leaves in its pool and hands on to be scored."""
    generator, pool, scored = torch.Generator().manual_seed(1), poisoned_pool(), {}

    def select(self, dual_stream, batch, layer_id, q, weights, metadata, topk_result):
        scored.update(query=q, gates=weights[: len(q)])
        assert (dual_stream, metadata.of_layer) == (False, layer_id)
        assert metadata.room is (None if piece is sglangs.pcg_dsa_indexer_prefill_split else topk_result)
        topk_result[: len(q)] = 3

    monkeypatch.setattr(dsa_indexer.Indexer, "_get_topk_ragged", select)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, extend_num_tokens=TOKENS, attn_cp_metadata=None, seq_lens=torch.tensor([lengths]),
        seq_lens_cpu=torch.tensor([lengths]), out_cache_loc=torch.tensor([70, 200, 65, 131, 255, 90, 0, 0]),
    )  # fmt: skip
    vars(batch).update(changed)
    context = SimpleNamespace(forward_batch=batch, dsa_indexers={0: layer.indexer})
    monkeypatch.setattr(sglangs, "get_tc_piecewise_forward_context", lambda: context)
    topk_result = torch.full((PADDED, TOPK), -1, dtype=torch.int32)
    given = {
        "layer_id": 0, "x": torch.randn(PADDED, HIDDEN, generator=generator).bfloat16(),
        "q_lora": torch.randn(PADDED, 256, generator=generator).bfloat16(),
        "positions": torch.randint(64, (PADDED,), generator=generator), "topk_result": topk_result,
    }  # fmt: skip
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=Backend(pool))):
        piece(**given)
    return {"topk": topk_result, "kv": pool.kv, "index keys": pool.index_keys} | scored


def test_a_prefill_leaves_sglangs_keys_and_is_scored_by_its_queries(layer, monkeypatch):
    with monkeypatch.context() as ours_alone:
        for name in ("_get_q_k_bf16", "_fused_q_prepare_and_store"):
            ours_alone.setattr(dsa_indexer.Indexer, name, lambda *_, **__: pytest.fail("SGLang's sequence ran"))
        ours = selected(layer, ours_alone, index_prefills.select)
    theirs = selected(layer, monkeypatch, sglangs.pcg_dsa_indexer_prefill_split)
    assert ours["query"].shape == (TOKENS, INDEX_HEADS, 128)
    assert_same_bits(ours, theirs)
    assert (ours["topk"][TOKENS:] == -1).all()
    written = ours["index keys"][:, : PAGE_SIZE * 128].reshape(-1, 128)
    assert (written[0] == 0x5A).all()  # padding writes nothing here


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_divide_queries_make_their_own(layer, monkeypatch, rank):
    """Of every other row; keys are whole on each."""
    theirs = selected(layer, monkeypatch, sglangs.pcg_dsa_indexer_prefill_split)
    monkeypatch.setattr(divided_indexer, "is_hooked", lambda target: target == divided_indexer.SELECTION)
    monkeypatch.setenv(divided_indexer.SWITCH, "1")
    monkeypatch.setattr(divided_indexer, "rows_of_rank", lambda batch: slice(rank, TOKENS, 2))
    monkeypatch.setattr(divided_indexer, "ranks", lambda: SimpleNamespace(rank_in_group=rank, world_size=2))
    ours = selected(layer, monkeypatch, index_prefills.select)
    assert_same_bits(
        {name: ours[name] for name in ("query", "gates", "index keys")},
        {name: theirs[name][rank::2] for name in ("query", "gates")} | {"index keys": theirs["index keys"]},
    )


@pytest.mark.parametrize(
    "what", ["short requests", "another pool", "another backend", "another layer", "prefill context parallel", "slots apart"]
)
def test_other_prefills_are_sglangs(layer, monkeypatch, what):
    """Its piece runs in place of ours, with what ours was given."""
    asked, changed = [], {}
    if what == "short requests":
        changed["lengths"] = TOPK
    elif what == "another pool":
        monkeypatch.setattr(index_prefills, "_pool", lambda: SimpleNamespace())
    elif what == "another backend":
        monkeypatch.setitem(index_prefills._LAYERS, layer.indexer, (layer, (int,)))
    elif what == "another layer":
        monkeypatch.delitem(index_prefills._LAYERS, layer.indexer)
    elif what == "prefill context parallel":
        monkeypatch.setattr(layer.indexer, "dsa_enable_prefill_cp", True)
    else:
        changed["out_cache_loc"] = torch.zeros(PADDED, 2, dtype=torch.int64)[:, 0]
    monkeypatch.setattr(sglangs, "pcg_dsa_indexer_prefill_split", lambda **given: asked.append(given))
    found = selected(layer, monkeypatch, index_prefills.select, **changed)
    assert len(asked) == 1
    assert asked[0]["topk_result"] is found["topk"]
    assert "query" not in found
    assert (found["index keys"] == 0x5A).all()


def test_the_piece_outside_of_graphs_is_ours(layer, monkeypatch):
    """SGLang's indexer calls it by this name, with names alone; the capture keeps what decides at every replay."""
    source = inspect.getsource(dsa_indexer.Indexer.forward_cuda)
    assert f"{index_prefills.NAME}\n" in source
    assert f"{index_prefills.NAME} = eager_on_graph(True)(pcg_dsa_indexer_prefill_split)" in inspect.getsource(sglangs)
    parameters = inspect.signature(index_prefills.select).parameters
    assert list(parameters)[:-2] == list(inspect.signature(sglangs.pcg_dsa_indexer_prefill_split).parameters)
    hooked = []
    monkeypatch.setattr(index_prefills, "hook", lambda path, around, kind: hooked.append((path, around)))
    index_prefills.take([SimpleNamespace(indexer=None)], (Backend,))
    assert hooked == []
    index_prefills.take([layer], (Backend,))
    assert hooked == [(f"{index_prefills.MODULE}.{index_prefills.NAME}", index_prefills._in_pieces)]


@pytest.mark.parametrize("rows", [PADDED, PADDED - 1])
def test_the_piece_is_given_what_the_norm_has_quantised(layer, monkeypatch, rows):
    """Where index keys are a product in FP8; as tensors of their own, since the capture holds no others weakly."""
    ran = []
    monkeypatch.setattr(index_prefills, "scales_of", lambda linear: Scales.EXACT)
    monkeypatch.setattr(index_prefills, "_piece", lambda: lambda **given: ran.append(given))
    context = SimpleNamespace(dsa_indexers={3: layer.indexer})
    monkeypatch.setattr(sglangs, "get_tc_piecewise_forward_context", lambda: context)
    x = torch.randn(rows, HIDDEN).bfloat16()
    values, of_values = quantise(x, Scales.EXACT)
    KEPT.keep(x, Scales.EXACT, (values, of_values))
    for _ in range(2):
        index_prefills._in_pieces(None, layer_id=3, x=x)
    assert [given["x"] is x for given in ran] == [True, True]
    taken = rows == PADDED and not layer.indexer.use_dsa_indexer_fusion
    assert [set(given) - {"layer_id", "x"} for given in ran] == [{"values", "scales"} if taken else set(), set()]
    KEPT.forget()
    if taken:
        assert ran[0]["values"] is values
        assert torch.equal(ran[0]["scales"].T, of_values)
        assert ran[0]["scales"].is_contiguous()


def test_index_keys_are_of_what_the_norm_has_quantised(layer, monkeypatch):
    """Gates are not: their product is of bfloat16."""
    asked = []
    if not layer.indexer.use_dsa_indexer_fusion:
        own = layer.indexer.wk.forward
        monkeypatch.setattr(
            layer.indexer.wk, "forward", lambda x: asked.append(x) or own(torch.zeros(PADDED, HIDDEN).bfloat16())
        )
    scales = torch.arange(2 * PADDED).view(2, PADDED).float()
    selected(layer, monkeypatch, partial(index_prefills.select, values="values", scales=scales))
    for values, of_values in asked:
        assert values == "values"
        assert torch.equal(of_values, scales.T)
    assert len(asked) == (not layer.indexer.use_dsa_indexer_fusion)
