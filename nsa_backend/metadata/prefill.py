"""Metadata of prefill, from one launch: a ragged number of new tokens a request, on top of a prefix that may be cached."""

from __future__ import annotations

from itertools import accumulate, pairwise

from nsa_backend.adapters import sglang_types
from nsa_backend.kernels.prefill_fields import rows_before
from nsa_backend.metadata.views import NSAMetadata
from nsa_backend.metadata.writer import MetadataWriter


def prefill_metadata(
    writer: MetadataWriter, batch: sglang_types.ForwardBatch, *, dense: bool, rows: slice | None = None
) -> NSAMetadata:
    """Metadata of a prefill; synchronises nothing.

    Args:
        writer: of the backend.
        batch: SGLang's, with lengths on the host too.
        dense: whether attention will be dense, which needs no top-k.
        rows: those that this rank computes, as `PrefillFields.of_rows` takes them; all where None. Keys are of all requests.
    """
    config = writer.config
    on_fp8 = config.attention.fp8
    extend_lens = extend_lens_on_host(batch)
    # SGLang's dense path reads the flattened slots too.
    flattened = on_fp8 and any(batch.extend_prefix_lens_cpu)
    fields = writer.write_prefill(batch, num_rows=sum(extend_lens), flattened=flattened)
    if rows is not None:
        fields, extend_lens = fields.of_rows(rows), rows_of_requests(extend_lens, rows)
    ragged_kv = config.dequantised_prefill and not dense
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


def rows_of_requests(extend_lens: list[int], rows: slice) -> list[int]:
    """How many of `rows` each request has."""
    ends = (rows_before(end, rows) for end in accumulate(extend_lens, initial=0))
    return [end - begin for begin, end in pairwise(ends)]


def extend_lens_on_host(batch: sglang_types.ForwardBatch) -> list[int]:
    """New tokens of each request; SGLang brings a CPU tensor instead of a list where it padded a DP-attention batch."""
    return [int(length) for length in batch.extend_seq_lens_cpu]
