"""Between both products of experts: silu(gate) * up, quantised, in one launch, which asks for the next weights meanwhile.

SGLang has two launches there, and its second product begins to read its weights when they have ended. Few rows leave memory
idle until then, so programs before theirs ask for the weights that the product reads first, which L2 has when it comes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import blocks, power_of_two
from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.dependent_launch import early, wait_for_kernel_ahead
from nsa_backend.kernels.layer_front_steps import GROUP as GROUP_OF_KERNEL
from nsa_backend.kernels.layer_front_steps import quantised, rounded
from nsa_backend.kernels.layer_front_weights import GROUP

LINE = tl.constexpr(128)
"""Bytes that one request brings."""
LINES = tl.constexpr(128)
"""That a program asks for."""


@triton.jit
def ask_for_lines(address):
    """Ask L2 for the lines that these addresses lie in; nothing is read, so no result depends on it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def opened(gate, COMPILED: tl.constexpr):
    """float32 silu(gate): SGLang compiles it with fast exponentials and division."""
    if COMPILED:
        power = tl.inline_asm_elementwise(  # exp(-gate); the constant is -log2(e)
            "{ mul.ftz.f32 $0, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, $0; }",
            "=f,f", [gate], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        return tl.inline_asm_elementwise(
            "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [gate, 1.0 + power], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return gate / (1.0 + tl.exp(-gate))


@triton.jit(do_not_specialize=["first_row", "rows", "choices", "block"])
def activate_kernel(
    both_ptr,  # bfloat16 [rows, 2 * WIDTH], gate before up
    values_ptr,  # FP8 [rows, WIDTH]
    scales_ptr,  # float32 [rows, WIDTH / GROUP]
    chosen_ptr,  # int32 [choices], the expert of each choice of a token, -1 where it is another GPU's
    sorted_ptr,  # int32 [rows], choices, or their number and more where a row is padding
    padded_ptr,  # int32 [1], rows that there are with padding
    weight_ptr,  # FP8 [experts, EXPERT bytes]
    expert_ptr,  # int32 [blocks], each block's expert, -1 where it is another GPU's
    first_row,  # program of the first row
    rows,
    choices,
    block,  # rows
    WIDTH: tl.constexpr,
    EXPERT: tl.constexpr,
    SORTED: tl.constexpr,  # whether rows are in the order of `sorted`, else in that of choices
    COMPILED: tl.constexpr,
):
    """Program: a row, or one of those before and behind them all, which ask for LINES lines of a block's weights.

    What tells the order of rows was written before the kernel ahead began, which is the first product and waited for it. All
    tensors contiguous.
    """
    program = tl.program_id(0)
    row = program - first_row
    if (row >= 0) & (row < rows):
        if SORTED:
            here = tl.load(expert_ptr + row // block) >= 0
            there = (row < tl.load(padded_ptr)) & (tl.load(sorted_ptr + row) < choices) & here
        else:
            there = tl.load(chosen_ptr + row) >= 0
        if there | (row == 0):  # one row waits in any case: this launch is not to end before the one ahead
            wait_for_kernel_ahead(COMPILED)
        if there:
            groups: tl.constexpr = WIDTH // GROUP_OF_KERNEL
            at = tl.arange(0, groups)[:, None] * GROUP_OF_KERNEL + tl.arange(0, GROUP_OF_KERNEL)[None, :]
            from_row, to_row = both_ptr + row.to(tl.int64) * (2 * WIDTH), values_ptr + row.to(tl.int64) * WIDTH
            gate, up = tl.load(from_row + at).to(tl.float32), tl.load(from_row + WIDTH + at).to(tl.float32)
            values, scale = quantised(rounded(opened(gate, COMPILED) * up), False, COMPILED)
            tl.store(to_row + at, values)
            tl.store(scales_ptr + row * groups + tl.arange(0, groups)[:, None], scale)
    elif COMPILED:
        of_expert: tl.constexpr = EXPERT // (LINE * LINES)
        ask = tl.where(program < first_row, program, program - rows)
        which = ask // of_expert
        if which * block < tl.load(padded_ptr):
            expert = tl.load(expert_ptr + which).to(tl.int64)
            if expert >= 0:
                start = weight_ptr + expert * EXPERT + (ask % of_expert) * (LINE * LINES)
                ask_for_lines(start + tl.arange(0, LINES) * LINE)


def problem(hidden: int, width: int) -> str | None:
    """Why experts of this width on hidden states of that one cannot have the launch, or None."""
    if hidden % GROUP or width < GROUP or width != power_of_two(width):
        served = f"multiples of {GROUP} and powers of two from {GROUP} on are served"
        return f"hidden states of {hidden} and experts of {width}: {served}"
    return None


def activate(
    both: torch.Tensor,
    weight: torch.Tensor,
    chosen: torch.Tensor,
    expert_ids: torch.Tensor,
    padded: torch.Tensor,
    block: int,
    sorted_ids: torch.Tensor | None = None,
    ahead: int = 0,
    behind_rows: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of FP8 and their scales for the second product of experts.

    Args:
        both: bfloat16 [rows, 2 * width], what the first product gives, gate before up.
        weight: float8_e4m3fn [experts, hidden, width], of the second product.
        chosen: int32 [tokens, choices], experts; -1 is one of another GPU, whose rows are left as they are.
        expert_ids: int32 [blocks], the expert of each block of rows; -1 is one of another GPU.
        padded: int32 [1], rows of all blocks.
        block: rows of each.
        sorted_ids: int32, at least [rows]: the choice of each row where rows are in blocks, the number of choices in padding;
            None where rows are in the order of choices.
        ahead: blocks whose weights are asked for, at most as many as there are; on the CPU none is.
        behind_rows: whether programs that ask come behind those that have rows, and so begin when most of these have.

    Returns:
        float8_e4m3fn [rows, width] and float32 [rows, width / GROUP], exact scales. Rows of padding are left as they are.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
    """
    rows, (experts, hidden, width) = len(both), weight.shape
    if (why := problem(hidden, width)) is not None:
        raise ValueError(why)
    check_tensor("both", both, torch.bfloat16, (rows, 2 * width))
    check_tensor("weight", weight, torch.float8_e4m3fn, (experts, hidden, width))
    check_tensor("chosen", chosen, torch.int32, tuple(chosen.shape))
    check_tensor("expert_ids", expert_ids, torch.int32, tuple(expert_ids.shape))
    check_tensor("padded", padded, torch.int32, (1,))
    if sorted_ids is None:
        require(chosen.numel() == rows, "chosen", chosen, f"of {rows} choices", "each is a row")
    else:
        check_tensor("sorted_ids", sorted_ids, torch.int32, (len(sorted_ids),))
        require(len(sorted_ids) >= rows, "sorted_ids", sorted_ids, f"of at least {rows} rows", "others would be read behind it")
        least = blocks(rows, block)
        require(len(expert_ids) >= least, "expert_ids", expert_ids, f"of at least {least} blocks", "every row is of one")
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=both.device)
    scales = torch.empty(rows, width // GROUP, dtype=torch.float32, device=both.device)
    asks = min(ahead, len(expert_ids)) * (hidden * width // (LINE.value * LINES.value))
    if rows:
        activate_kernel[(rows + asks,)](
            both, values, scales, chosen, padded if sorted_ids is None else sorted_ids, padded, weight, expert_ids,
            0 if behind_rows else asks, rows, chosen.numel(), block, WIDTH=width, EXPERT=hidden * width,
            SORTED=sorted_ids is not None, COMPILED=both.is_cuda, num_warps=4, **early(both.is_cuda),
        )  # fmt: skip
    return values, scales
