"""Between both products of experts: silu(gate) * up, quantised, in one launch, which asks for the next weights meanwhile.

SGLang has two launches there, and its second product begins to read its weights when they have ended. Few rows leave memory
idle until then, so programs beside theirs ask for the weights that the product reads first, which L2 has when it comes.
No server has this launch: `benchmarks/tuning/experts.py --between` times it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.dependent_launch import early, wait_for_kernel_ahead
from nsa_backend.kernels.layer_front_steps import GROUP as GROUP_OF_KERNEL
from nsa_backend.kernels.layer_front_steps import quantised, rounded
from nsa_backend.kernels.layer_front_weights import GROUP

LINE = tl.constexpr(128)
"""Bytes of L2 that one request brings."""
LINES = tl.constexpr(128)
"""That a program asks for."""


@triton.jit
def activate_kernel(
    both_ptr,  # bfloat16 [rows, 2 * WIDTH], gate before up
    values_ptr,  # FP8 [rows, WIDTH]
    scales_ptr,  # float32 [rows, WIDTH / GROUP]
    sorted_ptr,  # int32 [rows], choices of tokens, or the number of choices where a row is padding
    padded_ptr,  # int32 [1], rows that there are with padding
    weight_ptr,  # FP8 [experts, EXPERT bytes]
    expert_ptr,  # int32 [blocks], each block's expert, -1 where it is another GPU's
    rows,
    choices,
    block,  # rows
    WIDTH: tl.constexpr,
    EXPERT: tl.constexpr,
    SORTED: tl.constexpr,  # whether rows are in the order of `sorted`, else in that of choices
    COMPILED: tl.constexpr,
):
    """Program: a row, or behind the last one LINES lines of the weights of a block. All tensors contiguous."""
    program = tl.program_id(0)
    if program < rows:
        wait_for_kernel_ahead(COMPILED)
        there = True
        if SORTED:
            there = (program < tl.load(padded_ptr)) & (tl.load(sorted_ptr + program) < choices)
        if there:
            groups: tl.constexpr = WIDTH // GROUP_OF_KERNEL
            at = tl.arange(0, groups)[:, None] * GROUP_OF_KERNEL + tl.arange(0, GROUP_OF_KERNEL)[None, :]
            row = both_ptr + program.to(tl.int64) * (2 * WIDTH)
            gate, up = tl.load(row + at).to(tl.float32), tl.load(row + WIDTH + at).to(tl.float32)
            values, scale = quantised(rounded(gate / (1.0 + tl.exp(-gate)) * up), False, COMPILED)
            tl.store(values_ptr + program.to(tl.int64) * WIDTH + at, values)
            tl.store(scales_ptr + program * groups + tl.arange(0, groups)[:, None], scale)
    elif COMPILED:
        # Blocks were told before the kernel ahead began.
        of_expert: tl.constexpr = EXPERT // (LINE * LINES)
        ahead = program - rows
        which = ahead // of_expert
        if which * block < tl.load(padded_ptr):
            expert = tl.load(expert_ptr + which).to(tl.int64)
            if expert >= 0:
                start = weight_ptr + expert * EXPERT + (ahead % of_expert) * (LINE * LINES)
                tl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [start + tl.arange(0, LINES) * LINE],
                    dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip


def activate(
    both: torch.Tensor,
    weight: torch.Tensor,
    expert_ids: torch.Tensor,
    padded: torch.Tensor,
    block: int,
    choices: int,
    sorted_ids: torch.Tensor | None = None,
    ahead: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of FP8 and their scales for the second product of experts.

    Args:
        both: bfloat16 [rows, 2 * width], what the first product gives, gate before up.
        weight: float8_e4m3fn [experts, hidden, width], of the second product.
        expert_ids: int32 [blocks], the expert of each block of rows; -1 is one of another GPU.
        padded: int32 [1], rows of all blocks.
        block: rows of each.
        choices: of all tokens, each a row.
        sorted_ids: int32, at least [rows]: the choice of each row where rows are in blocks, `choices` in padding; None where
            rows are in the order of choices.
        ahead: blocks whose weights are asked for; on the CPU none is.

    Returns:
        float8_e4m3fn [rows, width] and float32 [rows, width / GROUP], exact scales. Rows of padding are left as they are.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    (rows, twice), (experts, hidden, width) = both.shape, weight.shape
    require(twice == 2 * width, "both", both, f"of {2 * width} columns", "the second product has so many inputs twice")
    require(width % GROUP == 0 and width & (width - 1) == 0, "weight", weight, "of a power of two columns", "groups divide it")
    check_tensor("both", both, torch.bfloat16, (rows, twice))
    check_tensor("weight", weight, torch.float8_e4m3fn, (experts, hidden, width))
    check_tensor("expert_ids", expert_ids, torch.int32, tuple(expert_ids.shape))
    check_tensor("padded", padded, torch.int32, (1,))
    if sorted_ids is not None:
        check_tensor("sorted_ids", sorted_ids, torch.int32, (len(sorted_ids),))
        require(len(sorted_ids) >= rows, "sorted_ids", sorted_ids, f"of at least {rows} rows", "others would be read behind it")
    require(ahead <= len(expert_ids), "expert_ids", expert_ids, f"of at least {ahead} blocks", "so many are asked for")
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=both.device)
    scales = torch.empty(rows, width // GROUP, dtype=torch.float32, device=both.device)
    programs = rows + ahead * (hidden * width // (LINE.value * LINES.value))
    if programs:
        activate_kernel[(programs,)](
            both, values, scales, padded if sorted_ids is None else sorted_ids, padded, weight, expert_ids, rows, choices,
            block, WIDTH=width, EXPERT=hidden * width, SORTED=sorted_ids is not None, COMPILED=both.is_cuda, num_warps=4,
            **early(both.is_cuda),
        )  # fmt: skip
    return values, scales
