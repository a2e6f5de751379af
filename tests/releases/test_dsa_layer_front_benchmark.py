"""The benchmark of a layer's front on the CPU: all of its sides run SGLang's layer and leave the same caches."""

from __future__ import annotations

import pytest
import torch
from layer_on_cpu import HIDDEN, a_layer

from nsa_backend.adapters.dsa.layer_front import builtin
from nsa_backend.benchmarks.calls import whole_front
from nsa_backend.testing.whole_layer import SHAPES


@pytest.fixture(params=SHAPES)
def model_and_layer(request, monkeypatch):
    for layer in a_layer(monkeypatch, fused=SHAPES[request.param]["neighbours"]):
        yield request.param, layer


@pytest.mark.parametrize("rows", [3, 40])
def test_all_sides_leave_the_same_caches(model_and_layer, monkeypatch, rows):
    (model, layer), pools, whole_pool = model_and_layer, [], whole_front.one_layers_pool
    if not SHAPES[model]["index_heads"]:
        layer.indexer, layer.skip_topk = None, True

    def pool(*arguments):
        pools.append(whole_pool(*arguments))
        return pools[-1]

    def write(cache, slots, *parts):
        cache[slots] = torch.cat(parts, -1)

    monkeypatch.setitem(SHAPES, model, SHAPES[model] | {"hidden": HIDDEN})
    monkeypatch.setattr(whole_front, "whole_layer", lambda *_: layer)
    monkeypatch.setattr(whole_front, "POSITIONS", len(layer.rotary_emb.cos_sin_cache))
    monkeypatch.setattr(whole_front, "one_layers_pool", pool)
    monkeypatch.setattr(builtin, "write_kv", write)
    left = []
    with whole_front.fronts(model, "bf16", rows, "cpu") as sides:
        more = ["ours, all products divided"] if rows > 32 else []
        assert {name: len(calls) for name, calls in sides.items()} == dict.fromkeys(["ours", "SGLang's", *more], 8)
        for calls in sides.values():
            calls[0]()
            left.append((pools[0].kv.clone(), pools[0].index_keys.clone()))
            for cache in (pools[0].kv, pools[0].index_keys):
                cache.zero_()
    (kv, keys), *others = left
    assert kv.any()
    assert keys.any() == (layer.indexer is not None)
    assert all(torch.equal(kv, other[0]) and torch.equal(keys, other[1]) for other in others)
