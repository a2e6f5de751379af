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
