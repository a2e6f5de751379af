"""What an implementation prepares from the lengths (FlashMLA's schedule) follows every launch, eager and captured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import begin_forward, begin_round, fill, forward_batch, static_batch
from metadata_reference import Batch

from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls


def decoding(runner, lengths: list[int]) -> Batch:
    return Batch("decode", lengths, [1, 2], runner.req_to_token_pool.req_to_token.numpy(), 64, 0)


class Recorder:
    """Stands in for an implementation and keeps the row lengths it was asked to prepare for."""

    def __init__(self):
        self.asked = []
        self.reserved = []

    def reserve(self, max_rows):
        self.reserved.append(max_rows)

    def prepare(self, metadata):
        self.asked.append(metadata.nsa_cache_seqlens_int32.tolist())
        return replace(metadata, schedule=len(self.asked))


def test_every_draft_step_is_prepared_with_its_own_lengths(make_runner):
    runner = make_runner(num_steps=4, index_topk=64)
    multi_step = NativeSparseAttnMultiStepBackend(runner, 1, 4)
    recorder = Recorder()
    for backend in multi_step.attn_backends:
        backend.decode_attention = recorder
    batch = static_batch(2, 2, ForwardMode.DECODE)
    fill(batch, decoding(runner, [10, 62]))
    batch.out_cache_loc = torch.arange(8)
    multi_step.init_cuda_graph_state(2, 2)
    calls.before_round_capture(multi_step, batch)
    for _ in range(2):  # a warm-up, then the capture
        recorder.asked.clear()
        begin_round(multi_step, batch)
        assert recorder.asked == [[11, 63], [12, 64], [13, 64]]
    assert [b.forward_metadata.schedule for b in multi_step.attn_backends] == [1, 2, 3]


@pytest.mark.parametrize("captured", [True, False])
def test_the_backend_is_prepared_after_its_launch(make_runner, captured):
    runner = make_runner(index_topk=64)
    backend = create_backend(runner)
    backend.decode_attention = recorder = Recorder()
    batch = decoding(runner, [5, 90])
    if captured:
        backend.init_cuda_graph_state(2, 2)
        static = static_batch(2, 2, ForwardMode.DECODE)
        fill(static, batch)
        calls.before_capture(backend, static)
        assert recorder.asked == []
        for found in begin_forward(backend, static, layers=(0, 1)):
            assert found.attn_metadata.schedule == 1
    else:
        backend.init_forward_metadata(forward_batch(batch, ForwardMode.DECODE))
    assert recorder.asked == [[5, 64]]
