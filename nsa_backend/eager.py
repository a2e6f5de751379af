"""Metadata of a forward outside CUDA graphs, in memory of its own."""

from __future__ import annotations

import torch

from nsa_backend import host
from nsa_backend.buffers import MetadataBuffers
from nsa_backend.config import BackendConfig
from nsa_backend.extend import extend_metadata, pad_rows
from nsa_backend.kernels.metadata import write_metadata
from nsa_backend.metadata import NSAMetadata, step_metadata
from nsa_backend.modes import is_paged, plan_for
from nsa_backend.plan import MetadataPlan, plan_decode


def eager_metadata(config: BackendConfig, req_to_token: torch.Tensor, batch: host.ForwardBatch) -> NSAMetadata:
    """Metadata of `batch` in its forward mode, decode to prefill."""
    mode = batch.forward_mode
    if is_paged(mode):
        metadata = _paged_metadata(config, req_to_token, batch)
    elif mode.is_extend():
        plan = plan_decode(batch.batch_size)
        buffers = eager_buffers(config, plan, batch, num_sms=0)
        write_batch(config, plan, buffers, req_to_token, batch)
        metadata = extend_metadata(
            step_metadata(plan, buffers),
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            extend_seq_lens=batch.extend_seq_lens,
            extend_seq_lens_cpu=extend_lens_on_host(batch),
            index_topk=config.attention.index_topk,
        )
    else:
        raise ValueError(f"nsa_backend has no metadata for {mode}: it serves prefill, decode, target_verify and draft_extend")
    if batch.global_num_tokens_cpu is None:
        return metadata
    return pad_rows(metadata, host.pad_nsa_cache_seqlens(batch, metadata.nsa_cache_seqlens_int32))


def _paged_metadata(config: BackendConfig, req_to_token: torch.Tensor, batch: host.ForwardBatch) -> NSAMetadata:
    mode, requests = batch.forward_mode, batch.batch_size
    if mode.is_target_verify():
        rows = requests * config.num_draft_tokens
    elif mode.is_draft_extend(include_v2=True):
        rows = sum(extend_lens_on_host(batch))
    else:
        rows = requests
    plan = plan_for(mode, requests, rows)
    buffers = eager_buffers(config, plan, batch, num_sms=config.num_sms)
    write_batch(config, plan, buffers, req_to_token, batch)
    return step_metadata(plan, buffers)


def extend_lens_on_host(batch: host.ForwardBatch) -> list[int]:
    """New tokens of each request; SGLang brings a CPU tensor instead of a list where it padded a DP-attention batch."""
    return [int(length) for length in batch.extend_seq_lens_cpu]


def eager_buffers(config: BackendConfig, plan: MetadataPlan, batch: host.ForwardBatch, *, num_sms: int) -> MetadataBuffers:
    """Buffers for one forward, their tables as wide as its longest request reaches."""
    longest = int(batch.seq_lens_cpu.max()) if batch.batch_size else 1
    width = min(longest + plan.table_offset, config.table_width)
    return MetadataBuffers.allocate(plan, table_width=width, num_sms=num_sms, device=config.device)


def write_batch(
    config: BackendConfig,
    plan: MetadataPlan,
    buffers: MetadataBuffers,
    req_to_token: torch.Tensor,
    batch: host.ForwardBatch,
) -> None:
    """One launch for `batch`, whose tensors SGLang made for this forward."""
    write_metadata(
        plan,
        buffers,
        seq_lens=batch.seq_lens,
        req_pool_indices=batch.req_pool_indices,
        req_to_token=req_to_token,
        index_topk=config.attention.index_topk,
        extend_lens=batch.extend_seq_lens if plan.ragged else None,
    )
