"""Device memory that captured metadata takes, ours beside SGLang's, for the same captures in one process.

A target backend (target_verify), N - 1 draft steps and a draft-extend backend, for max_bs 64, context 163840, N = 4, D = 4,
captured for batch sizes 1 to 64, as SGLang's graph runners do.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from types import SimpleNamespace

import torch

from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.testing.calls import calls
from nsa_backend.testing.captured import DRAFT_EXTEND, MODES, Captured, CapturedRound, static_batch
from nsa_backend.testing.process import start_sglang
from nsa_backend.testing.runner import make_gpu_runner

SIZES, CONTEXT, NUM_STEPS, NUM_DRAFT_TOKENS = (1, 2, 4, 8, 16, 32, 64), 163_840, 4, 4


def cells(options: argparse.Namespace, resources: ExitStack) -> list[Cell]:
    """One cell: both sides, one after the other."""
    start_sglang()
    return [Cell(f"N = {NUM_STEPS}, D = {NUM_DRAFT_TOKENS}, max_bs {max(SIZES)}, context {CONTEXT}", measure)]


def measure() -> list[dict]:
    from nsa_backend.backend import NativeSparseAttnBackend
    from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend

    taken = {
        "builtin": measured(*calls.builtin()),
        "ours": measured(NativeSparseAttnBackend, NativeSparseAttnMultiStepBackend),
    }
    setting = {"max_bs": max(SIZES), "sizes": SIZES, "context": CONTEXT, "N": NUM_STEPS, "D": NUM_DRAFT_TOKENS}
    return [setting | {"bytes": taken, "share": round(taken["ours"] / taken["builtin"], 4)}]


def measured(module_backend: type, module_multi_step: type) -> int:
    """Bytes that the captures of one side keep allocated."""
    runner = make_gpu_runner(num_steps=NUM_STEPS, num_draft_tokens=NUM_DRAFT_TOKENS, context=CONTEXT, max_requests=max(SIZES))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    kept = capture_all(module_backend, module_multi_step, runner)
    torch.cuda.synchronize()
    taken = torch.cuda.memory_allocated() - before
    del kept
    return taken


def capture_all(module_backend: type, module_multi_step: type, runner: SimpleNamespace) -> list:
    """What a server keeps after capturing; returns it, so that it stays alive."""
    max_bs = max(SIZES)
    static = static_batch(
        torch.ones(max_bs, device=runner.device),
        torch.zeros(max_bs, dtype=torch.int64, device=runner.device),
        NUM_DRAFT_TOKENS,
    )
    target, extend, draft = module_backend(runner), module_backend(runner), module_multi_step(runner, 1, NUM_STEPS)
    for backend in (target, extend):
        backend.init_cuda_graph_state(max_bs, max_bs * NUM_DRAFT_TOKENS)
    draft.init_cuda_graph_state(max_bs, max_bs)
    for bs in reversed(SIZES):
        batch = SimpleNamespace(**vars(static))
        batch.batch_size, batch.seq_lens, batch.req_pool_indices = bs, static.seq_lens[:bs], static.req_pool_indices[:bs]
        batch.spec_info = SimpleNamespace(num_accept_tokens=static.spec_info.num_accept_tokens[:bs])
        for backend, mode in ((target, MODES["target_verify"]), (extend, DRAFT_EXTEND)):
            Captured(backend, batch, mode, bs * NUM_DRAFT_TOKENS)
        CapturedRound(draft, batch)
    return [target, extend, draft]


def show(report: dict) -> None:
    rows = report["rows"]
    print_table(
        ("", "MiB", "share of the built-in's, %"),
        [(side, r["bytes"][side] / 2**20, 100 * r["bytes"][side] / r["bytes"]["builtin"]) for r in rows for side in r["bytes"]],
    )
