"""Captured graphs of every mode: 1000 random batches over four batch sizes, every field against the twin.

Replays run under torch's synchronisation check and must not allocate.
"""

from types import SimpleNamespace

import pytest
import torch
from captured_metadata import compare, poison

from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.benchmarks.calls.timing import captured_graph
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.plan import plan_draft_decode
from nsa_backend.metadata.modes import plan_for
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.testing import captured
from nsa_backend.testing.captured import MODES

pytestmark = pytest.mark.gpu

SIZES = (1, 3, 8, 33)
REPLAYS = 1000
N, D = 4, 5


def static_batch(bs: int) -> SimpleNamespace:
    """The tensors that SGLang's graph runners keep, and the accept counts by a short name."""
    lengths = torch.ones(bs, dtype=torch.int64, device="cuda")
    batch = captured.static_batch(lengths, torch.zeros(bs, dtype=torch.int64, device="cuda"), 1)
    batch.accept = batch.spec_info.num_accept_tokens
    return batch


def randomise(batch: SimpleNamespace, mode: str, longest: int, pool: int) -> None:
    bs = batch.batch_size
    lengths = torch.randint(1, longest, (bs,), device="cuda")
    lengths = torch.where(torch.rand(bs, device="cuda") < 0.2, lengths // 64 * 64 + 62, lengths)
    batch.accept.copy_(torch.randint(1, D + 1, (bs,), device="cuda"))
    if mode == "draft_extend_v1":
        lengths = lengths + batch.accept
    if mode == "draft_extend_v2":
        lengths = lengths + D
    real = torch.arange(bs, device="cuda") < torch.randint(1, bs + 1, (1,), device="cuda")
    batch.seq_lens.copy_(torch.where(real, lengths, 1))
    slots = 1 + torch.randperm(pool - 1, device="cuda")[:bs]
    batch.req_pool_indices.copy_(torch.where(real, slots, 0))


def capture_mode(backend, mode: str, batch: SimpleNamespace):
    """Capture through the entry points SGLang calls; returns (plan, replay function)."""
    bs, forward_mode = batch.batch_size, MODES[mode]
    rows = bs if mode == "decode" else bs * D
    found = captured.Captured(backend, batch, forward_mode, rows)
    graph = captured_graph(found.in_graph)

    def replay():
        found.replay()
        graph.replay()
        return [backend.forward_metadata]

    return plan_for(forward_mode, bs, rows), replay


def capture_draft(multi_step, batch: SimpleNamespace):
    found = captured.CapturedRound(multi_step, batch)
    graph = captured_graph(found.in_graph)
    views = [b.forward_metadata for b in multi_step.attn_backends]

    def replay():
        found.replay()
        graph.replay()
        return views

    return plan_draft_decode(batch.batch_size, N), replay


@pytest.mark.parametrize("mode", [*MODES, "draft_decode"])
def test_a_thousand_replays(make_runner, mode):
    runner = make_runner(num_steps=N, context=1500)
    req_to_token = runner.req_to_token_pool.req_to_token
    req_to_token.copy_(torch.randint(0, 2**30, req_to_token.shape, device="cuda"))
    if mode == "draft_decode":
        backend = NativeSparseAttnMultiStepBackend(runner, 1, N)
        backend.init_cuda_graph_state(max(SIZES), max(SIZES))
        num_sms = backend.attn_backends[0].config.num_sms
    else:
        backend = NativeSparseAttnBackend(runner)
        backend.init_cuda_graph_state(max(SIZES), max(SIZES) * (1 if mode == "decode" else D))
        num_sms = backend.config.num_sms
    for bs in SIZES:
        batch = static_batch(bs)
        plan, replay = capture_draft(backend, batch) if mode == "draft_decode" else capture_mode(backend, mode, batch)
        for _ in range(REPLAYS // len(SIZES)):
            randomise(batch, mode, 1480, req_to_token.shape[0])
            for metadata in replay():
                poison(metadata)
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            torch.cuda.set_sync_debug_mode("error")
            try:
                got = replay()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
            inputs = BatchInputs(batch.seq_lens, batch.req_pool_indices, batch.accept if plan.ragged else None)
            compare(got, plan, inputs, req_to_token, num_sms)
