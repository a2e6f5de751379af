"""What of a layer's front runs beside what and after what on SGLang's two streams; all modes take the same path."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from layer_on_cpu import HIDDEN, ROWS, TOPK, Backend, a_layer, poisoned_pool
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from nsa_backend.adapters.dsa.layer_front import front


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
def order(layer, monkeypatch) -> dict[str, set[str]]:
    """Of each launch of a layer's front, and of `attention` behind it, what it comes after."""
    streams = Streams()
    main, layer.alt_stream = streams.stream("main"), streams.stream("side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main if streams.current == "main" else layer.alt_stream)
    monkeypatch.setattr(torch.cuda, "stream", streams.running)
    monkeypatch.setattr(deep_gemm_wrapper, "configure_deep_gemm_num_sms", lambda count: contextlib.nullcontext())
    layer.indexer.half_device_sm_count = 64
    for path in ("fused_qkv_a_proj_with_mqa", "q_b_proj", "indexer.wq_b", "indexer.wk"):
        layer.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: streams.launch(path.split(".")[-1]))
    for module, name in ((front, "norm_rope_store"), (front, "rope_quantise"), (torch, "bmm")):
        monkeypatch.setattr(module, name, streams.traced(name, getattr(module, name)))
    gates = layer.indexer._weights_proj_bf16_in_fp32_out
    layer.indexer._weights_proj_bf16_in_fp32_out = streams.traced("gates", gates)
    chosen = torch.zeros(ROWS, TOPK, dtype=torch.int32)
    layer.indexer._get_topk_paged = streams.traced("top-k", lambda *_: chosen)
    batch = SimpleNamespace(out_cache_loc=torch.arange(1, 1 + ROWS))
    x = torch.ones(ROWS, HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=Backend(poisoned_pool()))):
        front.LayerFront(layer, (Backend,))._forward(torch.zeros(ROWS, dtype=torch.int64), x, batch, None)
    streams.launch("attention")
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


def test_everything_comes_after_what_it_reads_and_the_query_beside_the_indexer(order):
    assert len(order) == 10
    for name, needed in AFTER.items():
        assert needed <= order[name], name
    for one, other in BESIDE:
        assert other not in order[one], (one, other)
        assert one not in order[other], (one, other)
