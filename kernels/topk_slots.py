"""Turn the indexer's top-k token positions into KV slots: the unfused half of the top-k transform."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INDEX_DTYPES = (torch.int32, torch.int64)


@triton.jit
def topk_slots_kernel(
    topk_indices_ptr,  # int32 or int64 [rows, topk], contiguous
    page_table_1_ptr,  # int32 [num_requests, page_table_1_stride]
    page_table_1_stride,
    token_to_batch_idx_ptr,  # int32 or int64 [rows], contiguous
    slots_ptr,  # int32 [rows, topk], contiguous
    topk,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(token_to_batch_idx_ptr + row).to(tl.int64)
    for start in range(0, topk, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < topk
        position = tl.load(topk_indices_ptr + row * topk + column, mask=mask, other=-1)
        slot = tl.load(page_table_1_ptr + request * page_table_1_stride + position, mask=mask & (position >= 0), other=-1)
        tl.store(slots_ptr + row * topk + column, slot, mask=mask)


def topk_slots(topk_indices: torch.Tensor, page_table_1: torch.Tensor, token_to_batch_idx: torch.Tensor) -> torch.Tensor:
    """KV slot of every selected token.

    Args:
        topk_indices: int32 or int64 [rows, topk], positions in the row's request, -1 where there is none.
        page_table_1: int32 [num_requests, width], rows contiguous; slot of every token.
        token_to_batch_idx: int32 or int64 [at least rows], contiguous, request of each row.

    Returns:
        int32 [rows, topk]; -1 where the position is -1.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit; says what would be read wrong.
    """
    rows, topk = topk_indices.shape
    if token_to_batch_idx.shape[0] < rows:
        raise ValueError(
            f"token_to_batch_idx has {token_to_batch_idx.shape[0]} rows and topk_indices {rows}: "
            "the last rows would attend to another request's tokens"
        )
    if token_to_batch_idx.dim() != 1 or not token_to_batch_idx.is_contiguous() or token_to_batch_idx.dtype not in INDEX_DTYPES:
        raise ValueError(
            f"token_to_batch_idx must be contiguous int32 or int64 [rows], got {token_to_batch_idx.dtype} "
            f"{tuple(token_to_batch_idx.shape)} with strides {token_to_batch_idx.stride()}: rows would attend to another "
            "request's tokens"
        )
    if topk_indices.dtype not in INDEX_DTYPES:
        raise ValueError(f"topk_indices must be int32 or int64, got {topk_indices.dtype}: positions would be misread")
    for name, tensor in (("page_table_1", page_table_1), ("token_to_batch_idx", token_to_batch_idx)):
        if tensor.device != topk_indices.device:
            raise ValueError(f"{name} is on {tensor.device} and topk_indices on {topk_indices.device}: slots would be garbage")
    if page_table_1.stride(1) != 1 or page_table_1.dtype != torch.int32:
        raise ValueError(
            f"page_table_1 must be int32 with contiguous rows, got {page_table_1.dtype} with strides "
            f"{page_table_1.stride()}: slots would be read from the wrong columns"
        )
    topk_indices = topk_indices.contiguous()
    slots = torch.empty_like(topk_indices, dtype=torch.int32)
    if rows:
        topk_slots_kernel[(rows,)](
            topk_indices, page_table_1, page_table_1.stride(0), token_to_batch_idx, slots, topk, BLOCK=1024
        )
    return slots


def topk_slots_torch(topk_indices: torch.Tensor, page_table_1: torch.Tensor, token_to_batch_idx: torch.Tensor) -> torch.Tensor:
    """The torch twin of `topk_slots`."""
    rows = page_table_1[token_to_batch_idx[: topk_indices.shape[0]].long()]
    slots = torch.gather(rows, 1, topk_indices.clamp(min=0).long())
    return torch.where(topk_indices < 0, -1, slots).to(torch.int32)
