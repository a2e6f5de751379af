"""Metadata through the release's entry points, eager and captured, against the plain-Python reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metadata_fields import check_fields
from metadata_reference import Batch

from nsa_backend.demo.calls import calls
from nsa_backend.host import ForwardBatch, ForwardMode
from nsa_backend.registration import create_backend

MODES = {
    "decode": ForwardMode.DECODE,
    "target_verify": ForwardMode.TARGET_VERIFY,
    "draft_extend_v2": ForwardMode.DRAFT_EXTEND_V2,
}
RUNS = settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))


def random_batch(runner, mode: str, requests: int, seed: int, num_steps: int) -> Batch:
    rng = np.random.default_rng(seed)
    table = runner.req_to_token_pool.req_to_token
    d = num_steps + 1
    return Batch(
        mode=mode,
        seq_lens=(rng.integers(1, 500, requests) + (d if mode == "draft_extend_v2" else 0)).tolist(),
        slots=(1 + rng.permutation(table.shape[0] - 1)[:requests]).tolist(),
        req_to_token=table.numpy(),
        index_topk=runner.model_config.hf_config.index_topk,
        num_sms=0,
        num_steps=num_steps,
        num_draft_tokens=d,
    )


def forward_batch(batch: Batch, mode: ForwardMode, *, lengths_on_host: bool = True) -> ForwardBatch:
    """As SGLang hands an eager batch over."""
    lengths = torch.tensor(batch.seq_lens, dtype=torch.int64)
    requests, d = len(lengths), batch.num_draft_tokens
    return ForwardBatch(
        forward_mode=mode,
        batch_size=requests,
        input_ids=None,
        req_pool_indices=torch.tensor(batch.slots, dtype=torch.int64),
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone() if lengths_on_host else None,
        seq_lens_sum=int(lengths.sum()) if lengths_on_host else None,
        out_cache_loc=torch.arange(requests * batch.num_steps),
        extend_seq_lens=torch.full((requests,), d, dtype=torch.int32),
        extend_seq_lens_cpu=[d] * requests,
    )


def static_batch(requests: int, rows: int, mode: ForwardMode) -> ForwardBatch:
    """The graph runner's own buffers, as full of padding as when it captures."""
    lengths = torch.ones(requests, dtype=calls.LENGTHS_DTYPE)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=requests,
        input_ids=None,
        req_pool_indices=torch.zeros(requests, dtype=torch.int64),
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        seq_lens_sum=requests,
        out_cache_loc=torch.zeros(rows, dtype=torch.int64),
        positions=torch.zeros(rows, dtype=torch.int64),
    )


def fill(static: ForwardBatch, batch: Batch) -> None:
    static.seq_lens.copy_(torch.tensor(batch.seq_lens))
    static.req_pool_indices.copy_(torch.tensor(batch.slots))


def check(metadata, batch: Batch, step: int = 0) -> None:
    check_fields(metadata, batch, step)
    rows, requests = len(metadata.nsa_seqlens_expanded), len(batch.seq_lens)
    owners = np.repeat(np.arange(requests), rows // requests)
    np.testing.assert_array_equal(metadata.token_to_batch_idx.numpy(), owners)
    np.testing.assert_array_equal(metadata.nsa_cu_seqlens_q.numpy(), np.arange(rows + 1))
    assert sum(metadata.nsa_extend_seq_lens_list) == rows


@pytest.mark.parametrize("lengths_on_host", [True, False])
@pytest.mark.parametrize("mode", list(MODES))
@given(requests=st.integers(1, 30), seed=st.integers(0, 2**32 - 1), num_steps=st.integers(1, 8))
@RUNS
def test_eager(make_runner, mode, lengths_on_host, requests, seed, num_steps):
    runner = make_runner(num_steps=num_steps)
    backend = create_backend(runner)
    batch = random_batch(runner, mode, requests, seed, num_steps)
    backend.init_forward_metadata(forward_batch(batch, MODES[mode], lengths_on_host=lengths_on_host))
    check(backend.forward_metadata, batch)


@pytest.mark.parametrize("mode", list(MODES))
@given(requests=st.integers(1, 15), spare=st.integers(0, 4), seed=st.integers(0, 2**32 - 1), num_steps=st.integers(1, 8))
@RUNS
def test_captured(make_runner, mode, requests, spare, seed, num_steps):
    """Capture on static tensors, then replay another batch: nothing but the recorded launch writes."""
    runner = make_runner(num_steps=num_steps)
    backend = create_backend(runner)
    rows = 1 if mode == "decode" else num_steps + 1
    backend.init_cuda_graph_state(requests + spare, (requests + spare) * rows)
    static = static_batch(requests, requests * rows, MODES[mode])
    calls.before_capture(backend, static)
    recorded = backend.captured._launch
    for _ in range(3):  # two warm-ups and the capture
        calls.at_graph_head(backend, static)
    batch = random_batch(runner, mode, requests, seed, num_steps)
    fill(static, batch)
    calls.before_replay(backend, static)
    recorded()
    check(backend.forward_metadata, batch)


@pytest.mark.parametrize("captured", [False, True])
@given(requests=st.integers(1, 20), seed=st.integers(0, 2**32 - 1), num_steps=st.integers(2, 9))
@RUNS
def test_draft_steps(make_runner, captured, requests, seed, num_steps):
    """Step i attends to L + i + 1 tokens, in storage of its own; all steps read one page table."""
    runner = make_runner(num_steps=num_steps)
    multi_step = calls.draft_factory(runner, num_steps).create_decode_backend()
    batch = random_batch(runner, "draft_decode", requests, seed, num_steps)
    if captured:
        multi_step.init_cuda_graph_state(requests + 2, requests + 2)
        static = static_batch(requests, requests, ForwardMode.DECODE)
        calls.before_round_capture(multi_step, static)
        recorded = multi_step._launch
        calls.at_round_head(multi_step, static)
        fill(static, batch)
        calls.before_round_replay(multi_step, static)
        recorded()
    else:
        multi_step.init_forward_metadata(forward_batch(batch, ForwardMode.DECODE))
    for step, backend in enumerate(multi_step.attn_backends):
        check(backend.forward_metadata, batch, step)
    storages = {b.forward_metadata.cache_seqlens_int32.data_ptr() for b in multi_step.attn_backends}
    assert len(storages) == num_steps - 1
    assert len({b.forward_metadata.real_page_table.data_ptr() for b in multi_step.attn_backends}) == 1


def test_a_replay_of_what_was_not_captured_is_refused(make_runner):
    backend = create_backend(make_runner())
    backend.init_cuda_graph_state(2, 2)
    calls.before_capture(backend, static_batch(2, 2, ForwardMode.DECODE))
    with pytest.raises(ValueError, match="no graph of 1 requests was captured"):
        calls.before_replay(backend, static_batch(1, 1, ForwardMode.DECODE))
    with pytest.raises(ValueError, match="lengths of an earlier batch"):
        calls.before_replay(backend, static_batch(2, 2, ForwardMode.DECODE))


def test_an_empty_batch_asks_for_metadata_that_nobody_reads(make_runner):
    """SGLang sets `forward_metadata` to None for an idle rank, and some releases' indexers ask before they see that."""
    backend = create_backend(make_runner())
    backend.forward_metadata = None
    assert backend.get_indexer_metadata(0, None) is not None
