"""Prefills in one graph: each row is a request that decodes, by the metadata launch at the graph's head, against the twin."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from captured_metadata import compare, poison

from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.benchmarks.calls.timing import captured_graph
from nsa_backend.kernels.plan import plan_decode
from nsa_backend.releases import LAYER_FRONTS, installed

pytestmark = pytest.mark.gpu

SIZES = (512, 320, 64, 4)  # as SGLang captures them
CONTEXT = 9000
WIDTHS = {512: 4096, 320: 8192, 64: CONTEXT, 4: CONTEXT}
PREFILLS = 60


def a_batch(rows: int, longest: int, pool: int) -> SimpleNamespace:
    """As much of SGLang's as a replay reads: some requests with some tokens cached, of `rows` new ones at most."""
    requests = int(torch.randint(1, min(rows, 8) + 1, ()))
    new = torch.randint(1, rows // requests + 1, (requests,))
    cached = torch.stack([torch.randint(0, longest - int(n) + 1, ()) for n in new])
    positions = torch.cat([torch.arange(int(c), int(c + n)) for n, c in zip(new, cached, strict=True)])
    return SimpleNamespace(
        extend_seq_lens_cpu=new.tolist(),
        extend_seq_lens=new.int().cuda(),
        positions=positions.cuda(),
        req_pool_indices=1 + torch.randperm(pool - 1, device="cuda")[:requests],
        of_row=torch.repeat_interleave(torch.arange(requests), new).cuda(),
    )


@pytest.mark.skipif(installed() not in LAYER_FRONTS, reason="no other release has our front")
def test_rows_of_a_prefill_have_their_own_metadata(make_runner):
    """Whatever the graph held before, without a wait for the GPU, and once decode has been captured for more rows."""
    from nsa_backend.adapters.dsa.layer_front.prefills import WholePrefills

    runner = make_runner(num_steps=3, context=CONTEXT)
    table = runner.req_to_token_pool.req_to_token
    table.copy_(torch.randint(0, 2**30, table.shape, device="cuda"))
    backend, prefills, graphs = NativeSparseAttnBackend(runner), WholePrefills(), {}
    device = backend.config.attention.device
    for size in SIZES:
        backend.keep_rows(WIDTHS[size], prefills.of_rows(size, device))
        graphs[size] = captured_graph(lambda size=size: backend.at_head_of_rows(size))
    backend.init_cuda_graph_state(1024, 1024)
    for size in SIZES:
        for _ in range(PREFILLS):
            batch = a_batch(size, WIDTHS[size], table.shape[0])
            rows = sum(batch.extend_seq_lens_cpu)
            poison(backend.rows.replay(None, size).steps[0])
            torch.cuda.set_sync_debug_mode("error")
            try:
                prefills.fill(batch, size)
                backend.replay_rows(size)
                graphs[size].replay()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            inputs = prefills.of_rows(size, device)
            assert torch.equal(inputs.seq_lens[:rows], batch.positions + 1)
            assert torch.equal(inputs.req_pool_indices[:rows], batch.req_pool_indices[batch.of_row])
            assert inputs.seq_lens[rows:].eq(1).all()
            assert inputs.req_pool_indices[rows:].eq(0).all()
            compare([backend.forward_metadata], plan_decode(size), inputs, table, backend.config.num_sms, WIDTHS[size])
