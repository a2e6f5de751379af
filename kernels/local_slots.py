"""A rank's own of the selected KV slots, where ranks divide the KV of every request (decode context parallel).

SGLang widens slots by the number of ranks: slot s lies on rank s modulo that number, in row s divided by it. Index keys lie
whole on every rank, so all ranks select the same slots, and each attends to its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.checks import require


@triton.jit
def slot_of_rank(slot, RANKS: tl.constexpr, RANK: tl.constexpr):
    """Row of a rank's KV cache for a slot; -1 where there is none, or another rank has it."""
    if RANKS == 1:
        return slot
    else:
        wide = slot.to(tl.uint32)  # divides by a power of two in one instruction; -1 is nobody's, whatever its remainder
        return tl.where((slot >= 0) & (wide % RANKS == RANK), (wide // RANKS).to(tl.int32), -1)


@triton.jit
def local_slots_kernel(
    topk_slots_ptr,  # int32 [rows, slots_stride], -1 where there is none
    slots_stride,
    own_ptr,  # int32 [rows, topk]
    counts_ptr,  # int32 [rows]
    topk,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = 0
    for start in range(0, topk, BLOCK):
        column = start + tl.arange(0, BLOCK)
        slot = tl.load(topk_slots_ptr + row * slots_stride + column, mask=column < topk, other=-1)
        own = slot_of_rank(slot, RANKS, RANK)
        found = (own >= 0).to(tl.int32)
        place = count + tl.cumsum(found, 0) - 1
        tl.store(own_ptr + row * topk + place, own, mask=own >= 0)
        count += tl.sum(found, 0)
    tl.store(counts_ptr + row, count)
    for start in range(0, topk, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(own_ptr + row * topk + column, -1, mask=(column >= count) & (column < topk))


def local_slots(topk_slots: torch.Tensor, ranks: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of this rank's KV cache among the selected slots, first in each row and in their order; one launch.

    Args:
        topk_slots: int32 [rows, topk], rows dense; slots of all ranks together, -1 where there is none.
        ranks: among which slots are divided; a power of two.
        rank: this one.

    Returns:
        int32 [rows, topk], -1 behind the last one; and int32 [rows], how many there are.

    Raises:
        ValueError: the tensor has another dtype or layout, or no rank is meant.
    """
    rows, topk = topk_slots.shape
    fits = topk_slots.dtype == torch.int32 and topk_slots.stride(1) == 1
    require(fits, "topk_slots", topk_slots, "int32 with dense rows", "slots would be misread")
    check_rank(ranks, rank)
    own = torch.empty_like(topk_slots, memory_format=torch.contiguous_format)
    counts = torch.empty(rows, dtype=torch.int32, device=topk_slots.device)
    if rows:
        local_slots_kernel[(rows,)](topk_slots, topk_slots.stride(0), own, counts, topk, RANKS=ranks, RANK=rank, BLOCK=1024)
    return own, counts


def check_rank(ranks: int, rank: int) -> None:
    """Raise ValueError unless `rank` is one of a power of two of them."""
    if ranks < 1 or ranks & (ranks - 1) or not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: slots are divided among a power of two of ranks, counted from 0")


def local_slots_torch(topk_slots: torch.Tensor, ranks: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch twin of `local_slots`."""
    mine = (topk_slots >= 0) & (topk_slots % ranks == rank)
    first = torch.argsort((~mine).int(), dim=1, stable=True)
    own = torch.where(mine, topk_slots // ranks, -1).gather(1, first)
    return own, mine.sum(1, dtype=torch.int32)
