"""The metadata of one forward, as the indexer and the attention implementations read it: views into buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.plan import MetadataPlan
from nsa_backend.kernels.prefix_sums import exclusive_sum


@dataclass(frozen=True)
class FlashMlaTiles:
    """FlashMLA's own schedule of one forward."""

    tile_scheduler_metadata: torch.Tensor  # int32 [num_sm_parts, 8]
    num_splits: torch.Tensor  # int32 [rows + 1]


@dataclass(frozen=True)
class NSAMetadata:
    """Views of one step, by SGLang's names: those that begin with nsa_ are of rows, the other lengths and sums of requests.

    `rows` are query tokens; a decode row is a request.
    """

    cache_seqlens_int32: torch.Tensor  # int32 [requests], tokens of each request in the KV cache after this forward
    cu_seqlens_q: torch.Tensor  # int32 [requests + 1], rows before each request
    cu_seqlens_k: torch.Tensor  # int32 [requests + 1], exclusive prefix sum of cache_seqlens_int32
    page_table_1: torch.Tensor | None  # int32 [requests, width], slot of every token; None where nothing reads it
    real_page_table: torch.Tensor  # int32 [rows, pages] in paged modes, [requests, pages] in prefill
    nsa_cache_seqlens_int32: torch.Tensor  # int32 [rows], min(len, index_topk)
    nsa_cu_seqlens_q: torch.Tensor  # int32 [rows + 1], 0, 1, 2, ...
    nsa_cu_seqlens_k: torch.Tensor  # int32 [rows + 1], exclusive prefix sum of nsa_cache_seqlens_int32
    nsa_seqlens_expanded: torch.Tensor  # int32 [rows], len of each row
    nsa_extend_seq_lens_list: list[int]  # (of requests) rows of each, on the host; their sum is the number of rows
    token_to_batch_idx: torch.Tensor  # int32 [rows], request of each row
    table_rows: torch.Tensor  # int32 [rows], row of real_page_table of each row
    paged_mqa_schedule_metadata: torch.Tensor | None = None  # int32 [num_sms + 1, 2], DeepGEMM's schedule of rows
    next_n: int = 1  # rows of a request that the schedule, and so DeepGEMM's logits, take together
    topk_plan: torch.Tensor | None = None  # int32 [rows + 1, 2], work list of SGLang's top-k v2 kernel
    rows_per_request: int = 1  # consecutive rows of one request; 1 in prefill and where rows are ragged
    max_seq_len_q: int = 1  # prefill only: most rows of a request
    max_seq_len_k: int = 0  # prefill only: longest request
    indexer_k_start_end: tuple[torch.Tensor, torch.Tensor] | None = None  # prefill only: int32 [rows] each
    indexer_seq_lens_cpu: torch.Tensor | None = None  # prefill only: [requests], on the host
    indexer_seq_lens: torch.Tensor | None = None  # prefill only: [requests]
    page_table_1_flattened: torch.Tensor | None = None  # prefill on FP8 KV with a prefix: int32 [sum of lengths], slots
    topk_indices_offset: torch.Tensor | None = None  # prefill on dequantised KV: int32 [rows], where the row's request begins
    schedule: FlashMlaTiles | torch.Tensor | None = None  # what the implementation's `prepare` made, for itself alone


def step_metadata(plan: MetadataPlan, buffers: MetadataBuffers, step: int = 0) -> NSAMetadata:
    """Views of draft step `step` (0 in every other mode) for `plan`."""
    requests, rows = plan.num_requests, plan.num_rows
    # Of ragged rows only the sum is asked for, and how they are packed is known on the GPU alone.
    extend_lens = [rows] if plan.ragged else [plan.rows_per_request] * requests
    return NSAMetadata(
        cache_seqlens_int32=buffers.cache_seqlens[step, :requests],
        cu_seqlens_q=buffers.cu_seqlens_q[: requests + 1],
        cu_seqlens_k=buffers.cu_seqlens_k[step, : requests + 1],
        page_table_1=None if buffers.page_table_1 is None else buffers.page_table_1[:requests],
        real_page_table=buffers.real_page_table[:rows],
        nsa_cache_seqlens_int32=buffers.nsa_cache_seqlens[step, :rows],
        nsa_cu_seqlens_q=buffers.arange[: rows + 1],
        nsa_cu_seqlens_k=buffers.nsa_cu_seqlens_k[step, : rows + 1],
        nsa_seqlens_expanded=buffers.seqlens_expanded[step, :rows],
        nsa_extend_seq_lens_list=extend_lens,
        token_to_batch_idx=buffers.token_to_batch_idx[:rows],
        paged_mqa_schedule_metadata=None if buffers.schedule is None else buffers.schedule[step],
        table_rows=buffers.arange[:rows],
        next_n=plan.next_n,
        rows_per_request=plan.rows_per_request or 1,
        topk_plan=None if buffers.topk_plan is None else buffers.topk_plan[step, : rows + 1],
    )


Rows = slice | torch.Tensor
"""Some rows of a forward: every step-th between two, or int64 [number of rows], in order."""


def rows_of(metadata: NSAMetadata, rows: Rows) -> NSAMetadata:
    """What the indexer reads of some rows of a prefill. What attention reads stays that of all."""
    start, end = metadata.indexer_k_start_end
    offset = metadata.topk_indices_offset
    return replace(
        metadata,
        nsa_seqlens_expanded=metadata.nsa_seqlens_expanded[rows].contiguous(),
        token_to_batch_idx=metadata.token_to_batch_idx[rows].contiguous(),
        table_rows=metadata.table_rows[rows].contiguous(),
        indexer_k_start_end=(start[rows].contiguous(), end[rows].contiguous()),
        topk_indices_offset=None if offset is None else offset[rows].contiguous(),
    )


def with_padding_rows(metadata: NSAMetadata, num_rows: int) -> NSAMetadata:
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
        nsa_cu_seqlens_k=exclusive_sum(padded),
    )
