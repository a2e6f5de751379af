"""Ranks that divide the KV of every request (--dcp-size, decode context parallel), as SGLang 0.5.23 has them for sparse models.

SGLang's allocator hands out slots of all ranks together, in pages of 64 times the ranks; slot s lies on rank s modulo that
number. Its pool writes what is a rank's own. Index keys and the drafts' KV lie whole on every rank, so logits, top-k and page
tables are those of one rank. Its layer gathers the query heads of the ranks, in every mode, and joins what each attends to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.runtime_context import get_parallel

from nsa_backend.adapters.option_rules import Rule, nested
from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import device_sm, hook
from nsa_backend.adapters.startup import attention_tp_size_of, context_ranks_of
from nsa_backend.releases import CONTEXT_RANKS, installed

logger = logging.getLogger(__name__)

SERVED = installed() in CONTEXT_RANKS

KERNELS = "sglang.srt.arg_groups.model_overrides.deepseek_v2._dsa_dcp_overrides"
CAPTURE_RULES = "sglang.srt.arg_groups.cuda_graph_hook"
PREFILL_CAPTURE = f"{CAPTURE_RULES}.disable_breakable_cudagraph_if_incompatible"
TRTLLM = "trtllm"
"""The kernel that SGLang names beside --dcp-size, the one whose log-sum-exp its own backend has."""

REFUSED = (
    ()
    if SERVED
    else (
        Rule(
            "dcp_size",
            "--dcp-size",
            f"ranks that divide the KV of a request are served on SGLang {' and '.join(CONTEXT_RANKS)}, and {installed()} is "
            "installed",
            (None, 1),
            "pass --dcp-size 1",
            everywhere=False,
            builtin_serves=False,
        ),
    )
)


def rank_of_context() -> tuple[int, int]:
    """Ranks that divide the KV of the target in this process's group, and this one of them."""
    if not SERVED:
        return 1, 0
    parallel = get_parallel()
    ranks = parallel.attn_dcp_size
    return ranks, parallel.attn_dcp_rank if ranks > 1 else 0


def combination_problems(args: Any) -> list[str]:
    """One sentence for each of these resolved arguments that is not served beside --dcp-size."""
    ranks = context_ranks_of(args)
    if ranks == 1 or not SERVED:
        return []
    found, heads = [], attention_tp_size_of(args)
    if ranks & (ranks - 1) or heads % ranks:
        found.append(
            f"nsa_backend does not serve --dcp-size {ranks}: {heads} ranks share the heads of a request; "
            f"pass a power of two that divides {heads}"
        )
    if nested(args, "speculative_algorithm") == "EAGLE3":
        found.append(
            "nsa_backend does not serve --speculative-algorithm EAGLE3 beside --dcp-size: a dense draft model has no indexer, "
            "and SGLang takes its KV for divided; choose EAGLE, which runs the model's MTP layer"
        )
    if nested(args, "dcp_comm_backend") == "fi_a2a" and on_hopper():
        found.append(
            "SGLang has --dcp-comm-backend fi_a2a on Blackwell alone, and says so once weights are loaded; "
            "pass --dcp-comm-backend a2a"
        )
    return found


def take_defaults(names: tuple[str, ...]) -> None:
    """On Hopper let --dcp-size alone be enough: SGLang chooses kernels, and captures prefills, as without it.

    Args:
        names: attention backends that are ours.
    """
    if SERVED:
        hook(KERNELS, partial(kernels_of_one_rank, names), HookType.AROUND)
        hook(PREFILL_CAPTURE, partial(capture_as_one_rank, names), HookType.AROUND)


def on_hopper() -> bool:
    """By the question that SGLang asks too where it chooses kernels, on a machine with NVIDIA's GPUs alone."""
    return torch.version.cuda is not None and device_sm("cuda") == 90


def is_ours(view: Any, names: tuple[str, ...]) -> bool:
    """Whether all attention of a sparse model is ours, of what is resolved so far: where nothing is named SGLang chooses it."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, is_attention_backend_not_set

    return is_attention_backend_not_set(view) or set(attention_backends_of(view)) <= set(names)


def kernels_of_one_rank(names: tuple[str, ...], original: Callable, view: Any) -> dict:
    """Around SGLang's defaults of a sparse model beside --dcp-size: what Hopper has no kernel for is left to its later ones."""
    found = original(view)
    if not found or not is_ours(view, names) or not on_hopper():
        return found
    return {name: value for name, value in found.items() if value != TRTLLM}


def capture_as_one_rank(names: tuple[str, ...], original: Callable, server_args: Any) -> None:
    """Around SGLang's rules of what keeps prefills from being captured, one of which is --dcp-size.

    A captured prefill lacks metadata of parts that other models' layers read, and those with our backend do not. Under DP
    attention, where none has run, the rule stays.
    """
    rules = import_module(CAPTURE_RULES)
    view = rules.resolving_view(server_args)
    divided = context_ranks_of(view) > 1 and not view.enable_dp_attention and (view.attn_dp_size or 1) == 1
    ours = divided and is_ours(view, names) and on_hopper()
    if not ours or not is_deepseek_dsa(rules.model_config_of(server_args).hf_config):
        original(server_args)
        return
    with _undivided(rules):
        original(server_args)
    if view.cuda_graph_config.prefill.backend == "breakable":
        logger.warning(
            "nsa_backend: prefills are captured beside --dcp-size too; --cuda-graph-backend-prefill disabled saves their memory"
        )


class _Undivided:
    """What SGLang has resolved so far, of a server whose ranks divide no KV."""

    dcp_size = 1

    def __init__(self, view: Any):
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


@contextmanager
def _undivided(rules: Any) -> Iterator[None]:
    """SGLang's module of rules reads such a view."""
    view = rules.resolving_view
    rules.resolving_view = lambda server_args: _Undivided(view(server_args))
    try:
        yield
    finally:
        rules.resolving_view = view


def take_context_parts(model: Any) -> None:
    """Let a model's layers take the log-sum-exp of a rank's part out of prefills that SGLang pads or captures in pieces.

    SGLang's layer expects it beside the output, and tells its attention so in no mode, which then hands back the output alone.

    Args:
        model: SGLang's, loaded.
    """
    for module in model.modules():
        attention = getattr(module, "attn_mqa_for_dcp_decode", None)
        if attention is not None and not isinstance(attention.forward, partial):
            attention.forward = partial(attention.forward, return_lse=True)
