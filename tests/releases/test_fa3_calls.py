"""FA3 without its GPU: what sparse attention and dense prefill hand to it, computed in torch as FA3 is documented."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from chosen_slots import LATENT, ROPE, SLOTS, TOPK, attended, config, decode_metadata, inputs, same_as_the_reference

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.dense_prefill import DensePrefill
from nsa_backend.attention.implementations import implementation
from nsa_backend.registration import create_backend


class FlashAttention3:
    """`flash_attn_with_kvcache` with `qv` and pages of one token, and the scheduler of its tiles."""

    def __init__(self):
        self.scheduled: list[dict] = []

    def schedule(self, **facts):
        self.scheduled.append(facts)
        return ("tiles", facts["batch_size"])

    def attend(self, *, q, k_cache, v_cache, qv, page_table, cache_seqlens, cu_seqlens_q, cu_seqlens_k_new, **options):
        rows = len(page_table)
        assert k_cache.shape == (SLOTS, 1, 1, ROPE)
        assert v_cache.shape == (SLOTS, 1, 1, LATENT)
        assert cu_seqlens_q.tolist() == list(range(rows + 1))
        assert cu_seqlens_k_new.tolist() == [0, *cache_seqlens.cumsum(0).tolist()]
        assert options["max_seqlen_q"] == 1
        assert options["causal"] is True
        assert options["return_softmax_lse"] is False
        assert options["num_splits"] == 0
        assert options["scheduler_metadata"] in (None, ("tiles", rows))
        self.given_tiles = options["scheduler_metadata"]
        out = []
        for row, length in enumerate(cache_seqlens.tolist()):
            chosen = page_table[row, :length].long()
            keys = torch.cat([v_cache[chosen, 0, 0], k_cache[chosen, 0, 0]], -1)
            query = torch.cat([qv[row], q[row]], -1)
            out.append(attended(query, keys, options["softmax_scale"], options["softcap"]))
        return torch.stack(out)


@pytest.fixture
def fa3(monkeypatch):
    found = FlashAttention3()
    monkeypatch.setattr(adapter, "fa3_functions", lambda: (found.attend, None))
    monkeypatch.setattr(adapter, "fa3_scheduler", lambda: found.schedule)
    return found


@pytest.mark.parametrize("logit_cap", [0.0, 2.0])
@pytest.mark.parametrize("lengths", [[12], [1, 5, 12, 3]])
def test_fa3(fa3, lengths, logit_cap):
    given = inputs(3, lengths, logit_cap=logit_cap)
    assert same_as_the_reference(implementation("fa3").build(config(3)).forward(given), given)
    assert fa3.given_tiles is None
    given = inputs(3, lengths, logit_cap=logit_cap, schedule=("tiles", len(lengths)))
    assert same_as_the_reference(implementation("fa3").build(config(3)).forward(given), given)
    assert fa3.given_tiles == ("tiles", len(lengths))


@pytest.fixture
def decoding(make_runner):
    """Returns a function of a number of rows: the metadata of so many requests of one token."""
    return partial(decode_metadata, create_backend(make_runner(pool_size=4)))


@pytest.mark.parametrize(("rows", "scheduled"), [(0, False), (1, True), (992, True), (993, False)])
def test_fa3s_tiles_are_scheduled_once_for_the_rows_of_captured_batches(fa3, decoding, rows, scheduled):
    """A prefill has more rows, whose tiles every call schedules by itself; the facts are those of every layer's call."""
    before = decoding(rows)
    found = implementation("fa3").build(config(3)).prepare(before)
    assert found.schedule == (("tiles", rows) if scheduled else None)
    assert len(fa3.scheduled) == scheduled
    for facts in fa3.scheduled:
        assert facts["cache_seqlens"] is before.nsa_cache_seqlens_int32
        assert facts["cu_seqlens_q"] is before.nsa_cu_seqlens_q
        numbers = {name: value for name, value in facts.items() if isinstance(value, int | bool)}
        assert numbers == {
            "batch_size": rows, "max_seqlen_q": 1, "max_seqlen_k": TOPK, "num_heads": 3, "num_heads_k": 1, "headdim": ROPE,
            "headdim_v": LATENT, "page_size": 1, "causal": True, "num_splits": 0,
        }  # fmt: skip


def test_a_release_without_fa3s_scheduler_prepares_nothing(fa3, decoding, monkeypatch):
    monkeypatch.setattr(adapter, "fa3_scheduler", lambda: None)
    metadata = decoding(2)
    assert implementation("fa3").build(config(3)).prepare(metadata) is metadata


def test_dense_prefill_hands_over_all_keys_and_the_bounds_of_requests(monkeypatch):
    """Two requests of 5 and 3 tokens, the last 2 and 3 of them new."""
    seen = {}

    def varlen(**given):
        seen.update(given)
        return given["q"]

    monkeypatch.setattr(adapter, "fa3_functions", lambda: (None, varlen))
    dense = DensePrefill(SimpleNamespace(attention=config(2), split_prefill=False, divided_context=False))
    metadata = SimpleNamespace(
        cu_seqlens_q=torch.tensor([0, 2, 5]), cu_seqlens_k=torch.tensor([0, 5, 8]), max_seq_len_q=3, max_seq_len_k=5
    )
    layer = SimpleNamespace(tp_q_head_num=2, tp_k_head_num=2, tp_v_head_num=2, head_dim=6, v_head_dim=4, scaling=0.7)
    q, k, v = torch.randn(5, 12), torch.randn(8, 12), torch.randn(8, 8)
    assert torch.equal(dense.forward(q, k, v, layer, metadata), q.view(5, 2, 6))
    assert torch.equal(seen["k"], k.view(8, 2, 6))
    assert torch.equal(seen["v"], v.view(8, 2, 4))
    assert seen["causal"] is True
    assert seen["softmax_scale"] == 0.7
    assert (seen["max_seqlen_q"], seen["max_seqlen_k"]) == (3, 5)
    assert seen["cu_seqlens_q"] is metadata.cu_seqlens_q
    assert seen["cu_seqlens_k"] is metadata.cu_seqlens_k
