"""Metadata of prefill, from one launch: a ragged number of new tokens a request, on top of a prefix that may be cached.

Prefill on an FP8 KV cache by a kernel that reads bfloat16 dequantises the KV of the batch into one ragged tensor, request after
request. Its top-k then counts rows of that tensor, which begin at cu_seqlens_k of the request, instead of KV slots.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nsa_backend import host
from nsa_backend.metadata import NSAMetadata
from nsa_backend.writer import MetadataWriter


def extend_metadata(writer: MetadataWriter, batch: host.ForwardBatch, *, dense: bool) -> NSAMetadata:
    """Metadata of a prefill; synchronises nothing.

    Args:
        writer: of the backend.
        batch: SGLang's, with lengths on the host too.
        dense: whether attention will be dense, which needs no top-k.
    """
    config = writer.config
    on_fp8 = config.attention.kv_cache_dtype == torch.float8_e4m3fn
    extend_lens = extend_lens_on_host(batch)
    # SGLang's dense path reads the flattened slots too.
    flattened = on_fp8 and any(batch.extend_prefix_lens_cpu)
    fields = writer.write_prefill(batch, num_rows=sum(extend_lens), flattened=flattened)
    ragged_kv = on_fp8 and not dense and config.prefill_impl == "flashmla_sparse"
    return NSAMetadata(
        cache_seqlens_int32=fields.cache_seqlens,
        cu_seqlens_q=fields.cu_seqlens_q,
        cu_seqlens_k=fields.cu_seqlens_k,
        page_table_1=None,
        real_page_table=fields.real_page_table,
        nsa_cache_seqlens_int32=fields.nsa_cache_seqlens,
        nsa_cu_seqlens_q=fields.nsa_cu_seqlens_q,
        nsa_cu_seqlens_k=fields.nsa_cu_seqlens_k,
        nsa_seqlens_expanded=fields.seqlens_expanded,
        nsa_extend_seq_lens_list=extend_lens,
        token_to_batch_idx=fields.token_to_batch_idx,
        table_rows=fields.token_to_batch_idx,
        max_seq_len_q=max(extend_lens, default=1),
        max_seq_len_k=int(batch.seq_lens_cpu.max()) if len(extend_lens) else 0,
        indexer_k_start_end=(fields.k_start, fields.k_end),
        indexer_seq_lens_cpu=batch.seq_lens_cpu,
        indexer_seq_lens=batch.seq_lens,
        page_table_1_flattened=fields.flattened_slots,
        topk_indices_offset=fields.k_start if ragged_kv else None,
    )


def extend_lens_on_host(batch: host.ForwardBatch) -> list[int]:
    """New tokens of each request; SGLang brings a CPU tensor instead of a list where it padded a DP-attention batch."""
    return [int(length) for length in batch.extend_seq_lens_cpu]


def ragged_kv(kv_cache: torch.Tensor, metadata: NSAMetadata, k: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """The batch's KV in bfloat16, [sum of lengths, 1, latent + rope].

    Without a cached prefix the new tokens are all there is, and their exact values are at hand.
    """
    if metadata.page_table_1_flattened is None:
        return torch.cat([k, k_rope], dim=-1)
    return host.dequantize_k_cache_paged(kv_cache, metadata.page_table_1_flattened)


def pad_query_rows(metadata: NSAMetadata, num_rows: int) -> NSAMetadata:
    """Follow SGLang's padding of query rows: rows of length 0 are appended to what attention reads.

    What the indexer reads stays as it is: SGLang cuts the padding off for it, by the sum of `nsa_extend_seq_lens_list`, and
    fills the chosen slots of padding rows with -1 itself.
    """
    lens = metadata.nsa_cache_seqlens_int32
    padded = torch.cat([lens, lens.new_zeros(num_rows - lens.shape[0])])
    return replace(
        metadata,
        nsa_cache_seqlens_int32=padded,
        nsa_cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32, device=padded.device),
        nsa_cu_seqlens_k=_exclusive_sum(padded),
    )


def _exclusive_sum(values: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(values.shape[0] + 1, dtype=torch.int32, device=values.device)
    torch.cumsum(values, 0, dtype=torch.int32, out=out[1:])
    return out
