"""Metadata of a forward outside CUDA graphs, in memory of its own."""

from __future__ import annotations

from nsa_backend import host
from nsa_backend.extend import extend_metadata
from nsa_backend.metadata import NSAMetadata, step_metadata
from nsa_backend.modes import is_paged, plan_for
from nsa_backend.plan import MetadataPlan, plan_decode
from nsa_backend.writer import MetadataWriter


def eager_metadata(writer: MetadataWriter, batch: host.ForwardBatch) -> NSAMetadata:
    """Metadata of `batch` in its forward mode, decode to prefill."""
    mode = batch.forward_mode
    if is_paged(mode):
        plan = _paged_plan(batch, writer.config.num_draft_tokens)
        return step_metadata(plan, writer.write_eager(plan, batch))
    if mode.is_extend():
        plan = plan_decode(batch.batch_size)
        return extend_metadata(
            step_metadata(plan, writer.write_eager(plan, batch, scheduled=False)),
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            extend_seq_lens=batch.extend_seq_lens,
            extend_seq_lens_cpu=extend_lens_on_host(batch),
            index_topk=writer.config.attention.index_topk,
        )
    raise ValueError(f"nsa_backend has no metadata for {mode}: it serves prefill, decode, target_verify and draft_extend")


def _paged_plan(batch: host.ForwardBatch, num_draft_tokens: int) -> MetadataPlan:
    mode, requests = batch.forward_mode, batch.batch_size
    if mode.is_target_verify():
        rows = requests * num_draft_tokens
    elif host.is_draft_extend(mode):
        rows = sum(extend_lens_on_host(batch))
    else:
        rows = requests
    return plan_for(mode, requests, rows)


def extend_lens_on_host(batch: host.ForwardBatch) -> list[int]:
    """New tokens of each request; SGLang brings a CPU tensor instead of a list where it padded a DP-attention batch."""
    return [int(length) for length in batch.extend_seq_lens_cpu]
