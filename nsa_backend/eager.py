"""Metadata of a forward outside CUDA graphs, in memory of its own."""

from __future__ import annotations

from nsa_backend import host
from nsa_backend.extend import extend_lens_on_host, extend_metadata, pad_rows
from nsa_backend.metadata import NSAMetadata, step_metadata
from nsa_backend.modes import is_paged, plan_for
from nsa_backend.plan import MetadataPlan
from nsa_backend.writer import MetadataWriter


def eager_metadata(writer: MetadataWriter, batch: host.ForwardBatch, *, dense: bool) -> NSAMetadata:
    """Metadata of `batch` in its forward mode, decode to prefill; `dense` says how a prefill will attend."""
    mode = batch.forward_mode
    if is_paged(mode):
        plan = _paged_plan(batch, writer.config.num_draft_tokens)
        metadata = step_metadata(plan, writer.write_eager(plan, batch))
    elif mode.is_extend():
        metadata = extend_metadata(writer, batch, dense=dense)
    else:
        raise ValueError(f"nsa_backend has no metadata for {mode}: it serves prefill, decode, target_verify and draft_extend")
    if batch.global_num_tokens_cpu is None:
        return metadata
    return pad_rows(metadata, host.pad_cache_seqlens(batch, metadata.nsa_cache_seqlens_int32))


def _paged_plan(batch: host.ForwardBatch, num_draft_tokens: int) -> MetadataPlan:
    mode, requests = batch.forward_mode, batch.batch_size
    if mode.is_target_verify():
        rows = requests * num_draft_tokens
    elif host.is_draft_extend(mode):
        rows = sum(extend_lens_on_host(batch))
    else:
        rows = requests
    return plan_for(mode, requests, rows)
