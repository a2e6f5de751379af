"""Prefill on an FP8 KV cache by kernels that read bfloat16: the KV of the batch, dequantised into one ragged tensor.

Row cu_seqlens_k[r] + c of that tensor is token c of request r. Pointing page_table_1 at those rows instead of slots makes the
top-k transform select rows of it, so nothing else has to know.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nsa_backend import host
from nsa_backend.config import BackendConfig
from nsa_backend.metadata import NSAMetadata


def fp8_prefill_metadata(config: BackendConfig, metadata: NSAMetadata, batch: host.ForwardBatch, *, dense: bool) -> NSAMetadata:
    """What prefill on an FP8 KV cache needs beyond the metadata of a bfloat16 one."""
    if any(batch.extend_prefix_lens_cpu):
        metadata = with_flattened_slots(metadata)
    if not dense and config.prefill_impl == "flashmla_sparse":
        metadata = with_ragged_table(metadata)
    return metadata


def with_flattened_slots(metadata: NSAMetadata) -> NSAMetadata:
    """Add `page_table_1_flattened`, the slots of all tokens in ragged order; SGLang's dense path reads it too."""
    lengths = metadata.indexer_seq_lens
    total = int(metadata.indexer_seq_lens_cpu.sum())
    request = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths.long(), output_size=total)
    column = torch.arange(total, device=lengths.device) - metadata.cu_seqlens_k[:-1][request]
    return replace(metadata, page_table_1_flattened=metadata.page_table_1[request, column])


def with_ragged_table(metadata: NSAMetadata) -> NSAMetadata:
    """Point page_table_1 at rows of the ragged KV tensor."""
    columns = torch.arange(metadata.page_table_1.shape[1], dtype=torch.int32, device=metadata.page_table_1.device)
    return replace(metadata, page_table_1=metadata.cu_seqlens_k[:-1, None] + columns, ragged_kv=True)


def ragged_kv(kv_cache: torch.Tensor, metadata: NSAMetadata, k: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """The batch's KV in bfloat16, [sum of lengths, 1, latent + rope].

    Without a cached prefix the new tokens are all there is, and their exact values are at hand.
    """
    if metadata.page_table_1_flattened is None:
        return torch.cat([k, k_rope], dim=-1)
    return host.dequantize_k_cache_paged(kv_cache, metadata.page_table_1_flattened)
