"""Metadata of a forward outside CUDA graphs, in memory of its own."""

from __future__ import annotations

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.config import BackendConfig
from nsa_backend.kernels.plan import MetadataPlan
from nsa_backend.metadata.modes import is_paged, plan_for
from nsa_backend.metadata.prefill import extend_lens_on_host, prefill_metadata
from nsa_backend.metadata.views import NSAMetadata, step_metadata
from nsa_backend.metadata.writer import MetadataWriter


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
    return plan_for(mode, requests, rows, config.next_n)
