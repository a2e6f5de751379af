"""SGLang's forward modes, and the plan of each."""

from __future__ import annotations

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.kernels.plan import (
    MetadataPlan,
    plan_decode,
    plan_draft_extend_v1,
    plan_draft_extend_v2,
    plan_target_verify,
)


def is_paged(mode: sglang_types.ForwardMode) -> bool:
    """Whether the indexer reads keys through page tables, row by row; the other modes are prefill."""
    return mode.is_decode_or_idle() or mode.is_target_verify() or adapter.is_draft_extend(mode)


def plan_for(mode: sglang_types.ForwardMode, num_requests: int, num_rows: int, next_n: int = 1) -> MetadataPlan:
    """The plan of a paged mode.

    Args:
        mode: decode, idle, target_verify or draft_extend (v1 and v2).
        num_requests: requests, padding included.
        num_rows: query rows; the same number for every request except in draft_extend v1.
        next_n: rows of a request that DeepGEMM's logits may take together in target_verify. SGLang's indexer knows no others.

    Raises:
        ValueError: the mode has no paged metadata.
    """
    rows_per_request = num_rows // num_requests if num_requests else 1
    if mode.is_decode_or_idle():
        return plan_decode(num_requests)
    if mode.is_target_verify():
        return plan_target_verify(num_requests, rows_per_request, next_n)
    if adapter.is_ragged_draft_extend(mode):
        return plan_draft_extend_v1(num_requests, num_rows)
    if adapter.is_draft_extend(mode):
        return plan_draft_extend_v2(num_requests, rows_per_request)
    raise ValueError(f"nsa_backend has no paged metadata for {mode.name}: it serves decode, target_verify and draft_extend")
