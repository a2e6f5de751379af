"""Weights of later projections: when a layer asks for them, and on which stream."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from layer_on_cpu import ROWS, a_layer
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_dsa_layer_front import prepared, recorded

from nsa_backend.adapters.dsa.layer_front import ahead, front
from nsa_backend.refusals import refusals
from nsa_backend.releases import LAYER_FRONTS, installed

if installed() not in LAYER_FRONTS:
    pytest.skip("layers of this release have no front of ours", allow_module_level=True)


class Side:
    """In place of a second stream: what is told of it, in order."""

    def __init__(self, seen: list, is_apart: bool):
        self.seen, self.is_apart = seen, is_apart

    def fork(self) -> None:
        self.seen.append("fork")

    @contextlib.contextmanager
    def running(self):
        self.seen.append("on the side")
        yield
        self.seen.append("back")


@pytest.fixture
def layer():
    """The weights that it multiplies after its first ones, each of another size."""
    linears = {name: SimpleNamespace(weight=torch.empty(size)) for name, size in (("q_b_proj", 1), ("o_proj", 4))}
    return SimpleNamespace(**linears, w_kc=torch.empty(2), w_vc=torch.empty(3))


@pytest.mark.parametrize(
    ("said", "rows", "is_apart", "asks"),
    [("1", 1, True, True), ("1", 16, True, True), ("1", 17, True, False), ("1", 0, True, False), ("1", 1, False, False),
     ("0", 1, True, False), (None, 1, True, False)],
)  # fmt: skip
def test_few_rows_ask_beside_the_first_products(monkeypatch, layer, said, rows, is_apart, asks):
    seen = []
    monkeypatch.setattr(ahead, "ask_for", lambda *weights: seen.append([len(weight) for weight in weights]))
    monkeypatch.delenv(ahead.SWITCH, raising=False)
    if said is not None:
        monkeypatch.setenv(ahead.SWITCH, said)
    ahead.ask_ahead(layer, rows, Side(seen, is_apart))
    assert seen == (["fork", "on the side", [1, 2, 3, 4], "back"] if asks else [])


@pytest.mark.parametrize("fused", [False, True], ids=["deepseek", "glm"])
def test_a_layer_asks_once_between_its_first_products_and_its_norms(monkeypatch, fused):
    layers, launched, asked = a_layer(monkeypatch, fused=fused), [], []
    layer = next(layers)
    recorded(launched, layer, "prepare_qkv_latent", monkeypatch)
    recorded(launched, front, "norm_rope_store", monkeypatch)
    monkeypatch.setattr(front, "ask_ahead", lambda *given: (asked.append(given[:2]), launched.append(("ask", False))))
    prepared(layer, monkeypatch, ForwardMode.DECODE, True, torch.tensor([70, 200, 65, 131, 255]))
    assert [name for name, _ in launched] == ["prepare_qkv_latent", "ask", "norm_rope_store"]
    assert asked == [(layer, ROWS)]
    layers.close()


def test_layers_of_sglangs_cannot_ask(arguments, monkeypatch):
    monkeypatch.setenv(ahead.SWITCH, "1")
    monkeypatch.setenv("NSA_BACKEND_LAYER_FRONT", "0")
    (sentence,) = refusals(arguments(tp_size=2))
    assert sentence == (
        "NSA_BACKEND_WEIGHTS_AHEAD=1: NSA_BACKEND_LAYER_FRONT=0 leaves SGLang's front, and they need ours: unset one"
    )
