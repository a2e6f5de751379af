"""The second product of experts of many tokens, one launch: a program keeps its rows and walks over columns.

An expert is 256 wide on one of eight ranks. SGLang's Triton kernel gives every 128 columns a program of its own there, which
has two steps to hide all of its loads behind. Here a program loads its rows once, and weights of the next columns come while it
multiplies. A sum has the steps of SGLang's; its last bits may differ, as tensor cores keep some 14 bits of a sum of FP8 values
and SGLang multiplies few rows the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import check_tensor
from nsa_backend.kernels.dependent_launch import early, wait_for_kernel_ahead
from nsa_backend.kernels.expert_order import check_blocks
from nsa_backend.kernels.layer_front_steps import GROUP as GROUP_OF_KERNEL
from nsa_backend.kernels.layer_front_weights import GROUP

WIDTH = 2 * GROUP
"""Of the experts that are served."""


@dataclass(frozen=True)
class Tile:
    """Of a program, but for its rows, which are a block's."""

    columns: int = 64  # that it multiplies at once
    steps: int = 16  # as many columns, one after the other
    warps: int = 4
    stages: int = 3  # of weights, which come ahead


def tile_for(hidden: int) -> Tile:
    """Of experts on hidden states of this width: the fastest that was measured, with fewer steps where those do not fit."""
    return Tile(steps=next(steps for steps in (16, 8, 4, 2) if hidden % (Tile.columns * steps) == 0))


@triton.jit(do_not_specialize=["choices"])
def down_rows_kernel(
    values,  # descriptor of FP8 [rows, 2 * GROUP], in blocks by expert
    scales_ptr,  # float32 [rows, 2]
    second,  # descriptor of FP8 [experts, hidden, 2 * GROUP]
    second_scales_ptr,  # float32 [experts, hidden / GROUP, 2]
    shares_ptr,  # float32 [choices]
    sorted_ptr,  # int32 [rows], choices, or their number and more where a row is padding
    expert_ptr,  # int32 [blocks], each block's expert, -1 where it is another GPU's
    padded_ptr,  # int32 [1], rows of all blocks
    out_ptr,  # bfloat16 [choices, HIDDEN]
    choices,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # rows
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program (part of the columns, block). All tensors contiguous."""
    wait_for_kernel_ahead(COMPILED)
    block, begin = tl.program_id(1), tl.program_id(0) * (STEPS * COLUMNS)
    if block * BLOCK >= tl.load(padded_ptr):
        return
    row = block * BLOCK + tl.arange(0, BLOCK)
    choice = tl.load(sorted_ptr + row)
    there = choice < choices
    out = out_ptr + choice.to(tl.int64)[:, None] * HIDDEN + tl.arange(0, COLUMNS)[None, :]
    expert = tl.load(expert_ptr + block)
    if expert < 0:
        nothing = tl.zeros([BLOCK, COLUMNS], tl.bfloat16)
        for step in range(STEPS):
            tl.store(out + begin + step * COLUMNS, nothing, there[:, None])
        return
    share = tl.load(shares_ptr + choice, there, 0.0)
    low, high = values.load([block * BLOCK, 0]), values.load([block * BLOCK, GROUP_OF_KERNEL])
    low_scale = tl.load(scales_ptr + row * 2, there, 0.0)
    high_scale = tl.load(scales_ptr + row * 2 + 1, there, 0.0)
    of_expert = second_scales_ptr + expert.to(tl.int64) * (HIDDEN // GROUP_OF_KERNEL * 2)
    for step in tl.range(STEPS, num_stages=STAGES):
        column = begin + step * COLUMNS
        of_low = second.load([expert, column, 0]).reshape(COLUMNS, GROUP_OF_KERNEL).T
        of_high = second.load([expert, column, GROUP_OF_KERNEL]).reshape(COLUMNS, GROUP_OF_KERNEL).T
        scale = of_expert + column // GROUP_OF_KERNEL * 2
        sums = tl.dot(low, of_low) * (low_scale[:, None] * tl.load(scale))
        sums += tl.dot(high, of_high) * (high_scale[:, None] * tl.load(scale + 1))
        sums *= share[:, None]
        tl.store(out + column, sums.to(tl.bfloat16), there[:, None])


def problem(hidden: int, width: int) -> str | None:
    """Why experts of this width cannot have the launch, or None."""
    if width != WIDTH or hidden % GROUP:
        return f"experts of {width} on hidden states of {hidden}: {WIDTH} on multiples of {GROUP} are served"
    return None


def check_product(
    values: torch.Tensor,
    scales: torch.Tensor,
    second: torch.Tensor,
    second_scales: torch.Tensor,
    shares: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Refuse what a second product would misread; arguments are those of `down_rows`."""
    (rows, width), (experts, hidden) = values.shape, second.shape[:2]
    check_tensor("values", values, torch.float8_e4m3fn, (rows, width))
    check_tensor("scales", scales, torch.float32, (rows, width // GROUP))
    check_tensor("second", second, torch.float8_e4m3fn, (experts, hidden, width))
    check_tensor("second_scales", second_scales, torch.float32, (experts, hidden // GROUP, width // GROUP))
    check_tensor("shares", shares, torch.float32, tuple(shares.shape))
    check_tensor("out", out, torch.bfloat16, (*shares.shape, hidden))


def down_rows(
    values: torch.Tensor,
    scales: torch.Tensor,
    second: torch.Tensor,
    second_scales: torch.Tensor,
    shares: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded: torch.Tensor,
    block: int,
    out: torch.Tensor,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`out`, with what experts give for each choice of a token, times its share; zeros for an expert of another GPU.

    Args:
        values: float8_e4m3fn [rows, WIDTH], in blocks by expert: what is between both products.
        scales: float32 [rows, WIDTH / GROUP].
        second: float8_e4m3fn [experts, hidden, WIDTH].
        second_scales: float32 [experts, hidden / GROUP, WIDTH / GROUP].
        shares: float32 [tokens, choices].
        sorted_ids: int32, at least [rows]: the choice of each row, the number of choices in padding.
        expert_ids: int32 [blocks], the expert of each block; -1 is one of another GPU.
        padded: int32 [1], rows of all blocks.
        block: rows of each, a power of two.
        out: bfloat16 [tokens, choices, hidden].
        tile: of the programs, whose columns divide `hidden`; `tile_for` if None.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
    """
    (rows, width), hidden = values.shape, second.shape[1]
    if (why := problem(hidden, width)) is not None:
        raise ValueError(why)
    tile = tile or tile_for(hidden)
    check_product(values, scales, second, second_scales, shares, out)
    check_tensor("padded", padded, torch.int32, (1,))
    check_tensor("expert_ids", expert_ids, torch.int32, (len(expert_ids),))
    check_blocks(rows, block, sorted_ids, expert_ids)
    if rows:
        down_rows_kernel[(hidden // (tile.columns * tile.steps), blocks(rows, block))](
            TensorDescriptor.from_tensor(values, [block, GROUP]), scales,
            TensorDescriptor.from_tensor(second, [1, tile.columns, GROUP]), second_scales, shares, sorted_ids, expert_ids,
            padded, out, shares.numel(), HIDDEN=hidden, BLOCK=block, COLUMNS=tile.columns, STEPS=tile.steps,
            STAGES=tile.stages, COMPILED=values.is_cuda, num_warps=tile.warps, **early(values.is_cuda),
        )  # fmt: skip
    return out
