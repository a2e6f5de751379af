"""What of a layer's front runs beside what and after what on SGLang's two streams; all modes take the same path."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from layer_on_cpu import HIDDEN, ROWS, TOPK, a_layer, poisoned_pool
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from nsa_backend.adapters.dsa.layer_front import front
from nsa_backend.benchmarks.calls.whole_front import Backend


class Streams:
    """Two streams that remember, of everything launched, all that it comes after."""

    def __init__(self):
        self.behind = {"main": set(), "side": set()}
        self.before: dict[str, set[str]] = {}
        self.current = "main"

    def launch(self, name: str) -> None:
        self.before[name] = set(self.behind[self.current])
        self.behind[self.current].add(name)

    def traced(self, name: str, function):
        def run(*args, **kwargs):
            self.launch(name)
            return function(*args, **kwargs)

        return run

    def stream(self, name: str):
        def wait_stream(other):
            self.behind[name] |= self.behind[other.name]

        return SimpleNamespace(name=name, wait_stream=wait_stream)

    @contextlib.contextmanager
    def running(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


@pytest.fixture
def layer(monkeypatch):
    yield from a_layer(monkeypatch)


@pytest.fixture
def streams(layer, monkeypatch) -> Streams:
    """That the launches of `layer` go to, by name."""
    streams = Streams()
    main, layer.alt_stream = streams.stream("main"), streams.stream("side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main if streams.current == "main" else layer.alt_stream)
    monkeypatch.setattr(torch.cuda, "stream", streams.running)
    monkeypatch.setattr(deep_gemm_wrapper, "configure_deep_gemm_num_sms", lambda count: contextlib.nullcontext())
    layer.indexer.half_device_sm_count = 64
    for path in ("fused_qkv_a_proj_with_mqa", "q_b_proj", "indexer.wq_b", "indexer.wk"):
        layer.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: streams.launch(path.split(".")[-1]))
    for module, name in ((front, "norm_rope_store"), (front, "rope_quantise"), (front, "rope_query"), (torch, "bmm")):
        monkeypatch.setattr(module, name, streams.traced(name, getattr(module, name)))
    gates = layer.indexer._weights_proj_bf16_in_fp32_out
    layer.indexer._weights_proj_bf16_in_fp32_out = streams.traced("gates", gates)
    chosen = torch.zeros(ROWS, TOPK, dtype=torch.int32)
    layer.indexer._get_topk_paged = streams.traced("top-k", lambda *_: chosen)
    return streams


def order(prepare, streams: Streams, selection: torch.Tensor | None = None) -> dict[str, set[str]]:
    """Of each launch of a layer's front, and of `attention` behind it, what it comes after."""
    batch = SimpleNamespace(out_cache_loc=torch.arange(1, 1 + ROWS))
    arguments = (torch.zeros(ROWS, dtype=torch.int64), torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16), batch, selection)
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=Backend(poisoned_pool()))):
        (prepare._forward if selection is None else prepare._with_selection)(*arguments)
    streams.launch("attention")
    assert "attention" in streams.before
    assert streams.behind["side"] <= streams.before["attention"], "nothing of the side is left behind"
    return streams.before


AFTER = {
    "norm_rope_store": {"fused_qkv_a_proj_with_mqa", "wk"},
    "q_b_proj": {"norm_rope_store"},
    "wq_b": {"norm_rope_store"},
    "rope_quantise": {"q_b_proj", "wq_b", "gates"},
    "bmm": {"q_b_proj"},
    "top-k": {"rope_quantise"},
    "attention": {"top-k", "bmm", "rope_quantise"},
}
BESIDE = [
    ("fused_qkv_a_proj_with_mqa", "wk"), ("fused_qkv_a_proj_with_mqa", "gates"), ("q_b_proj", "wq_b"), ("bmm", "rope_quantise"),
    ("bmm", "top-k"),
]  # fmt: skip


def assert_order(found: dict[str, set[str]], after: dict[str, set[str]], beside: list[tuple[str, str]]) -> None:
    for name, needed in after.items():
        assert needed <= found[name], name
    for one, other in beside:
        assert other not in found[one], (one, other)
        assert one not in found[other], (one, other)


def test_everything_comes_after_what_it_reads_and_the_query_beside_the_indexer(layer, streams):
    found = order(front.LayerFront(layer, (Backend,)), streams)
    assert len(found) == 10
    assert_order(found, AFTER, BESIDE)


class FewRows:
    """Products that serve every batch here."""

    most_rows = ROWS

    def __init__(self, products):
        self.products = products

    def __call__(self, x, *linears):
        return self.products(x)


def test_products_of_few_rows_are_two_launches_and_the_absorption_runs_beside(layer, streams, monkeypatch):
    prepare, indexer = front.LayerFront(layer, (Backend,)), layer.indexer
    linears = [linear.weight for linear in (layer.fused_qkv_a_proj_with_mqa, indexer.wk, indexer.weights_proj)]
    queries = [linear.weight for linear in (layer.q_b_proj, indexer.wq_b)]
    first = streams.traced("first", lambda x: [x @ weight.T.bfloat16() for weight in linears])
    prepare.first_products = FewRows(lambda x: [*(out := first(x))[:2], out[2].float()])
    prepare.query_products = FewRows(streams.traced("queries", lambda q: [q @ weight.T for weight in queries]))
    after = {
        "norm_rope_store": {"first"}, "queries": {"norm_rope_store"}, "rope_quantise": {"queries"}, "bmm": {"queries"},
        "top-k": {"rope_quantise"}, "attention": {"top-k", "bmm"},
    }  # fmt: skip
    found = order(prepare, streams)
    assert len(found) == 7
    assert_order(found, after, [("bmm", "rope_quantise"), ("bmm", "top-k")])


def test_with_an_earlier_selection_the_absorption_runs_beside_rope(layer, streams):
    found = order(front.LayerFront(layer, (Backend,)), streams, torch.zeros(ROWS, TOPK, dtype=torch.int32))
    after = {
        "norm_rope_store": {"fused_qkv_a_proj_with_mqa"}, "q_b_proj": {"norm_rope_store"}, "rope_query": {"q_b_proj"},
        "bmm": {"q_b_proj"}, "attention": {"rope_query", "bmm"},
    }  # fmt: skip
    assert len(found) == 6
    assert_order(found, after, [("bmm", "rope_query")])
