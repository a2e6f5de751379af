"""SGLang's forward modes: the plan of each, and the metadata of a forward outside CUDA graphs, in memory of its own."""

from __future__ import annotations

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.config import BackendConfig
from nsa_backend.kernels.plan import (
    MetadataPlan,
    plan_decode,
    plan_draft_extend_v1,
    plan_draft_extend_v2,
    plan_target_verify,
)
from nsa_backend.metadata.prefill import extend_lens_on_host, prefill_metadata
from nsa_backend.metadata.views import NSAMetadata, step_metadata
from nsa_backend.metadata.writer import MetadataWriter


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


def eager_metadata(writer: MetadataWriter, batch: sglang_types.ForwardBatch, *, dense: bool) -> NSAMetadata:
    """Metadata of `batch` in its forward mode, decode to prefill; `dense` says how a prefill will attend."""
    mode = batch.forward_mode
    if is_paged(mode):
        plan = _paged_plan(batch, writer.config)
        return step_metadata(plan, writer.write_eager(plan, batch))
    if mode.is_extend():
        return prefill_metadata(writer, batch, dense=dense, rows=adapter.rows_of_rank(batch))
    raise ValueError(f"nsa_backend has no metadata for {mode.name}: it serves prefill, decode, target_verify and draft_extend")


def _paged_plan(batch: sglang_types.ForwardBatch, config: BackendConfig) -> MetadataPlan:
    mode, requests = batch.forward_mode, batch.batch_size
    if mode.is_target_verify():
        rows = requests * config.num_draft_tokens
    elif adapter.is_draft_extend(mode):
        rows = sum(extend_lens_on_host(batch))
    else:
        rows = requests
    return plan_for(mode, requests, rows, config.next_n(requests))
