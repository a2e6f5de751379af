"""Between both products of experts: silu(gate) * up, quantised, in one launch for SGLang's two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import power_of_two
from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.dependent_launch import early, wait_for_kernel_ahead
from nsa_backend.kernels.expert_order import check_blocks
from nsa_backend.kernels.layer_front_steps import GROUP as GROUP_OF_KERNEL
from nsa_backend.kernels.layer_front_steps import quantised, rounded
from nsa_backend.kernels.layer_front_weights import GROUP


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


@triton.jit(do_not_specialize=["choices", "block"])
def activate_kernel(
    both_ptr,  # bfloat16 [rows, 2 * WIDTH], gate before up
    values_ptr,  # FP8 [rows, WIDTH]
    scales_ptr,  # float32 [rows, WIDTH / GROUP]
    chosen_ptr,  # int32 [choices], the expert of each choice of a token, -1 where it is another GPU's
    sorted_ptr,  # int32 [rows], choices, or their number and more where a row is padding
    padded_ptr,  # int32 [1], rows that there are with padding
    expert_ptr,  # int32 [blocks], each block's expert, -1 where it is another GPU's
    choices,
    block,  # rows
    WIDTH: tl.constexpr,
    SORTED: tl.constexpr,  # whether rows are in the order of `sorted`, else in that of choices
    ROWS: tl.constexpr,  # of a program: several only where they are sorted, and as many as divide a block
    COMPILED: tl.constexpr,
):
    """Program: ROWS rows. All tensors contiguous.

    What tells the order of rows was written before the kernel ahead began, which is the first product and waited for it.
    """
    groups: tl.constexpr = WIDTH // GROUP_OF_KERNEL
    row = tl.program_id(0) * ROWS
    if ROWS > 1:
        of_rows = row + tl.arange(0, ROWS * groups) // groups
        here = (row < tl.load(padded_ptr)) & (tl.load(expert_ptr + row // block) >= 0)
        there = (tl.load(sorted_ptr + of_rows) < choices)[:, None] & here
        wait_for_kernel_ahead(COMPILED)
        value = tl.arange(0, ROWS * groups)[:, None] % groups * GROUP_OF_KERNEL + tl.arange(0, GROUP_OF_KERNEL)[None, :]
        from_row = both_ptr + of_rows.to(tl.int64)[:, None] * (2 * WIDTH)
        gate = tl.load(from_row + value, there, 0.0).to(tl.float32)
        up = tl.load(from_row + WIDTH + value, there, 0.0).to(tl.float32)
        values, scale = quantised(rounded(opened(gate, COMPILED) * up), False, COMPILED)
        tl.store(values_ptr + of_rows.to(tl.int64)[:, None] * WIDTH + value, values, there)
        tl.store(scales_ptr + row * groups + tl.arange(0, ROWS * groups)[:, None], scale, there)
    else:
        if SORTED:
            here = tl.load(expert_ptr + row // block) >= 0
            there = (row < tl.load(padded_ptr)) & (tl.load(sorted_ptr + row) < choices) & here
        else:
            there = tl.load(chosen_ptr + row) >= 0
        if there | (row == 0):  # one row waits in any case: this launch is not to end before the one ahead
            wait_for_kernel_ahead(COMPILED)
        if there:
            at = tl.arange(0, groups)[:, None] * GROUP_OF_KERNEL + tl.arange(0, GROUP_OF_KERNEL)[None, :]
            from_row, to_row = both_ptr + row.to(tl.int64) * (2 * WIDTH), values_ptr + row.to(tl.int64) * WIDTH
            gate, up = tl.load(from_row + at).to(tl.float32), tl.load(from_row + WIDTH + at).to(tl.float32)
            values, scale = quantised(rounded(opened(gate, COMPILED) * up), False, COMPILED)
            tl.store(to_row + at, values)
            tl.store(scales_ptr + row * groups + tl.arange(0, groups)[:, None], scale)


FEW_ROWS = 8192
"""Up to which a program has one: of more, waiting for a row takes longer than what is done with it."""
MOST_OF_PROGRAM = 4


def problem(width: int) -> str | None:
    """Why experts of this width cannot have the launch, or None."""
    if width < GROUP or width != power_of_two(width):
        return f"experts of {width}: powers of two from {GROUP} on are served"
    return None


def activate(
    both: torch.Tensor,
    chosen: torch.Tensor,
    expert_ids: torch.Tensor,
    padded: torch.Tensor,
    block: int,
    sorted_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of FP8 and their scales for the second product of experts.

    Args:
        both: bfloat16 [rows, 2 * width], what the first product gives, gate before up.
        chosen: int32 [tokens, choices], experts; -1 is one of another GPU, whose rows are left as they are.
        expert_ids: int32 [blocks], the expert of each block of rows; -1 is one of another GPU.
        padded: int32 [1], rows of all blocks.
        block: rows of each.
        sorted_ids: int32, at least [rows]: the choice of each row where rows are in blocks, the number of choices in padding;
            None where rows are in the order of choices.

    Returns:
        float8_e4m3fn [rows, width] and float32 [rows, width / GROUP], exact scales. Rows of padding are left as they are.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
    """
    rows, width = len(both), both.shape[1] // 2
    if (why := problem(width)) is not None:
        raise ValueError(why)
    check_tensor("both", both, torch.bfloat16, (rows, 2 * width))
    check_tensor("chosen", chosen, torch.int32, tuple(chosen.shape))
    check_tensor("expert_ids", expert_ids, torch.int32, tuple(expert_ids.shape))
    check_tensor("padded", padded, torch.int32, (1,))
    if sorted_ids is None:
        require(chosen.numel() == rows, "chosen", chosen, f"of {rows} choices", "each is a row")
    else:
        check_blocks(rows, block, sorted_ids, expert_ids)
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=both.device)
    scales = torch.empty(rows, width // GROUP, dtype=torch.float32, device=both.device)
    several = sorted_ids is not None and rows > FEW_ROWS and not rows % MOST_OF_PROGRAM and not block % MOST_OF_PROGRAM
    of_program = MOST_OF_PROGRAM if several else 1
    if rows:
        activate_kernel[(rows // of_program,)](
            both, values, scales, chosen, padded if sorted_ids is None else sorted_ids, padded, expert_ids, chosen.numel(),
            block, WIDTH=width, SORTED=sorted_ids is not None, ROWS=of_program, COMPILED=both.is_cuda, num_warps=4,
            **early(both.is_cuda),
        )  # fmt: skip
    return values, scales
