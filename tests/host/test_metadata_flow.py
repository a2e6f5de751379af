"""Metadata through the entry points SGLang calls, eager and captured, against the plain-Python reference."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metadata_fields import check_fields
from metadata_reference import Batch

from nsa_backend.host import ForwardBatch, ForwardMode
from nsa_backend.registration import create_backend

MODES = {
    "decode": ForwardMode.DECODE,
    "target_verify": ForwardMode.TARGET_VERIFY,
    "draft_extend_v2": ForwardMode.DRAFT_EXTEND_V2,
    "draft_extend_v1": ForwardMode.DRAFT_EXTEND,
}
RUNS = settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))


def random_batch(runner, mode: str, requests: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    d = runner.server_args.speculative_num_draft_tokens
    extend = rng.integers(1, d + 1, requests)
    lengths = rng.integers(1, 500, requests) + {"draft_extend_v1": extend, "draft_extend_v2": d}.get(mode, 0)
    table = runner.req_to_token_pool.req_to_token
    return Batch(
        mode=mode,
        seq_lens=lengths.tolist(),
        slots=(1 + rng.permutation(table.shape[0] - 1)[:requests]).tolist(),
        req_to_token=table.numpy(),
        index_topk=runner.model_config.hf_config.index_topk,
        num_sms=0,
        num_steps=runner.server_args.speculative_num_steps,
        num_draft_tokens=d,
        extend_lens=extend.tolist() if mode == "draft_extend_v1" else [],
    )


def forward_batch(batch: Batch, mode: ForwardMode) -> ForwardBatch:
    lengths = torch.tensor(batch.seq_lens, dtype=torch.int64)
    extend = batch.extend_lens or [batch.num_draft_tokens] * len(batch.seq_lens)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(batch.seq_lens),
        input_ids=None,
        req_pool_indices=torch.tensor(batch.slots, dtype=torch.int64),
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=None,
        extend_seq_lens=torch.tensor(extend, dtype=torch.int32),
        extend_seq_lens_cpu=extend,
    )


def check(metadata, batch: Batch, step: int = 0) -> None:
    check_fields(metadata, batch, step)
    rows, requests = len(metadata.nsa_seqlens_expanded), len(batch.seq_lens)
    counts = batch.extend_lens or [rows // requests] * requests
    ends = np.cumsum([0, *counts])
    ends[-1] = rows
    np.testing.assert_array_equal(metadata.cu_seqlens_q.numpy(), ends)
    owners = np.repeat(np.arange(requests), np.diff(ends))
    np.testing.assert_array_equal(metadata.token_to_batch_idx.numpy(), owners)
    np.testing.assert_array_equal(metadata.nsa_cu_seqlens_q.numpy(), np.arange(rows + 1))
    assert sum(metadata.nsa_extend_seq_lens_list) == rows


@pytest.mark.parametrize("mode", list(MODES))
@given(requests=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), num_steps=st.integers(1, 8))
@RUNS
def test_eager(make_runner, mode, requests, seed, num_steps):
    runner = make_runner(num_steps=num_steps)
    backend = create_backend(runner)
    batch = random_batch(runner, mode, requests, seed)
    backend.init_forward_metadata(forward_batch(batch, MODES[mode]))
    check(backend.forward_metadata, batch)


@pytest.mark.parametrize("mode", list(MODES))
@given(requests=st.integers(1, 20), spare=st.integers(0, 4), seed=st.integers(0, 2**32 - 1), num_steps=st.integers(1, 8))
@RUNS
def test_captured(make_runner, mode, requests, spare, seed, num_steps):
    """Capture on the runner's static tensors, then replay another batch: only the graph's own launch writes."""
    runner = make_runner(num_steps=num_steps)
    backend = create_backend(runner)
    d = runner.server_args.speculative_num_draft_tokens
    rows = 1 if mode == "decode" else d
    lengths, slots = torch.ones(requests, dtype=torch.int32), torch.zeros(requests, dtype=torch.int64)
    accept = SimpleNamespace(num_accept_tokens=torch.full((requests,), d, dtype=torch.int32))
    backend.init_cuda_graph_state(requests + spare, (requests + spare) * rows)
    backend.init_forward_metadata_capture_cuda_graph(requests, requests * rows, slots, lengths, None, MODES[mode], accept)
    recorded = backend.captured._launch

    batch = random_batch(runner, mode, requests, seed)
    lengths.copy_(torch.tensor(batch.seq_lens))
    slots.copy_(torch.tensor(batch.slots))
    if mode == "draft_extend_v1":
        accept.num_accept_tokens.copy_(torch.tensor(batch.extend_lens))
        batch = Batch(**vars(batch) | {"tail_rows": requests * d - sum(batch.extend_lens)})
    backend.init_forward_metadata_replay_cuda_graph(requests, slots, lengths, 0, None, MODES[mode], accept, lengths)
    recorded()
    check(backend.forward_metadata, batch)


@given(requests=st.integers(1, 30), seed=st.integers(0, 2**32 - 1), num_steps=st.integers(2, 9), captured=st.booleans())
@RUNS
def test_draft_steps(make_runner, requests, seed, num_steps, captured):
    from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend

    runner = make_runner(num_steps=num_steps)
    multi_step = NativeSparseAttnMultiStepBackend(runner, 1, num_steps)
    batch = random_batch(runner, "draft_decode", requests, seed)
    eager = forward_batch(batch, ForwardMode.DECODE)
    eager.out_cache_loc = torch.arange(requests * num_steps)
    if captured:
        multi_step.init_cuda_graph_state(requests + 2, requests + 2)
        eager.seq_lens = eager.seq_lens.to(torch.int32)  # the runner's own buffer is int32
        multi_step.init_forward_metadata_capture_cuda_graph(eager)
        multi_step.begin_draft_round(eager)
    else:
        multi_step.init_forward_metadata(eager)
        multi_step.begin_draft_round(eager)
    for step, backend in enumerate(multi_step.attn_backends):
        check(backend.forward_metadata, batch, step)
        assert backend.forward_metadata.cache_seqlens_int32.data_ptr() != eager.seq_lens.data_ptr()
    storages = {b.forward_metadata.cache_seqlens_int32.data_ptr() for b in multi_step.attn_backends}
    assert len(storages) == num_steps - 1
    assert len({b.forward_metadata.page_table_1.data_ptr() for b in multi_step.attn_backends}) == 1


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@RUNS
def test_prefill(make_runner, data, seed):
    """Prefix and new tokens, by definition, one token after the other."""
    runner = make_runner()
    requests = data.draw(st.integers(1, 8))
    prefix = data.draw(st.lists(st.integers(0, 200), min_size=requests, max_size=requests))
    new = data.draw(st.lists(st.integers(1, 90), min_size=requests, max_size=requests))
    lengths = [a + b for a, b in zip(prefix, new, strict=True)]
    slots = (1 + np.random.default_rng(seed).permutation(290)[:requests]).tolist()
    batch = forward_batch(
        Batch("decode", lengths, slots, runner.req_to_token_pool.req_to_token.numpy(), 64, 0), ForwardMode.EXTEND
    )
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(new), new
    backend = create_backend(runner)
    backend.init_forward_metadata(batch)
    m = backend.forward_metadata

    row_lens, owner, start, end = [], [], [], []
    for request, (a, b) in enumerate(zip(prefix, new, strict=True)):
        for j in range(b):
            row_lens.append(a + j + 1)
            owner.append(request)
            start.append(sum(lengths[:request]))
            end.append(start[-1] + a + j + 1)
    assert m.nsa_seqlens_expanded.tolist() == row_lens
    assert m.nsa_cache_seqlens_int32.tolist() == [min(n, 64) for n in row_lens]
    assert m.nsa_cu_seqlens_k.tolist() == np.cumsum([0] + [min(n, 64) for n in row_lens]).tolist()
    assert m.nsa_cu_seqlens_q.tolist() == list(range(len(row_lens) + 1))
    assert m.token_to_batch_idx.tolist() == owner
    assert [t.tolist() for t in m.indexer_k_start_end] == [start, end]
    assert m.cu_seqlens_q.tolist() == np.cumsum([0, *new]).tolist()
    assert m.cu_seqlens_k.tolist() == np.cumsum([0, *lengths]).tolist()
    assert m.cache_seqlens_int32.tolist() == lengths
    assert (m.max_seq_len_q, m.max_seq_len_k) == (max(new), max(lengths))
    assert m.nsa_extend_seq_lens_list == new
    table = runner.req_to_token_pool.req_to_token
    for request, length in enumerate(lengths):
        assert torch.equal(m.page_table_1[request, :length], table[slots[request], :length])
        pages = table[slots[request], :length:64] // 64
        assert torch.equal(m.real_page_table[request, : len(pages)], pages)
    for tensor in (m.nsa_seqlens_expanded, m.nsa_cu_seqlens_k, m.token_to_batch_idx, *m.indexer_k_start_end, m.cu_seqlens_q):
        assert tensor.dtype == torch.int32


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND])
def test_extend_lengths_may_be_a_cpu_tensor(make_runner, mode):
    """As SGLang leaves them where it padded a DP-attention batch."""
    runner = make_runner()
    batch = forward_batch(Batch("decode", [9, 7], [1, 2], runner.req_to_token_pool.req_to_token.numpy(), 64, 0), mode)
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor([3, 1]), torch.tensor([3, 1])
    backend = create_backend(runner)
    backend.init_forward_metadata(batch)
    assert backend.forward_metadata.nsa_seqlens_expanded.tolist() == [7, 8, 9, 7]
    assert sum(backend.forward_metadata.nsa_extend_seq_lens_list) == 4


def test_an_idle_rank_that_sglang_padded(make_runner):
    """DP attention pads an idle rank's batch with requests of slot 0 and length 1, and initialises it again."""
    backend = create_backend(make_runner())
    table = backend.writer.req_to_token.numpy()
    backend.init_forward_metadata(forward_batch(Batch("decode", [1, 1, 1], [0, 0, 0], table, 64, 0), ForwardMode.IDLE))
    metadata = backend.forward_metadata
    assert metadata.cache_seqlens_int32.tolist() == [1, 1, 1]
    assert metadata.nsa_extend_seq_lens_list == [1, 1, 1]
    assert metadata.page_table_1[:, 0].tolist() == [table[0, 0]] * 3


def test_rows_that_sglang_pads_have_length_zero():
    """Of what attention reads alone: SGLang's indexer cuts the padding off and asks for the real rows."""
    from nsa_backend.buffers import MetadataBuffers
    from nsa_backend.extend import pad_query_rows
    from nsa_backend.metadata import step_metadata
    from nsa_backend.plan import plan_decode

    plan = plan_decode(3)
    metadata = step_metadata(plan, MetadataBuffers.allocate(plan, table_width=64, num_sms=0, device="cpu"))
    metadata.nsa_cache_seqlens_int32.copy_(torch.tensor([5, 6, 7]))
    padded = pad_query_rows(metadata, 5)
    assert padded.nsa_cache_seqlens_int32.tolist() == [5, 6, 7, 0, 0]
    assert padded.nsa_cu_seqlens_k.tolist() == [0, 5, 11, 18, 18, 18]
    assert padded.nsa_cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 5]
    assert padded.nsa_extend_seq_lens_list == [1, 1, 1]
    for field in ("cache_seqlens_int32", "nsa_seqlens_expanded", "real_page_table", "token_to_batch_idx", "cu_seqlens_q"):
        assert getattr(padded, field) is getattr(metadata, field)


def test_replay_refuses_what_was_not_captured(make_runner):
    backend = create_backend(make_runner())
    backend.init_cuda_graph_state(2, 2)
    lengths, slots = torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    backend.init_forward_metadata_capture_cuda_graph(2, 2, slots, lengths, None, ForwardMode.DECODE, None)
    replay = backend.init_forward_metadata_replay_cuda_graph
    with pytest.raises(ValueError, match="no graph of 1 requests was captured"):
        replay(1, slots, lengths, 0, None, ForwardMode.DECODE, None, lengths)
    with pytest.raises(ValueError, match="lengths of an earlier batch"):
        replay(2, slots, lengths.clone(), 0, None, ForwardMode.DECODE, None, lengths)
    with pytest.raises(ValueError, match="reads the req_pool_indices it was captured with"):
        replay(2, slots.clone(), lengths, 0, None, ForwardMode.DECODE, None, lengths)


def test_the_launch_is_made_once_a_captured_forward_and_never_in_an_eager_one(make_runner):
    backend = create_backend(make_runner())
    backend.init_cuda_graph_state(1, 1)
    lengths, slots = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    backend.init_forward_metadata_capture_cuda_graph(1, 1, slots, lengths, None, ForwardMode.DECODE, None)
    launches = []
    backend.captured._launch = lambda: launches.append(1)
    for _ in range(3):  # two warm-ups and the capture, three layers each
        for layer in (4, 5, 6):
            backend.get_indexer_metadata(layer, None)
    assert len(launches) == 3
    batch = Batch("decode", [5], [1], backend.writer.req_to_token.numpy(), 64, 0)
    backend.init_forward_metadata(forward_batch(batch, ForwardMode.DECODE))
    backend.get_indexer_metadata(4, None)
    assert len(launches) == 3
