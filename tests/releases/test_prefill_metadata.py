"""Metadata of prefills, and of what SGLang pads, against definitions spelled out one token after the other."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from batches import forward_batch, prefill_batch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from metadata_fields import FIELDS
from metadata_reference import Batch, expected_prefill
from properties import tried

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.metadata import writer
from nsa_backend.registration import create_backend

RUNS = tried(15, suppress_health_check=list(HealthCheck))
RAGGED = [ForwardMode.EXTEND, *(mode for mode in ForwardMode if adapter.is_ragged_draft_extend(mode))]
"""Modes in which requests extend by different numbers of tokens."""
SAME = ("cu_seqlens_q", "cu_seqlens_k", "nsa_cu_seqlens_q", "nsa_cu_seqlens_k", "token_to_batch_idx")
OF_PREFILL = FIELDS | {name: name for name in SAME}
"""Field of a prefill's metadata to that of `expected_prefill`."""


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@RUNS
def test_prefill(make_runner, data, seed):
    """Prefix and new tokens, by definition."""
    runner = make_runner()
    requests = data.draw(st.integers(1, 8))
    prefix = data.draw(st.lists(st.integers(0, 200), min_size=requests, max_size=requests))
    new = data.draw(st.lists(st.integers(1, 90), min_size=requests, max_size=requests))
    batch = prefill_batch(runner, prefix, new, seed)
    backend = create_backend(runner)
    backend.init_forward_metadata(batch)
    m = backend.forward_metadata
    want = expected_prefill(prefix, new, runner.req_to_token_pool.req_to_token[batch.req_pool_indices].numpy(), 64)
    found = {reference: getattr(m, ours) for ours, reference in OF_PREFILL.items()}
    found |= dict(zip(("k_start", "k_end"), m.indexer_k_start_end, strict=True))
    for name, tensor in found.items():
        assert tensor.tolist() == list(want[name]), name
        assert tensor.dtype == torch.int32, name
    lengths = list(want["cache_seqlens"])
    assert (m.max_seq_len_q, m.max_seq_len_k) == (max(new), max(lengths))
    assert m.nsa_extend_seq_lens_list == new
    for row, table, length in zip(m.real_page_table.tolist(), want["real_page_table"], lengths, strict=True):
        assert row[: -(-length // 64)] == table[: -(-length // 64)]


@pytest.mark.parametrize("mode", RAGGED)
def test_extend_lengths_may_be_a_cpu_tensor(make_runner, mode):
    """As SGLang leaves them where it padded a DP-attention batch."""
    runner = make_runner()
    batch = forward_batch(Batch("decode", [9, 7], [1, 2], runner.req_to_token_pool.req_to_token.numpy(), 64, 0), mode)
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor([3, 1]), torch.tensor([3, 1])
    backend = create_backend(runner)
    backend.init_forward_metadata(batch)
    assert backend.forward_metadata.nsa_seqlens_expanded.tolist() == [7, 8, 9, 7]
    assert sum(backend.forward_metadata.nsa_extend_seq_lens_list) == 4


def test_the_selection_is_prepared_with_the_rows_of_a_prefill(make_runner):
    backend = create_backend(runner := make_runner())
    backend.topk = mock.Mock()
    backend.init_forward_metadata(prefill_batch(runner, [5, 0], [3, 2]))
    (lengths,) = backend.topk.prepare.call_args.args
    assert lengths.tolist() == [6, 7, 8, 1, 2]


@pytest.mark.parametrize("mode", RAGGED)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_launch_gets_extend_lengths_of_one_dtype(make_runner, monkeypatch, mode, dtype):
    """Triton compiles a launch for each: the second one while the ranks beside a padded one wait for it."""
    runner = make_runner()
    launches = {name: mock.Mock(wraps=getattr(writer, name)) for name in ("write_prefill", "write_metadata")}
    for name, launch in launches.items():
        monkeypatch.setattr(writer, name, launch)
    batch = forward_batch(Batch("decode", [9, 7], [1, 2], runner.req_to_token_pool.req_to_token.numpy(), 64, 0), mode)
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor([3, 1], dtype=dtype), [3, 1]
    create_backend(runner).init_forward_metadata(batch)
    (call,) = (call for launch in launches.values() for call in launch.call_args_list)
    (inputs,) = (argument for argument in call.args if isinstance(argument, BatchInputs))
    assert (inputs.extend_lens.dtype, inputs.extend_lens.tolist()) == (torch.int32, [3, 1])


def test_an_idle_rank_that_sglang_padded(make_runner):
    """DP attention pads an idle rank's batch with requests of slot 0 and length 1, and initialises it again."""
    backend = create_backend(make_runner())
    table = backend.writer.req_to_token.numpy()
    backend.init_forward_metadata(forward_batch(Batch("decode", [1, 1, 1], [0, 0, 0], table, 64, 0), ForwardMode.IDLE))
    metadata = backend.forward_metadata
    assert metadata.cache_seqlens_int32.tolist() == [1, 1, 1]
    assert metadata.nsa_extend_seq_lens_list == [1, 1, 1]
    assert metadata.real_page_table[:, 0].tolist() == [table[0, 0] // 64] * 3


def test_rows_that_sglang_pads_have_length_zero():
    """Of what attention reads alone: SGLang's indexer cuts the padding off and asks for the real rows."""
    from nsa_backend.kernels.buffers import MetadataBuffers
    from nsa_backend.kernels.plan import plan_decode
    from nsa_backend.metadata.views import step_metadata, with_padding_rows

    plan = plan_decode(3)
    buffers = MetadataBuffers.allocate(plan, table_width=64, num_sms=0, device="cpu", wide=False, planned=False)
    metadata = step_metadata(plan, buffers)
    metadata.nsa_cache_seqlens_int32.copy_(torch.tensor([5, 6, 7]))
    padded = with_padding_rows(metadata, 5)
    assert padded.nsa_cache_seqlens_int32.tolist() == [5, 6, 7, 0, 0]
    assert padded.nsa_cu_seqlens_k.tolist() == [0, 5, 11, 18, 18, 18]
    assert padded.nsa_cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 5]
    assert padded.nsa_extend_seq_lens_list == [1, 1, 1]
    for field in ("cache_seqlens_int32", "nsa_seqlens_expanded", "real_page_table", "token_to_batch_idx", "cu_seqlens_q"):
        assert getattr(padded, field) is getattr(metadata, field)
