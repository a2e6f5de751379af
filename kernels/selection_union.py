"""The different KV slots that the rows of one request chose, each with the rows that chose it, made once a layer.

Rows of target_verify and draft_extend follow each other, so they choose nearly the same tokens. A slot is listed once, in the
list of its part: PARTS programs a request take a part each, so that none waits for another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa_backend.kernels.blocks import blocks, power_of_two
from nsa_backend.kernels.checks import require

PARTS = 4
"""Lists of a request; slot s is in list (s // SLOTS_OF_A_WORD) % PARTS, so neighbours spread evenly."""

SLOTS_OF_A_WORD = 4
"""Slots whose marks share 32 bits, eight for each."""

MAX_ROWS_PER_REQUEST = 8
"""A bit of a slot's mark each."""

NUM_WARPS = 32


@dataclass(frozen=True)
class SelectionUnion:
    """Storage for the unions of up to `max_requests` requests. Lists are in the order of rows, then of a row's entries."""

    slots: torch.Tensor  # int32 [max_requests, PARTS, rows_per_request * topk], each chosen slot once
    rows: torch.Tensor  # uint8, of the same shape; bit j where row j of the request chose the slot
    counts: torch.Tensor  # int32 [max_requests, PARTS], entries of each list

    @classmethod
    def allocate(cls, max_requests: int, rows_per_request: int, topk: int, device: torch.device | str) -> SelectionUnion:
        shape = (max_requests, PARTS, rows_per_request * topk)
        return cls(
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(shape, dtype=torch.uint8, device=device),
            torch.empty(shape[:2], dtype=torch.int32, device=device),
        )


def marks_width(num_slots: int) -> int:
    """int32 words of one request's marks over so many KV slots."""
    return blocks(num_slots, SLOTS_OF_A_WORD)


@triton.jit(do_not_specialize=["slots_ptr", "lens_ptr", "slots_stride", "marks_stride", "topk"])
def selection_union_kernel(
    slots_ptr,  # int32 [requests * ROWS, slots_stride], -1 where there is none
    lens_ptr,  # int32 [requests * ROWS], entries of each row to look at
    marks_ptr,  # int32 [requests, marks_stride], zeros before and after
    union_ptr,  # int32 [requests, PARTS, ROWS * topk]
    rows_ptr,  # uint8 [requests, PARTS, ROWS * topk]
    counts_ptr,  # int32 [requests, PARTS]
    slots_stride,
    marks_stride,
    topk,
    ROWS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OF_A_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """One part of one request: mark what its rows chose, list what no earlier row did, and clear the marks."""
    if COMPILED:
        gdc_launch_dependents()  # to the attention alone, which waits before all else
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    j = tl.arange(0, ROWS_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    row = request * ROWS + j
    length = tl.minimum(tl.load(lens_ptr + row, mask=j < ROWS, other=0), topk)
    slot = tl.load(slots_ptr + row * slots_stride + column, mask=column < length, other=-1)
    word = slot // OF_A_WORD
    chosen = (slot >= 0) & (word % PARTS == part)
    shift = (slot % OF_A_WORD) * (32 // OF_A_WORD)
    bit = 1 << j
    mark = marks_ptr + request * marks_stride + word
    before = tl.atomic_or(mark, bit << shift, mask=chosen, sem="relaxed")
    first_in_row = ((before >> shift) & bit) == 0
    tl.debug_barrier()
    # What other threads marked is in the L2 cache, and an older value perhaps in L1.
    rows = tl.load(mark, mask=chosen, other=0, cache_modifier=".cg") >> shift
    listed = chosen & first_in_row & ((rows & (bit - 1)) == 0)
    of_row = tl.sum(listed.to(tl.int32), 1)
    place = (tl.cumsum(of_row, 0) - of_row)[:, None] + tl.cumsum(listed.to(tl.int32), 1) - 1
    begin = (request * PARTS + part) * ROWS * topk
    tl.store(union_ptr + begin + place, slot, mask=listed)
    tl.store(rows_ptr + begin + place, (rows & 255).to(tl.uint8), mask=listed)
    tl.store(counts_ptr + request * PARTS + part, tl.sum(of_row, 0))
    tl.debug_barrier()
    tl.store(mark, tl.zeros_like(slot), mask=chosen)


def write_selection_union(
    topk_slots: torch.Tensor, lens: torch.Tensor, rows_per_request: int, *, marks: torch.Tensor, union: SelectionUnion
) -> None:
    """Write the union of each request's rows into `union`, with one launch.

    Args:
        topk_slots: int32 [requests * rows_per_request, topk], rows dense; in any order, -1 where there is none. A slot that a
            row names twice is chosen once.
        lens: int32 [requests * rows_per_request], entries of each row to look at.
        rows_per_request: at most MAX_ROWS_PER_REQUEST.
        marks: int32 [at least requests, `marks_width` of all slots], zeros, and zeros again after the launch.
        union: of as many rows a request and as long rows; only the first `requests` are written.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    rows, topk = topk_slots.shape
    if not 0 < rows_per_request <= MAX_ROWS_PER_REQUEST or rows % rows_per_request:
        raise ValueError(
            f"{rows} rows are no requests of {rows_per_request} rows, at most {MAX_ROWS_PER_REQUEST}: rows would mix"
        )
    requests = rows // rows_per_request
    fits = {
        "topk_slots": topk_slots.dtype == torch.int32 and topk_slots.stride(-1) == 1,
        "lens": lens.dtype == torch.int32 and lens.shape == (rows,) and lens.is_contiguous(),
        "marks": marks.dtype == torch.int32 and marks.shape[0] >= requests and marks.stride(-1) == 1,
        "union": union.slots.shape[0] >= requests and union.slots.shape[2] == rows_per_request * topk,
    }
    form = f"of {requests} requests of {rows_per_request} rows"
    for name, tensor in zip(fits, (topk_slots, lens, marks, union.slots), strict=True):
        require(fits[name], name, tensor, form, "the kernel would misread it")
    if not requests:
        return
    on_gpu = topk_slots.is_cuda
    selection_union_kernel[(requests, PARTS)](
        topk_slots,
        lens,
        marks,
        union.slots,
        union.rows,
        union.counts,
        topk_slots.stride(0),
        marks.stride(0),
        topk,
        ROWS=rows_per_request,
        ROWS_BLOCK=power_of_two(rows_per_request),
        PARTS=PARTS,
        OF_A_WORD=SLOTS_OF_A_WORD,
        BLOCK=max(power_of_two(topk), 32 * NUM_WARPS),
        COMPILED=on_gpu,
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if on_gpu else {}),
    )


def selection_union_torch(topk_slots: torch.Tensor, lens: torch.Tensor, rows_per_request: int) -> list[dict[int, int]]:
    """The torch twin of `write_selection_union`: for each request, bits of rows by slot."""
    found = []
    for request in range(topk_slots.shape[0] // rows_per_request):
        rows_of: dict[int, int] = {}
        for j in range(rows_per_request):
            row = request * rows_per_request + j
            chosen = topk_slots[row, : int(lens[row])]
            for slot in chosen[chosen >= 0].tolist():
                rows_of[slot] = rows_of.get(slot, 0) | 1 << j
        found.append(rows_of)
    return found
