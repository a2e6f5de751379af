"""Attention of a prefill through the backend: dense where it is short, on dequantised KV where the cache is FP8."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from batches import forward_batch, prefill_batch, random_batch

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.attention.dense_prefill import DensePrefill
from nsa_backend.attention.interface import NothingToPrepare
from nsa_backend.metadata.modes import is_paged, plan_for
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls

HEADS, LATENT, ROPE = 4, 8, 4
LAYER = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, v_head_dim=LATENT, head_dim=LATENT + ROPE, scaling=0.5, logit_cap=0.0)


class Recorded(NothingToPrepare):
    """Stands in for an implementation and keeps what it was given."""

    def forward(self, given):
        self.given = given
        return torch.zeros(len(given.q_nope), HEADS, LATENT)


class Pool:
    """A KV pool that says what was written."""

    def __init__(self, dtype):
        self.dtype, self.size, self.page_size = dtype, 2**20 - 64, 64
        self.cache, self.written = torch.zeros(10, 1, 20), []

    def get_key_buffer(self, layer_id):
        return self.cache

    def set_mla_kv_buffer(self, layer, locations, k, k_rope):
        self.written.append(locations)


@pytest.fixture
def prefilling(make_runner):
    """Returns a function of cached and new tokens that gives a backend with a pool, prepared for such a prefill."""

    def prepare(prefix: list[int], new: list[int], *, dtype=torch.bfloat16, dense=False) -> SimpleNamespace:
        runner = make_runner(num_steps=1)
        runner.token_to_kv_pool = Pool(dtype)
        backend = create_backend(runner)
        attention = replace(backend.config.attention, kv_cache_dtype=dtype)
        backend.config = backend.writer.config = replace(backend.config, attention=attention, prefill_impl="flashmla_sparse")
        backend.dense_prefill.runs = dense
        backend.prefill_attention = Recorded()
        batch = prefill_batch(runner, prefix, new)
        for name, value in calls.batch_fields(SimpleNamespace(runner=runner, backend=backend)).items():
            setattr(batch, name, value)
        backend.init_forward_metadata(batch)
        return SimpleNamespace(backend=backend, batch=batch, pool=runner.token_to_kv_pool, rows=sum(new))

    return prepare


def test_a_dense_prefill_attends_with_the_decompressed_heads(prefilling, monkeypatch):
    """SGLang has saved the KV itself; asked to save it again, the backend refuses."""
    forward = prefilling([7, 28], [2, 2], dense=True)
    backend, q, k, v = forward.backend, torch.randn(4, 48), torch.randn(39, 48), torch.randn(39, 32)
    given = []
    monkeypatch.setattr(backend.dense_prefill, "forward", lambda *values: given.append(values) or "attended")
    assert backend.forward_extend(q, k, v, LAYER, forward.batch, save_kv_cache=False) == "attended"
    assert given == [(q, k, v, LAYER, backend.forward_metadata)]
    with pytest.raises(ValueError, match="it would be written twice"):
        backend.forward_extend(q, k, v, LAYER, forward.batch)
    assert backend.forward_extend(q, None, v, LAYER, forward.batch) == "attended"
    assert not forward.pool.written


def sparse(forward: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend; returns the new tokens' KV."""
    rows = forward.rows
    k, k_rope = torch.randn(rows, 1, LATENT), torch.randn(rows, 1, ROPE)
    query, rope = torch.randn(rows, HEADS * LATENT), torch.randn(rows, HEADS * ROPE)
    slots = torch.zeros(rows, 64, dtype=torch.int32)
    forward.backend.forward_extend(query, k, k, LAYER, forward.batch, q_rope=rope, k_rope=k_rope, topk_indices=slots)
    return k, k_rope


def test_a_first_prefill_on_fp8_attends_to_the_exact_new_tokens(prefilling):
    forward = prefilling([0, 0], [3, 2], dtype=torch.float8_e4m3fn)
    k, k_rope = sparse(forward)
    assert torch.equal(forward.backend.prefill_attention.given.kv_cache, torch.cat([k, k_rope], -1))
    assert [locations.tolist() for locations in forward.pool.written] == [[0, 1, 2, 3, 4]]


def test_a_prefill_on_fp8_behind_a_prefix_attends_to_the_dequantised_tokens(prefilling, monkeypatch):
    forward = prefilling([70, 0], [3, 2], dtype=torch.float8_e4m3fn)
    asked = []
    monkeypatch.setattr(adapter, "dequantize_k_cache_paged", lambda *values: asked.append(values) or "dequantised")
    sparse(forward)
    assert forward.backend.prefill_attention.given.kv_cache == "dequantised"
    ((cache, slots),) = asked
    assert cache is forward.pool.cache
    table, rows = forward.backend.writer.req_to_token, forward.batch.req_pool_indices
    assert slots.tolist() == [*table[rows[0], :73].tolist(), *table[rows[1], :2].tolist()]


def test_a_prefill_on_bfloat16_attends_to_the_cache_itself(prefilling):
    forward = prefilling([70, 0], [3, 2])
    sparse(forward)
    assert forward.backend.prefill_attention.given.kv_cache is forward.pool.cache


def test_models_with_what_no_implementation_applies_are_refused(prefilling):
    forward = prefilling([0], [2])
    for name, sentence in (("llama_4_scaling", "came with a sparse MLA layer"), ("attn_sink", "came with a layer of a model")):
        with pytest.raises(ValueError, match=f"{name} {sentence}"):
            forward.backend.forward_extend(torch.zeros(2, 48), None, None, LAYER, forward.batch, **{name: torch.ones(1)})


@pytest.mark.parametrize(
    ("device_sm", "dtype", "split", "runs"),
    [
        (90, torch.bfloat16, False, True),
        (90, torch.float8_e4m3fn, False, True),
        (90, torch.float16, False, False),
        (90, torch.bfloat16, True, False),
        (100, torch.bfloat16, False, False),
        (0, torch.float8_e4m3fn, False, False),
    ],
)
def test_dense_prefill_is_fa3s_on_hopper_alone(monkeypatch, device_sm, dtype, split, runs):
    """And of whole prompts: not where ranks divide one among them."""
    monkeypatch.setattr(adapter, "fa3_functions", lambda: (None, None))
    attention = SimpleNamespace(device_sm=device_sm, kv_cache_dtype=dtype, sinks=False)
    assert DensePrefill(SimpleNamespace(attention=attention, split_prefill=split, divided_context=False)).runs is runs


def test_a_mode_of_another_kind_of_model_is_refused(make_runner):
    """Embedding and diffusion models run in modes that are neither prefill nor one of the paged modes."""
    backend = create_backend(make_runner())
    others = [mode for mode in ForwardMode if not is_paged(mode) and not mode.is_extend()]
    assert others
    for mode in others:
        batch = forward_batch(random_batch(make_runner(), "decode", 2, 1, 1), mode)
        with pytest.raises(ValueError, match=rf"nsa_backend has no metadata for {mode.name}: it serves"):
            backend.init_forward_metadata(batch)
        with pytest.raises(ValueError, match=rf"nsa_backend has no paged metadata for {mode.name}: it serves"):
            plan_for(mode, 2, 2)
