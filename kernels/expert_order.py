"""Before the first product of experts, one launch: rows in blocks by expert, and hidden states quantised.

SGLang has two or three small launches there, one after the other. Each program of an expert counts the choices of all of them,
which costs less than a launch that tells the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import blocks, power_of_two
from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.dependent_launch import early, wait_for_kernel_ahead
from nsa_backend.kernels.layer_front_steps import GROUP as GROUP_OF_KERNEL
from nsa_backend.kernels.layer_front_steps import quantised
from nsa_backend.kernels.layer_front_weights import GROUP

CHUNK = 512
"""Choices that a program reads at once."""
MOST_CHOICES = 9 * 1024
"""Of all tokens: beyond, every expert's program reads too many."""
GROUPS = 8
"""That a program quantises."""
FEWEST_BINS = 64


class Order(NamedTuple):
    """Rows of experts in blocks, as SGLang's products read them, and their input."""

    values: torch.Tensor  # float8_e4m3fn [tokens, hidden]
    scales: torch.Tensor  # float32 [tokens, hidden / GROUP]
    sorted_ids: torch.Tensor  # int32 [most rows], choices by expert; their number in padding, anything behind the last block
    expert_ids: torch.Tensor  # int32 [most blocks], -1 of another GPU, whose blocks come first; anything behind the last one
    padded: torch.Tensor  # int32 [1], rows of all blocks
    counters: torch.Tensor  # int32 [1 + most blocks * counters], zeros: one of all, those of each; anything behind the last


@triton.jit
def bins_of(chosen_ptr, start, choices, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """(places, bins) of some choices: an expert's is one more than the expert, and behind the last choice it is the last."""
    at = start + tl.arange(0, CHUNK)
    return at, tl.load(chosen_ptr + at, at < choices, BINS - 2) + 1


@triton.jit(do_not_specialize=["choices"])
def order_kernel(
    x_ptr,  # bfloat16 [tokens, hidden]
    chosen_ptr,  # int32 [choices], experts, -1 where it is another GPU's
    values_ptr,  # FP8 [tokens, hidden]
    scales_ptr,  # float32 [tokens, hidden / GROUP]
    sorted_ptr,  # int32 [most rows]
    expert_ptr,  # int32 [most blocks]
    padded_ptr,  # int32 [1]
    counters_ptr,  # int32 [1 + most blocks * COUNTERS]
    choices,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,  # rows
    COUNTERS: tl.constexpr,  # of a block
    OTHERS: tl.constexpr,  # whether choices of other GPUs' experts have rows
    BINS: tl.constexpr,  # at least EXPERTS + 2
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program: the choices of other GPUs' experts, those of an expert, or GROUPS groups of x. All tensors contiguous."""
    wait_for_kernel_ahead(COMPILED)
    program = tl.program_id(0)
    if program <= EXPERTS:
        bins, counts = tl.arange(0, BINS), tl.zeros([BINS], tl.int32)
        for start in range(0, choices, CHUNK):
            _, bin_of = bins_of(chosen_ptr, start, choices, BINS, CHUNK)
            counts += tl.histogram(bin_of, BINS)
        if not OTHERS:
            counts = tl.where(bins == 0, 0, counts)
        taken = (counts + BLOCK - 1) // BLOCK
        first = tl.sum(tl.where(bins < program, taken, 0), axis=0)
        count = tl.sum(tl.where(bins == program, counts, 0), axis=0)
        if program == 0:
            tl.store(counters_ptr, 0)
            tl.store(padded_ptr, tl.sum(tl.where(bins <= EXPERTS, taken, 0), axis=0) * BLOCK)
        if count > 0:
            row, last = first * BLOCK, (count + BLOCK - 1) // BLOCK
            before = 0
            for start in range(0, choices, CHUNK):
                at, bin_of = bins_of(chosen_ptr, start, choices, BINS, CHUNK)
                mine = (bin_of == program).to(tl.int32)
                tl.store(sorted_ptr + row + before + tl.cumsum(mine, axis=0) - 1, at, mine > 0)
                before += tl.sum(mine, axis=0)
            behind = count + tl.arange(0, BLOCK)
            tl.store(sorted_ptr + row + behind, tl.zeros([BLOCK], tl.int32) + choices, behind < last * BLOCK)
            for one in range(0, last):
                tl.store(expert_ptr + first + one, program - 1)
                of_block = counters_ptr + 1 + (first + one) * COUNTERS
                tl.store(of_block + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))
    else:
        group = (program - EXPERTS - 1) * GROUPS + tl.arange(0, GROUPS)[:, None]
        at = group * GROUP_OF_KERNEL + tl.arange(0, GROUP_OF_KERNEL)[None, :]
        values, scale = quantised(tl.load(x_ptr + at).to(tl.float32), False, COMPILED)
        tl.store(values_ptr + at, values)
        tl.store(scales_ptr + group, scale)


def check_blocks(rows: int, block: int, sorted_ids: torch.Tensor, expert_ids: torch.Tensor) -> None:
    """Refuse an order of rows in blocks, as `Order` has it, that is shorter than so many rows."""
    check_tensor("sorted_ids", sorted_ids, torch.int32, (len(sorted_ids),))
    require(len(sorted_ids) >= rows, "sorted_ids", sorted_ids, f"of at least {rows} rows", "others would be read behind it")
    least = blocks(rows, block)
    require(len(expert_ids) >= least, "expert_ids", expert_ids, f"of at least {least} blocks", "every row is of one")


def most_rows(choices: int, experts: int, block: int) -> int:
    """Rows that SGLang has room for."""
    rows = choices * block if choices < experts + 1 else choices + (experts + 1) * (block - 1)
    return blocks(rows, 4) * 4


def problem(tokens: int, choices: int, hidden: int) -> str | None:
    """Why so many choices of each token, of hidden states of this width, cannot have the launch, or None."""
    if tokens * choices > MOST_CHOICES or hidden % (GROUPS * GROUP):
        served = f"at most {MOST_CHOICES} and multiples of {GROUPS * GROUP} are served"
        return f"{tokens * choices} choices on hidden states of {hidden}: {served}"
    return None


def order(x: torch.Tensor, chosen: torch.Tensor, block: int, experts: int, counters: int = 1, *, others: bool = True) -> Order:
    """Rows of all choices in blocks by expert, and what experts multiply; one launch.

    Args:
        x: bfloat16 [tokens, hidden].
        chosen: int32 [tokens, choices], below `experts`; -1 is one of another GPU.
        block: rows of each, a power of two.
        experts: of this GPU.
        counters: of each block, a power of two.
        others: whether choices of another GPU's experts have rows.

    Returns:
        Exact scales; an expert's rows are in the order of choices.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
    """
    (tokens, hidden), choices = x.shape, chosen.numel()
    if (why := problem(tokens, chosen.shape[1], hidden)) is not None:
        raise ValueError(why)
    check_tensor("x", x, torch.bfloat16, (tokens, hidden))
    check_tensor("chosen", chosen, torch.int32, (tokens, chosen.shape[1]))
    require(choices > 0, "chosen", chosen, "of a choice or more", "no launch would tell that there are no rows")
    if block != power_of_two(block) or counters != power_of_two(counters):
        raise ValueError(f"blocks of {block} rows with {counters} counters: powers of two are served")
    rows = most_rows(choices, experts, block)

    def room(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    found = Order(
        room(torch.float8_e4m3fn, tokens, hidden), room(torch.float32, tokens, hidden // GROUP), room(torch.int32, rows),
        room(torch.int32, blocks(rows, block)), room(torch.int32, 1),
        room(torch.int32, 1 + blocks(rows, block) * counters),
    )  # fmt: skip
    order_kernel[(experts + 1 + tokens * hidden // (GROUPS * GROUP),)](
        x, chosen, *found, choices, EXPERTS=experts, BLOCK=block, COUNTERS=counters, OTHERS=others,
        BINS=max(FEWEST_BINS, power_of_two(experts + 2)), CHUNK=CHUNK, GROUPS=GROUPS, COMPILED=x.is_cuda, num_warps=4,
        **early(x.is_cuda),
    )  # fmt: skip
    return found
