"""Device memory that captured metadata takes, ours beside SGLang's, for the same captures in one process.

A target backend (target_verify), N - 1 draft steps and a draft-extend backend, captured for batch sizes up to the largest, as
SGLang's graph runners do: DeepSeek-V3.2 with 64 requests of its longest context, and GLM-5.2 with 256 of a million tokens,
where users of the built-in backend miss 10.7 GB (SGLang's pull requests 30474 and 33479)."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.testing.calls import calls
from nsa_backend.testing.captured import DRAFT_EXTEND, MODES, Captured, CapturedRound, static_batch
from nsa_backend.testing.process import start_sglang
from nsa_backend.testing.runner import make_gpu_runner


@dataclass(frozen=True)
class Setting:
    """What is captured."""

    model: str
    context: int
    sizes: tuple[int, ...]  # requests of captured batches
    steps: int  # N
    draft_tokens: int  # D


SETTINGS = (
    Setting("DeepSeek-V3.2", 163_840, (1, 2, 4, 8, 16, 32, 64), 4, 4),
    Setting("GLM-5.2", 1_048_576, (1, 2, 4, 8, 16, 32, 64, 128, 256), 5, 6),
)


def cells(options: argparse.Namespace, resources: ExitStack) -> list[Cell]:
    """One cell a setting: both sides, one after the other."""
    start_sglang()
    return [
        Cell(f"{one.model}, N = {one.steps}, D = {one.draft_tokens}, max_bs {max(one.sizes)}, context {one.context}",
             partial(measure, one))
        for one in SETTINGS
    ]  # fmt: skip


def measure(of: Setting) -> list[dict]:
    from nsa_backend.backend import NativeSparseAttnBackend
    from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend

    taken = {
        "builtin": measured(of, *calls.builtin()),
        "ours": measured(of, NativeSparseAttnBackend, NativeSparseAttnMultiStepBackend),
    }
    setting = {"model": of.model, "max_bs": max(of.sizes), "sizes": of.sizes, "context": of.context, "N": of.steps}
    return [setting | {"D": of.draft_tokens, "bytes": taken, "share": round(taken["ours"] / taken["builtin"], 4)}]


def measured(of: Setting, module_backend: type, module_multi_step: type) -> int:
    """Bytes that the captures of one side keep allocated."""
    runner = make_gpu_runner(
        num_steps=of.steps, num_draft_tokens=of.draft_tokens, context=of.context, max_requests=max(of.sizes)
    )
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    kept = capture_all(of, module_backend, module_multi_step, runner)
    torch.cuda.synchronize()
    taken = torch.cuda.memory_allocated() - before
    del kept
    return taken


def capture_all(of: Setting, module_backend: type, module_multi_step: type, runner: SimpleNamespace) -> list:
    """What a server keeps after capturing; returns it, so that it stays alive."""
    max_bs = max(of.sizes)
    static = static_batch(
        torch.ones(max_bs, device=runner.device),
        torch.zeros(max_bs, dtype=torch.int64, device=runner.device),
        of.draft_tokens,
    )
    target, extend, draft = module_backend(runner), module_backend(runner), module_multi_step(runner, 1, of.steps)
    for backend in (target, extend):
        backend.init_cuda_graph_state(max_bs, max_bs * of.draft_tokens)
    draft.init_cuda_graph_state(max_bs, max_bs)
    for bs in reversed(of.sizes):
        batch = SimpleNamespace(**vars(static))
        batch.batch_size, batch.seq_lens, batch.req_pool_indices = bs, static.seq_lens[:bs], static.req_pool_indices[:bs]
        batch.spec_info = SimpleNamespace(num_accept_tokens=static.spec_info.num_accept_tokens[:bs])
        for backend, mode in ((target, MODES["target_verify"]), (extend, DRAFT_EXTEND)):
            Captured(backend, batch, mode, bs * of.draft_tokens)
        CapturedRound(draft, batch)
    return [target, extend, draft]


def show(report: dict) -> None:
    rows = report["rows"]
    print_table(
        ("model", "", "MiB", "share of the built-in's, %"),
        [
            (r.get("model"), side, r["bytes"][side] / 2**20, 100 * r["bytes"][side] / r["bytes"]["builtin"])
            for r in rows
            for side in r["bytes"]
        ],
    )
