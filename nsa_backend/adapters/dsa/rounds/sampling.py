"""How a batch samples, as static tensors that a captured round reads, and the memory that probabilities take.

SGLang leaves top-k or top-p out of a round where no request of the batch asks for it. A captured round always applies both: a
request that asks for neither goes through them as it does in a batch with one that does, and keeps every token, which top-p 1
does not promise (`KEEP_ALL_TOP_P`). So one graph a size serves every sampled batch.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from nsa_backend.adapters.dsa.rounds.kinds import Kind
from nsa_backend.adapters.dsa.rounds.ranks import least_of_batch
from nsa_backend.adapters.dsa.rounds.rule import SAMPLED_SWITCH
from nsa_backend.environment import switched_on
from nsa_backend.kernels.round_sampling import SamplingParameters, keeping_all

logger = logging.getLogger(__name__)

FLOAT_BYTES = 4
VOCABULARIES = 3
"""Tensors of probabilities, float32 [rows, vocabulary], alive at once in SGLang's verification, and then in its log-softmax:
what a step reads and writes, and one for what the allocator cannot join."""
SHARE_OF_FREE, UNASKED_SHARE_OF_FREE = 0.5, 0.125
"""Of the free memory, at most so much goes to rounds with probabilities that somebody asks for, and to those that are there by
default: prefills may still want the rest."""


def parameters(sampling_info: Any) -> SamplingParameters:
    """Those of a batch, from SGLang's SamplingBatchInfo."""
    return SamplingParameters(sampling_info.temperatures, sampling_info.top_ps, sampling_info.top_ks)


def renormalizing(sampling_info: Any) -> Any:
    """The same, but SGLang applies top-k and top-p even where nobody asks for it, and then keeps every token."""
    changed = _filtered(sampling_info)
    changed.top_ps = keeping_all(changed.top_ps)
    return changed


def on_static_tensors(sampling_info: Any, static: SamplingParameters) -> Any:
    """A SamplingBatchInfo of sampled requests that SGLang reads from `static`; `sampling_info` is of any sampled batch."""
    changed = _filtered(sampling_info)
    changed.temperatures, changed.top_ps, changed.top_ks = static.temperatures, static.top_ps, static.top_ks
    changed.min_ps = None  # SGLang's verification does not read it
    return changed


def _filtered(sampling_info: Any) -> Any:
    changed = copy.copy(sampling_info)
    changed.need_top_k_sampling = changed.need_top_p_sampling = True
    return changed


def fitting(sizes: list[int], num_draft_tokens: int, vocabulary: int, free: int, kind: Kind) -> list[int]:
    """The batch sizes whose probabilities take no more than their share of `free` bytes; the log names the others.

    The graphs of all sizes share their memory, so the largest one counts. Rounds with log-probabilities are asked for.
    """
    asked = kind.logprobs or switched_on(SAMPLED_SWITCH)
    a_request = VOCABULARIES * num_draft_tokens * vocabulary * FLOAT_BYTES
    found = [size for size in sizes if size * a_request <= (SHARE_OF_FREE if asked else UNASKED_SHARE_OF_FREE) * free]
    if found != sizes:
        logger.warning(
            "nsa_backend: rounds of more than %d %s are three CUDA graphs, because the probabilities of %d take %.0f MiB, and "
            "%.0f MiB are free: lower --mem-fraction-static for more%s",
            max(found, default=0),
            kind,
            max(sizes),
            max(sizes) * a_request / 2**20,
            free / 2**20,
            "" if asked else f", or set {SAMPLED_SWITCH}=1, which gives them half of what is free in place of an eighth",
        )
    return found


def free_bytes(device: torch.device | str) -> int:
    """Free memory of a GPU; 0 elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if torch.device(device).type == "cuda" else 0


def least_free_bytes(device: torch.device | str) -> int:
    """Of the ranks that share a batch, which must capture the same sizes: every one of them calls this."""
    return least_of_batch(free_bytes(device))
