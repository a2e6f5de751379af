"""The benchmark of a layer's front on the CPU: all of its sides run SGLang's layer and leave the same caches."""

from __future__ import annotations

import pytest
import torch
from layer_on_cpu import HIDDEN, a_layer

from nsa_backend.adapters.dsa.layer_front import builtin
from nsa_backend.benchmarks.calls import whole_front
from nsa_backend.benchmarks.calls.whole_layer import SHAPES


@pytest.fixture(params=SHAPES)
def model_and_layer(request, monkeypatch):
    for layer in a_layer(monkeypatch, fused=SHAPES[request.param]["neighbours"]):
        yield request.param, layer


def test_both_sides_leave_the_same_caches(model_and_layer, monkeypatch):
    model, layer = model_and_layer
    if not SHAPES[model]["index_heads"]:
        layer.indexer, layer.skip_topk = None, True

    def write(cache, slots, *parts):
        cache[slots] = torch.cat(parts, -1)

    monkeypatch.setitem(SHAPES, model, SHAPES[model] | {"hidden": HIDDEN})
    monkeypatch.setattr(whole_front, "whole_layer", lambda *_: layer)
    monkeypatch.setattr(whole_front, "POSITIONS", len(layer.rotary_emb.cos_sin_cache))
    monkeypatch.setattr(builtin, "write_kv", write)
    left = []
    with whole_front.fronts(model, "bf16", 3, "cpu") as sides:
        assert {name: len(calls) for name, calls in sides.items()} == dict.fromkeys(["ours", "SGLang's"], 8)
        for calls in sides.values():
            *_, kv, keys = calls[0]()
            left.append((kv.clone(), keys.clone()))
            kv.zero_()
            keys.zero_()
    (kv, keys), other = left
    assert kv.any()
    assert keys.any() == (layer.indexer is not None)
    assert torch.equal(kv, other[0])
    assert torch.equal(keys, other[1])
