"""KV slots of the indexer's top-k token positions: the unfused half of the top-k transform."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.checks import INDEX_DTYPES, check_device, check_tensor, require


# SGLang's indexer cuts a long prefill into chunks that begin at any row: their requests lie at any address.
@triton.jit(do_not_specialize=["page_table_stride", "token_to_batch_idx_ptr"])
def topk_slots_kernel(
    topk_indices_ptr,  # int32 | int64 [rows, topk], contiguous
    page_table_ptr,  # int32 [num_requests, page_table_stride]
    page_table_stride,
    token_to_batch_idx_ptr,  # int32 | int64 [rows], contiguous
    slots_ptr,  # int32 [rows, topk], contiguous
    topk,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(token_to_batch_idx_ptr + row).to(tl.int64)
    table_ptr = page_table_ptr + request * page_table_stride
    for start in range(0, topk, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < topk
        position = tl.load(topk_indices_ptr + row * topk + column, mask=mask, other=-1)
        # Of a number without a sign a power of two divides in one instruction.
        place = position.to(tl.uint32)
        page = tl.load(table_ptr + place // PAGE, mask=mask & (position >= 0), other=0)
        slot = tl.where(position >= 0, page * PAGE + (place % PAGE).to(tl.int32), -1)
        tl.store(slots_ptr + row * topk + column, slot, mask=mask)


def topk_slots(
    topk_indices: torch.Tensor,
    page_table: torch.Tensor,
    token_to_batch_idx: torch.Tensor,
    page_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """KV slot of every selected token.

    Args:
        topk_indices: int32 or int64 [rows, topk], positions in the row's request, -1 where there is none.
        page_table: int32 [num_requests, width], rows contiguous; page of every `page_size` tokens.
        token_to_batch_idx: int32 or int64 [at least rows], contiguous, request of each row.
        page_size: tokens of a page, a power of two.
        out: int32 [rows, topk], contiguous; a new tensor where None.

    Returns:
        `out`; -1 where the position is -1.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit; says what would be read wrong.
    """
    rows, topk = topk_indices.shape
    fits = token_to_batch_idx.shape[0] >= rows and token_to_batch_idx.dim() == 1 and token_to_batch_idx.is_contiguous()
    form, consequence = f"contiguous int32 or int64 [at least {rows}]", "rows would attend to another request's tokens"
    require(fits and token_to_batch_idx.dtype in INDEX_DTYPES, "token_to_batch_idx", token_to_batch_idx, form, consequence)
    require(topk_indices.dtype in INDEX_DTYPES, "topk_indices", topk_indices, "int32 or int64", "positions would be misread")
    for name, tensor in (("page_table", page_table), ("token_to_batch_idx", token_to_batch_idx)):
        check_device(name, tensor, "topk_indices", topk_indices.device)
    fits = page_table.stride(1) == 1 and page_table.dtype == torch.int32
    require(fits, "page_table", page_table, "int32 with contiguous rows", "slots would be read from the wrong columns")
    topk_indices = topk_indices.contiguous()
    slots = torch.empty_like(topk_indices, dtype=torch.int32) if out is None else out
    check_tensor("out", slots, torch.int32, (rows, topk))
    if rows:
        topk_slots_kernel[(rows,)](
            topk_indices, page_table, page_table.stride(0), token_to_batch_idx, slots, topk, PAGE=page_size, BLOCK=1024
        )
    return slots


def topk_slots_torch(
    topk_indices: torch.Tensor, page_table: torch.Tensor, token_to_batch_idx: torch.Tensor, page_size: int
) -> torch.Tensor:
    """The torch twin of `topk_slots`."""
    rows = page_table[token_to_batch_idx[: topk_indices.shape[0]].long()]
    position = topk_indices.clamp(min=0).long()
    slots = torch.gather(rows, 1, position // page_size) * page_size + position % page_size
    return torch.where(topk_indices < 0, -1, slots).to(torch.int32)
