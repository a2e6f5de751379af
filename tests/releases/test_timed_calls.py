"""What the benchmarks capture and time, on the CPU: the calls that SGLang makes, with their arguments made beforehand."""

from __future__ import annotations

import pytest
import torch
from batches import MODES, check, random_batch

from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls
from nsa_backend.testing.captured import DRAFT_EXTEND, Captured, CapturedRound, static_batch

N = 3


def static(batch):
    found = static_batch(torch.tensor(batch.seq_lens), torch.tensor(batch.slots), N + 1)
    if batch.extend_lens:
        found.spec_info.num_accept_tokens.copy_(torch.tensor(batch.extend_lens))
    return found


def test_the_captured_draft_extend_is_one_of_the_modes():
    assert DRAFT_EXTEND in MODES.values()


@pytest.mark.parametrize("mode", list(MODES))
def test_a_captured_mode(make_runner, mode):
    """The launch writes everything, and what comes before a replay writes nothing."""
    runner = make_runner(num_steps=N)
    backend, batch = create_backend(runner), random_batch(runner, mode, 5, 1, N)
    rows = 5 if mode == "decode" else sum(batch.extend_lens) or 5 * (N + 1)
    backend.init_cuda_graph_state(5, rows)
    found = Captured(backend, static(batch), MODES[mode], rows)
    found.in_graph()
    check(backend.forward_metadata, batch)
    backend.forward_metadata.nsa_seqlens_expanded.fill_(-7)
    found.replay()
    assert set(backend.forward_metadata.nsa_seqlens_expanded.tolist()) == {-7}


def test_a_captured_round(make_runner):
    runner = make_runner(num_steps=N)
    multi_step = calls.draft_factory(runner, N).create_decode_backend()
    multi_step.init_cuda_graph_state(5, 5)
    batch = random_batch(runner, "draft_decode", 5, 1, N)
    found = CapturedRound(multi_step, static(batch))
    found.in_graph()
    for step, backend in enumerate(multi_step.attn_backends):
        check(backend.forward_metadata, batch, step)
        backend.forward_metadata.nsa_seqlens_expanded.fill_(-7)
    found.replay()
    assert {value for b in multi_step.attn_backends for value in b.forward_metadata.nsa_seqlens_expanded.tolist()} == {-7}
