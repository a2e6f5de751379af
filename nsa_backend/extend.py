"""Metadata of prefill: a ragged number of new tokens a request, on top of a prefix that may be cached."""

from __future__ import annotations

from dataclasses import replace

import torch

from nsa_backend.metadata import NSAMetadata


def extend_metadata(
    requests: NSAMetadata,
    *,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_seq_lens_cpu: list[int],
    index_topk: int,
) -> NSAMetadata:
    """Expand one row a request into one row a new token; synchronises nothing.

    Token j of request r sits behind its prefix of S_r - a_r tokens and attends to S_r - a_r + j + 1. The indexer's keys are
    gathered request after request, so its window starts at cu_seqlens_k[r].

    Args:
        requests: metadata of the batch with one row a request (lengths S_r, page tables).
        seq_lens: [num_requests], S_r: prefix and new tokens together; `seq_lens_cpu` on the host.
        extend_seq_lens: [num_requests], a_r: new tokens; `extend_seq_lens_cpu` on the host.
        index_topk: tokens the sparse attention keeps.
    """
    rows = sum(extend_seq_lens_cpu)
    device = seq_lens.device
    cu_seqlens_q = _exclusive_sum(extend_seq_lens)
    request = torch.repeat_interleave(
        torch.arange(len(extend_seq_lens_cpu), device=device), extend_seq_lens.long(), output_size=rows
    )
    row = torch.arange(rows, dtype=torch.int32, device=device)
    row_end = cu_seqlens_q[1:][request]
    lens = seq_lens.to(torch.int32)[request] + 1 + row - row_end
    clipped = lens.clamp(max=index_topk)
    k_start = requests.cu_seqlens_k[:-1][request]
    return replace(
        requests,
        cu_seqlens_q=cu_seqlens_q,
        nsa_cache_seqlens_int32=clipped,
        nsa_cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
        nsa_cu_seqlens_k=_exclusive_sum(clipped),
        nsa_seqlens_expanded=lens,
        nsa_extend_seq_lens_list=list(extend_seq_lens_cpu),
        token_to_batch_idx=request.to(torch.int32),
        paged_mqa_schedule_metadata=None,
        max_seq_len_q=max(extend_seq_lens_cpu, default=1),
        max_seq_len_k=int(seq_lens_cpu.max()) if len(seq_lens_cpu) else 0,
        indexer_k_start_end=(k_start, k_start + lens),
        indexer_seq_lens_cpu=seq_lens_cpu,
        indexer_seq_lens=seq_lens,
    )


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
