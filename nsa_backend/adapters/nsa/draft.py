"""The draft workers of SGLang 0.5.12 and 0.5.12.post1, and what they need around them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from nsa_backend.adapters.sglang_types import ForwardBatch, HookType
from nsa_backend.adapters.shared import (
    Takeover,
    batch_sizes_chosen_with,
    count_draft_extend_in_tokens,
    hook,
)

DRAFT_WORKERS = (
    ("sglang.srt.speculative.eagle_worker_v2", "EagleDraftWorker"),
    ("sglang.srt.speculative.eagle_worker", "EAGLEWorker"),
)
"""The workers whose `draft_forward` runs our multi-step backend: spec v2 (overlap scheduling) and spec v1."""


def take_draft_side(ours: Takeover) -> None:
    """Hook the draft workers that this process has loaded, once a draft backend is built.

    Not done when the plugin loads: the workers' modules import sgl_kernel, which needs libcuda, and SGLang loads plugins in
    processes that never see a GPU.
    """
    hooks = {
        "draft_forward": lambda original, worker, batch: run_draft_round(ours, original, worker, batch),
        "init_cuda_graphs": lambda original, worker: capture_draft_extend(ours, original, worker),
    }
    for method, function in hooks.items():
        for module, worker in DRAFT_WORKERS:
            target = f"{module}.{worker}.{method}"
            if module in sys.modules:
                hook(target, function, HookType.AROUND)
    count_draft_extend_in_tokens(ours, draft_extend_sizes_in_tokens)


def run_draft_round(ours: Takeover, original: Callable, worker: Any, forward_batch: ForwardBatch) -> tuple:
    """Around `draft_forward`: prepare the round where the draft backend is ours."""
    if isinstance(worker.draft_attn_backend, ours.multi_step_class):
        worker.draft_attn_backend.begin_draft_round(forward_batch)
    return original(worker, forward_batch)


def capture_draft_extend(ours: Takeover, original: Callable, worker: Any) -> None:
    """Around `init_cuda_graphs`: capture draft-extend too.

    Under overlap scheduling SGLang captures it only for the backends it names in an isinstance check, and runs the draft
    layer eagerly every round for all others (0.5.12.post1).
    """
    original(worker)
    if (
        isinstance(worker.draft_extend_attn_backend, ours.backend_class)
        and not worker.server_args.disable_cuda_graph
        and worker.cuda_graph_runner_for_draft_extend is None
    ):
        worker.cuda_graph_runner_for_draft_extend = draft_extend_graph_runner(worker)


def draft_extend_graph_runner(worker: Any) -> Any:
    """Capture the draft-extend graphs of a draft worker, `num_steps + 1` rows a request."""
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    return EAGLEDraftExtendCudaGraphRunner(worker)


def draft_extend_sizes_in_tokens(tokens_per_request: int) -> contextlib.AbstractContextManager[None]:
    """While a draft-extend graph runner is built, its batch sizes count tokens."""
    return batch_sizes_chosen_with(num_tokens_per_bs=tokens_per_request)
