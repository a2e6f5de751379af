"""FlashMLA without its GPU: padded heads, lengths and schedules, computed in torch as its kernels are documented."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from chosen_slots import LATENT, ROPE, TOPK, attended, config, decode_metadata, inputs, same_as_the_reference

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention import auto, flashmla_kv, joined_query
from nsa_backend.attention.implementations import implementation
from nsa_backend.attention.sparse_inputs import sparse_inputs
from nsa_backend.registration import create_backend


class FlashMla:
    """`flash_mla_sparse_fwd`, with and without the number of valid slots of a row, and what FlashMLA schedules for FP8."""

    def __init__(self, takes_lengths: bool = True):
        self.queries: list[int] = []
        self.scheduled: list[int] = []
        self.flash_mla_sparse_fwd = self.with_lengths if takes_lengths else self.without_lengths

    def with_lengths(self, q, kv, indices, sm_scale, d_v, topk_length=None):
        self.given_lengths = topk_length
        if topk_length is not None:
            indices = torch.where(torch.arange(TOPK) < topk_length[:, None, None], indices, -1)
        return self.without_lengths(q, kv, indices, sm_scale, d_v)

    def without_lengths(self, q, kv, indices, sm_scale, d_v):
        assert q.shape[1] % 64 == 0
        assert q.is_contiguous()
        assert indices.shape == (len(q), 1, TOPK)
        assert d_v == LATENT
        self.queries.append(q.data_ptr())
        self.padding = q
        rows = [
            attended(row, kv[chosen[chosen >= 0].long(), 0], sm_scale) for row, chosen in zip(q, indices[:, 0], strict=True)
        ]
        return torch.stack(rows), None, None

    def get_mla_metadata(self, *, cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk):
        assert num_q_tokens_per_head_k == num_heads_q
        assert (num_heads_k, is_fp8_kvcache, topk) == (1, True, TOPK)
        self.scheduled.append(len(cache_seqlens))
        return torch.zeros(132, 8), torch.arange(len(cache_seqlens) + 1)

    def flash_mla_with_kvcache(self, *, q, k_cache, cache_seqlens, head_dim_v, num_splits, indices, block_table, **options):
        assert k_cache.shape[1:3] == (64, 1)
        assert q.shape[1] == 1
        assert indices.shape == (len(q), 1, TOPK)
        assert block_table.shape == (len(q), 0)
        assert num_splits.tolist() == list(range(len(q) + 1))
        assert options["is_fp8_kvcache"] is True
        return q[..., :head_dim_v].float() * options["softmax_scale"] + cache_seqlens.view(-1, 1, 1, 1), None


@pytest.fixture
def flash_mla(monkeypatch):
    """Returns a function that installs a FlashMLA."""
    monkeypatch.setattr(adapter, "concat_query", lambda nope, rope: torch.cat([nope, rope], -1))
    monkeypatch.setattr(flashmla_kv, "_tiles_by_rows", {})

    def install(takes_lengths: bool = True) -> FlashMla:
        found = FlashMla(takes_lengths)
        monkeypatch.setattr(adapter, "flash_mla", lambda: found)
        return found

    return install


@pytest.fixture
def decoding(make_runner):
    """Returns a function of a number of rows: the metadata of so many requests of one token."""
    return partial(decode_metadata, create_backend(make_runner(pool_size=4)))


@pytest.mark.parametrize("takes_lengths", [True, False])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("heads", [3, 64, 65])
def test_flashmla_sparse(flash_mla, heads, joined, takes_lengths):
    """Heads are padded to 64 and trimmed again; without padding heads a joined query is not copied."""
    found = flash_mla(takes_lengths)
    given = inputs(heads, [1, 12, 4], joined=joined)
    out = implementation("flashmla_sparse").build(config(heads)).forward(given)
    assert out.shape == (3, heads, LATENT)
    assert same_as_the_reference(out, given)
    assert found.padding.shape[1] == {3: 64, 64: 64, 65: 128}[heads]
    assert found.padding[:, heads:].eq(0).all()
    assert (found.queries == [given.q_nope.data_ptr()]) == (joined and heads == 64)
    if takes_lengths:
        assert found.given_lengths is given.nsa_cache_seqlens


def test_heads_that_lie_further_apart_than_sglangs_join_counts_are_joined_by_ours(flash_mla, monkeypatch):
    """As heads of a long prefill do that were gathered from ranks: each lies all rows after the one before it."""
    found, given = flash_mla(), inputs(64, [1, 12, 4], joined=False)
    monkeypatch.setattr(adapter, "concat_query", None)
    monkeypatch.setattr(joined_query, "WITHIN_SGLANGS", 64 * given.q_nope.stride(1))
    assert same_as_the_reference(implementation("flashmla_sparse").build(config(64)).forward(given), given)
    assert found.queries


def test_flashmla_sparse_knows_no_length_of_rows_that_sglang_padded(flash_mla):
    found = flash_mla()
    given = inputs(3, [2, 12])
    given.nsa_cache_seqlens = given.nsa_cache_seqlens[:1]
    assert same_as_the_reference(implementation("flashmla_sparse").build(config(3)).forward(given), given)
    assert found.given_lengths is None


def test_captured_forwards_share_one_padded_query(flash_mla):
    """Target and drafts, of any batch within the reserved rows; what is larger gets memory of its own, with zero padding."""
    found = flash_mla()
    target, draft = implementation("flashmla_sparse").build(config(3)), implementation("flashmla_sparse").build(config(3))
    target.reserve(4)
    draft.reserve(2)
    for attention, rows in ((target, 4), (draft, 2), (target, 1), (draft, 3)):
        given = inputs(3, [5] * rows)
        assert same_as_the_reference(attention.forward(given), given)
        assert found.padding[:, 3:].eq(0).all()
    assert len(set(found.queries[:3])) == 1
    assert found.queries[3] != found.queries[0]


def test_what_a_graph_reads_stays_when_the_same_backend_reserves_more(flash_mla):
    """As for decode once prefills have been captured: they hold the address alone."""
    found = flash_mla()
    attention = implementation("flashmla_sparse").build(config(3))
    attention.reserve(4)
    kept = weakref.ref(attention._query._buffer.untyped_storage())
    attention.reserve(9)
    for rows in (4, 9):
        given = inputs(3, [5] * rows)
        assert same_as_the_reference(attention.forward(given), given)
    assert len(set(found.queries)) == 1
    assert kept() is not None


def test_flashmla_schedules_captured_forwards_once(flash_mla, decoding, monkeypatch):
    """By the number of rows, for all backends of a process; not where the rows were not reserved, nor inside a capture."""
    found = flash_mla()
    target, draft = (implementation("flashmla_kv").build(config(3, torch.float8_e4m3fn)) for _ in range(2))
    target.reserve(4)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    first = target.prepare(decoding(4)).schedule
    assert target.prepare(decoding(4)).schedule is first
    assert draft.prepare(decoding(4)).schedule is first
    assert found.scheduled == [4]
    target.reserve(2)  # of another graph runner: what was reserved before stays
    target.prepare(decoding(3))
    target.prepare(decoding(3))
    assert found.scheduled == [4, 3]
    for _ in range(2):
        target.prepare(decoding(5))
    assert found.scheduled == [4, 3, 5, 5]
    capturing = True
    for _ in range(2):
        target.prepare(decoding(2))
    assert found.scheduled == [4, 3, 5, 5, 2, 2]


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (64, 64), (65, 128), (128, 128)])
def test_flashmla_kv_trims_the_heads_it_padded(flash_mla, heads, padded):
    found = flash_mla()
    given = inputs(heads, [2, 12, 7])
    given.kv_cache = torch.zeros(128, 1, 656, dtype=torch.uint8)
    out = implementation("flashmla_kv").build(config(heads, torch.float8_e4m3fn)).forward(given)
    assert found.scheduled == [3]
    want = 0.3 * given.q_nope.float() + given.nsa_cache_seqlens.view(-1, 1, 1)
    assert torch.allclose(out, want, atol=1e-3)
    assert out.shape == (3, heads, LATENT)


@pytest.mark.parametrize(("rows", "scheduled"), [(4, [4]), (3, [4, 3])])
def test_a_schedule_fits_the_rows_that_came(flash_mla, decoding, rows, scheduled):
    """The metadata has four rows, one of them DP attention's padding, which SGLang hands over or not."""
    found, attention = flash_mla(), implementation("flashmla_kv").build(config(64, torch.float8_e4m3fn))
    padded = torch.tensor([4, 5, 6, 0], dtype=torch.int32)
    metadata = attention.prepare(replace(decoding(4), nsa_cache_seqlens_int32=padded))
    layer = SimpleNamespace(tp_q_head_num=64, v_head_dim=LATENT, head_dim=LATENT + ROPE, scaling=0.5, logit_cap=0.0)
    kv_cache, slots = torch.zeros(64, 1, 656, dtype=torch.uint8), torch.full((rows, TOPK), -1, dtype=torch.int32)
    query = torch.zeros(rows, 64 * (LATENT + ROPE))
    out = attention.forward(sparse_inputs(query, None, layer, kv_cache, slots, metadata))
    assert out.shape == (rows, 64, LATENT)
    assert out[:, 0, 0].tolist() == [4, 5, 6, 0][:rows]
    assert found.scheduled == scheduled


def test_auto_schedules_what_flashmla_will_attend_to_and_nothing_else(flash_mla, decoding):
    """Of an FP8 cache sparse_decode reads few rows, and has no schedule."""
    found, h200 = flash_mla(), "NVIDIA H200"
    attention = implementation("auto").build(replace(config(3, torch.float8_e4m3fn), device_name=h200))
    (few, first), (more, second), *_ = auto.intervals(h200, "fp8", 3)
    assert (first, second) == ("sparse_decode", "flashmla_kv")
    assert attention.prepare(decoding(few)).schedule is None
    assert found.scheduled == []
    assert attention.prepare(decoding(more)).schedule is not None
    assert found.scheduled == [more]
