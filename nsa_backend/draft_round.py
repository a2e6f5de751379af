"""What the plugin adds around two methods of SGLang's draft workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsa_backend import host
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend


def run_draft_round(original: Callable, worker: Any, forward_batch: host.ForwardBatch) -> tuple:
    """Around `draft_forward`: prepare the round where the draft backend is ours."""
    if isinstance(worker.draft_attn_backend, NativeSparseAttnMultiStepBackend):
        worker.draft_attn_backend.begin_draft_round(forward_batch)
    return original(worker, forward_batch)


def capture_draft_extend(original: Callable, worker: Any) -> None:
    """Around `init_cuda_graphs`: capture draft-extend too.

    Under overlap scheduling SGLang captures it only for the backends it names in an isinstance check, and runs the draft
    layer eagerly every round for all others (0.5.12.post1).
    """
    original(worker)
    if (
        isinstance(worker.draft_extend_attn_backend, NativeSparseAttnBackend)
        and not worker.server_args.disable_cuda_graph
        and worker.cuda_graph_runner_for_draft_extend is None
    ):
        worker.cuda_graph_runner_for_draft_extend = host.draft_extend_graph_runner(worker)


def build_draft_extend_runner(
    original: Callable,
    runner: Any,
    worker: Any,
    *,
    draft_extend_attn_backend: Any = None,
    speculative_num_steps: int | None = None,
) -> None:
    """Around the draft-extend graph runner's `__init__`: its batch sizes count N + 1 tokens a request."""
    passed_on = {"draft_extend_attn_backend": draft_extend_attn_backend, "speculative_num_steps": speculative_num_steps}
    if not isinstance(draft_extend_attn_backend or worker.draft_extend_attn_backend, NativeSparseAttnBackend):
        original(runner, worker, **passed_on)
        return
    with host.draft_extend_sizes_in_tokens((speculative_num_steps or worker.server_args.speculative_num_steps) + 1):
        original(runner, worker, **passed_on)
