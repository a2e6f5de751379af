"""The benchmark of a layer's front on the CPU: all of its sides run SGLang's layer and leave the same caches."""

from __future__ import annotations

import pytest
import torch
from layer_on_cpu import HIDDEN, BlockFp8, a_layer

from nsa_backend.adapters.dsa.layer_front import builtin, values
from nsa_backend.benchmarks.calls import whole_front
from nsa_backend.benchmarks.calls.whole_layer import SHAPES
from nsa_backend.kernels.layer_front_weights import Scales


@pytest.fixture(params=SHAPES)
def model_and_layer(request, monkeypatch):
    for layer in a_layer(monkeypatch, fused=SHAPES[request.param]["neighbours"]):
        yield request.param, layer


def test_all_sides_leave_the_same_caches_and_give_the_same_output(model_and_layer, monkeypatch):
    model, layer = model_and_layer
    layer.o_proj, layer.current_attention_backend = BlockFp8(layer.o_proj, Scales.POWERS_OF_TWO), "dsa"
    monkeypatch.setattr(values, "scales_of", lambda linear: linear.form)
    monkeypatch.setattr(whole_front, "TOPK", 32)
    if not SHAPES[model]["index_heads"]:
        layer.indexer, layer.skip_topk = None, True

    def write(cache, slots, *parts):
        cache[slots] = torch.cat(parts, -1)

    monkeypatch.setitem(SHAPES, model, SHAPES[model] | {"hidden": HIDDEN})
    monkeypatch.setattr(whole_front, "whole_layer", lambda *_: layer)
    monkeypatch.setattr(whole_front, "POSITIONS", len(layer.rotary_emb.cos_sin_cache))
    monkeypatch.setattr(builtin, "write_kv", write)
    left, outputs = [], []
    with whole_front.fronts(model, "bf16", 3, "cpu", whole=True) as sides:
        assert [len(calls) for calls in sides.values()] == [8] * 5
        for name, calls in sides.items():
            *found, kv, keys = calls[0]()
            outputs += found if "o_proj" in name else []
            left.append((kv.clone(), keys.clone()))
            kv.zero_()
            keys.zero_()
    (kv, keys), *others = left
    assert kv.any()
    assert keys.any() == (layer.indexer is not None)
    assert all(torch.equal(kv, other[0]) and torch.equal(keys, other[1]) for other in others)
    outputs = [found[0] if isinstance(found, tuple) else found for found in outputs]
    assert len(outputs) == 3
    assert all((found - outputs[0]).float().norm() < 0.01 * outputs[0].float().norm() for found in outputs)
