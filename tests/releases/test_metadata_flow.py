"""Metadata through the release's entry points, eager and captured, against the plain-Python reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from batches import MODES, begin_forward, begin_round, check, fill, forward_batch, random_batch, replayed_round, static_batch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from metadata_reference import Batch
from properties import tried

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls

RUNS = tried(15, suppress_health_check=list(HealthCheck))


def test_every_paged_mode_of_the_release_is_here():
    modes = {mode for mode in ForwardMode if adapter.is_draft_extend(mode)} | {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}
    assert set(MODES.values()) == modes


@pytest.mark.parametrize("lengths_on_host", [True, False])
@pytest.mark.parametrize("mode", list(MODES))
@given(requests=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), num_steps=st.integers(1, 8))
@RUNS
def test_eager(make_runner, mode, lengths_on_host, requests, seed, num_steps):
    runner = make_runner(num_steps=num_steps)
    backend = create_backend(runner)
    batch = random_batch(runner, mode, requests, seed, num_steps)
    backend.init_forward_metadata(forward_batch(batch, MODES[mode], lengths_on_host=lengths_on_host))
    check(backend.forward_metadata, batch)


@pytest.mark.parametrize("mode", list(MODES))
@given(requests=st.integers(1, 20), spare=st.integers(0, 4), seed=st.integers(0, 2**32 - 1), num_steps=st.integers(1, 8))
@RUNS
def test_captured(make_runner, mode, requests, spare, seed, num_steps):
    """Capture on static tensors, then replay another batch: nothing but the recorded launch writes."""
    runner = make_runner(num_steps=num_steps)
    backend = create_backend(runner)
    rows = 1 if mode == "decode" else num_steps + 1
    backend.init_cuda_graph_state(requests + spare, (requests + spare) * rows)
    static = static_batch(requests, requests * rows, MODES[mode])
    calls.before_capture(backend, static)
    recorded = backend.captured.current
    for _ in range(3):  # two warm-ups and the capture
        begin_forward(backend, static)
    batch = random_batch(runner, mode, requests, seed, num_steps)
    fill(static, batch)
    if mode == "draft_extend_v1":
        batch = Batch(**vars(batch) | {"tail_rows": requests * rows - sum(batch.extend_lens)})
    calls.before_replay(backend, static)
    backend.writer.write(recorded.plan, recorded.buffers, recorded.inputs)
    check(backend.forward_metadata, batch)


@pytest.mark.parametrize("captured", [False, True])
@given(requests=st.integers(1, 30), seed=st.integers(0, 2**32 - 1), num_steps=st.integers(2, 9))
@RUNS
def test_draft_steps(make_runner, captured, requests, seed, num_steps):
    """Step i attends to L + i + 1 tokens, in storage of its own; all steps read one page table."""
    runner = make_runner(num_steps=num_steps)
    multi_step = calls.draft_factory(runner, num_steps).create_decode_backend()
    batch = random_batch(runner, "draft_decode", requests, seed, num_steps)
    if captured:
        static = replayed_round(multi_step, batch)
    else:
        eager = forward_batch(batch, ForwardMode.DECODE)
        multi_step.init_forward_metadata(eager)
        begin_round(multi_step, eager, captured=False)
    read = (static if captured else eager).seq_lens
    for step, backend in enumerate(multi_step.attn_backends):
        check(backend.forward_metadata, batch, step)
        assert backend.forward_metadata.cache_seqlens_int32.data_ptr() != read.data_ptr()
    storages = {b.forward_metadata.cache_seqlens_int32.data_ptr() for b in multi_step.attn_backends}
    assert len(storages) == num_steps - 1
    assert len({b.forward_metadata.real_page_table.data_ptr() for b in multi_step.attn_backends}) == 1


def test_a_replay_of_what_was_not_captured_is_refused(make_runner):
    backend = create_backend(make_runner())
    backend.init_cuda_graph_state(2, 2)
    static = static_batch(2, 2, ForwardMode.DECODE)
    calls.before_capture(backend, static)
    with pytest.raises(ValueError, match="no graph of 1 requests was captured"):
        calls.before_replay(backend, static_batch(1, 1, ForwardMode.DECODE))
    with pytest.raises(ValueError, match="lengths of an earlier batch"):
        calls.before_replay(backend, replace(static, seq_lens=static.seq_lens.clone()))
    with pytest.raises(ValueError, match="reads the req_pool_indices it was captured with"):
        calls.before_replay(backend, replace(static, req_pool_indices=static.req_pool_indices.clone()))


@pytest.mark.parametrize("layers", [(4, 5, 6), (0,)])
def test_the_launch_is_made_once_a_captured_forward_and_never_in_an_eager_one(make_runner, monkeypatch, layers):
    """Inside the graph, by SGLang's own call or by the first layer that asks."""
    backend = create_backend(make_runner())
    backend.init_cuda_graph_state(1, 1)
    static = static_batch(1, 1, ForwardMode.DECODE)
    calls.before_capture(backend, static)
    launches = []
    monkeypatch.setattr(backend.captured, "write", lambda: launches.append(1))
    for _ in range(3):  # two warm-ups and the capture
        begin_forward(backend, static, layers)
    assert len(launches) == 3
    batch = Batch("decode", [5], [1], backend.writer.req_to_token.numpy(), 64, 0)
    backend.init_forward_metadata(forward_batch(batch, ForwardMode.DECODE))
    for layer in layers:
        backend.get_indexer_metadata(layer, None)
    assert len(launches) == 3


def test_an_empty_batch_asks_for_metadata_that_nobody_reads(make_runner):
    """SGLang sets `forward_metadata` to None for an idle rank, and some releases' indexers ask before they see that."""
    backend = create_backend(make_runner())
    backend.forward_metadata = None
    assert backend.get_indexer_metadata(0, None) is not None
