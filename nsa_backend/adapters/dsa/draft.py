"""The draft workers of SGLang 0.5.17 to 0.5.23, and what they need around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from nsa_backend.adapters.naive_eagle import switch_on
from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import Takeover, batch_sizes_chosen_with, count_draft_extend_in_tokens, hook

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"


def take_draft_side(ours: Takeover) -> None:
    """Count the draft-extend runner's sizes in tokens, and pass SGLang's isinstance checks of its own backend.

    The draft worker captures draft-extend for the backends that it names by class. Being a virtual subclass opens that check
    and every other one alike. Not done when the plugin loads: the class's module imports sgl_kernel, which needs libcuda.
    """
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    count_draft_extend_in_tokens(ours, draft_extend_sizes_in_tokens)
    DeepseekSparseAttnBackend.register(ours.backend_class)


def draft_extend_sizes_in_tokens(tokens_per_request: int) -> contextlib.AbstractContextManager[None]:
    """While a draft-extend graph runner is built, its batch sizes count tokens."""
    return batch_sizes_chosen_with(captured_req_width=tokens_per_request)


def take_rounds(ours: Takeover, has_rounds: Callable[[Any], bool]) -> None:
    """Let EAGLE's worker run its rounds in one graph; the worker's modules are loaded where SGLang builds one.

    Args:
        ours: the attention backends.
        has_rounds: whether a server of these arguments is to have such graphs.
    """
    backends = (ours.backend_class, ours.multi_step_class)
    hook(CREATE_WORKER, partial(_round_worker, backends, has_rounds), HookType.AROUND)


def _round_worker(
    backends: tuple[type, ...], has_rounds: Callable[[Any], bool], original: Callable, algorithm: Any, server_args: Any
) -> type | None:
    """Around SGLang's choice of a worker class, in the scheduler's process."""
    switch_on(server_args)
    worker_class = original(algorithm, server_args)
    if not algorithm.is_eagle() or not has_rounds(server_args):
        return worker_class
    from nsa_backend.adapters.dsa.rounds.samplers import compile_meanwhile
    from nsa_backend.adapters.dsa.rounds.worker import with_rounds

    compile_meanwhile()
    return with_rounds(worker_class, backends)
