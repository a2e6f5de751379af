"""Draft steps that share a selection: their metadata, and rounds of SGLang's own `draft_forward` over it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from batches import check, forward_batch, prefill_batch, random_batch, replayed_round, static_batch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from properties import tried
from sglang.srt.environ import envs
from shared_drafts import LAG, Lagged, SharedDecoder

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.demo.engine import Engine, decode_plain
from nsa_backend.metadata import writer
from nsa_backend.testing.calls import calls

RUNS = tried(10, suppress_health_check=list(HealthCheck))


@pytest.fixture
def sharing(monkeypatch):
    """SGLang's worker for a model with index_share_for_mtp_iteration."""
    fields = calls.worker_fields
    on = {"index_share_for_mtp_iteration": True, "seed_dsa_topk_from_draft_extend": True}
    monkeypatch.setattr(calls, "draft_factory", partial(calls.draft_factory, seed_dsa_topk_from_draft_extend=True))
    monkeypatch.setattr(calls, "worker_fields", lambda requests, steps: fields(requests, steps) | on)


@pytest.mark.parametrize("captured", [False, True])
@given(requests=st.integers(1, 30), seed=st.integers(0, 2**32 - 1), num_steps=st.integers(2, 9))
@RUNS
def test_every_step_attends_to_the_tokens_of_the_target(sharing, make_runner, captured, requests, seed, num_steps):
    """As a decode of L tokens does, by the plain reference; one launch and one preparation serve all steps."""
    runner = make_runner(num_steps=num_steps)
    multi_step = calls.draft_factory(runner, num_steps).create_decode_backend()
    batch = random_batch(runner, "decode", requests, seed, num_steps)
    prepared = []
    for backend in multi_step.attn_backends:
        backend.decode_attention.prepare = lambda metadata: prepared.append(1) or metadata
    if captured:
        replayed_round(multi_step, batch)
    else:
        multi_step.init_forward_metadata(forward_batch(batch, ForwardMode.DECODE))
    assert len(multi_step.attn_backends) == num_steps - 1
    for backend in multi_step.attn_backends:
        check(backend.forward_metadata, batch)
    assert len(prepared) == 1


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_steps", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, LAG + 1))])
def test_drafts_that_see_neither_themselves_nor_one_another_are_right(sharing, num_steps, fused):
    """Contexts below and above index_topk, padding rows of zeros, selections from prefill and draft-extend."""
    asked = prompts(9, 70, 140)
    with envs.SGLANG_DSA_FUSE_TOPK.override(fused):
        decoder = SharedDecoder(Engine(asked, num_steps=num_steps))
        tokens, accepted = decoder.decode(24)
        plain = Engine(asked, num_steps=num_steps)
        plain.target.net.__class__ = Lagged
        assert tokens == decode_plain(plain, 24)
    assert accepted == [num_steps + 1] * 3 * decoder.rounds


def test_what_other_graphs_left_past_a_rows_length_is_never_looked_at(sharing, monkeypatch):
    """Captured graphs share a page table: past a row's length there may be pages that this pool has not."""
    stale = partial(torch.full, fill_value=10**6)
    monkeypatch.setattr(writer, "shared_rows", lambda key, rows, *shape, **kinds: stale((rows, *shape), **kinds))
    asked = prompts(9, 70, 140)
    tokens, _ = SharedDecoder(Engine(asked, num_steps=3)).decode(12)
    plain = Engine(asked, num_steps=3)
    plain.target.net.__class__ = Lagged
    assert tokens == decode_plain(plain, 12)


def test_the_step_that_needs_a_draft_before_it_is_the_first_to_be_wrong(sharing):
    """LAG + 2 tokens a round are sure, however many steps there are; what comes on top is luck."""
    num_steps = LAG + 3
    _, accepted = SharedDecoder(Engine(prompts(40, 90), num_steps=num_steps)).decode(30)
    assert min(accepted) == LAG + 2
    assert sum(accepted) < (num_steps + 1) * len(accepted)


def test_lengths_of_steps_that_select_for_themselves_would_count_what_is_no_slot(sharing, monkeypatch):
    monkeypatch.setattr(adapter, "shares_selections", lambda factory: False)
    decoder = SharedDecoder(Engine(prompts(9, 12), num_steps=3))
    with pytest.raises(AssertionError, match="entries that are no slots"):
        decoder.decode(12)


@pytest.fixture
def prefilled(sharing, make_runner):
    """(backend of draft-extend after a prefill of requests with 1 to 400 tokens, request rows, lengths)."""
    runner = make_runner(num_steps=3)
    backend = calls.draft_factory(runner, 3).create_draft_extend_backend()
    lengths = random_batch(runner, "decode", 7, 3, 3).seq_lens
    batch = prefill_batch(runner, [length // 2 for length in lengths], [length - length // 2 for length in lengths])
    backend.init_forward_metadata(batch)
    return backend, batch.req_pool_indices.tolist(), lengths


def chosen(lengths: list[int], width: int, starts: list[int]) -> torch.Tensor:
    """Random positions of each request behind `starts`, every third entry and all of the second request's -1."""
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(0, n, (width,), generator=generator) + start for n, start in zip(lengths, starts, strict=True)]
    out = torch.stack(rows).to(torch.int32)
    out[:, ::3] = -1
    out[1] = -1
    return out


def test_a_selection_on_dequantised_kv_becomes_slots(prefilled):
    backend, slots, lengths = prefilled
    starts = [0, *torch.tensor(lengths).cumsum(0)[:-1].tolist()]
    positions = chosen(lengths, 30, [0] * 7)
    table = backend.writer.req_to_token
    expected = torch.where(positions < 0, -1, table[torch.tensor(slots)[:, None], positions.clamp(min=0).long()])
    rows = chosen(lengths, 30, starts)
    start, _ = backend.forward_metadata.indexer_k_start_end
    backend.forward_metadata = replace(backend.forward_metadata, topk_indices_offset=start)
    found = backend.prepare_mtp_seed_indices(rows, ForwardMode.EXTEND)
    assert torch.equal(found, expected)
    assert found.dtype == torch.int32
    backend.fuse_topk = False
    assert backend.prepare_mtp_seed_indices(positions, ForwardMode.EXTEND) is positions


def test_other_selections_are_what_draft_steps_read(prefilled):
    """Slots already, in a prefill that reads the KV cache itself and in draft-extend, whose capture this runs in."""
    backend, _, lengths = prefilled
    rows = chosen(lengths, 30, [0] * 7)
    assert backend.prepare_mtp_seed_indices(rows, ForwardMode.EXTEND) is rows
    static = static_batch(2, 8, ForwardMode.DRAFT_EXTEND_V2)
    backend.init_cuda_graph_state(2, 8)
    calls.before_capture(backend, static)
    calls.at_graph_head(backend, static)
    assert backend.prepare_mtp_seed_indices(rows, ForwardMode.DRAFT_EXTEND_V2) is rows


def test_a_prefill_so_short_that_nothing_is_scored_still_hands_its_selection_out(prefilled):
    """SGLang asks for it (`return_indices`) where attention is dense, and raises where it gets none."""
    backend, slots, lengths = prefilled
    width = max(lengths)
    table = backend.writer.req_to_token
    every = backend.indexer_metadata(None).topk_transform(torch.zeros(0), width)
    last = torch.tensor([length - length // 2 for length in lengths]).cumsum(0) - 1
    for row, slot, length in zip(every[last], slots, lengths, strict=True):
        assert torch.equal(row[:length], table[slot, :length])
        assert (row[length:] == -1).all()
