"""Behind the second product of experts: what a token's choices give, added up, and its shared expert with it, in one launch.

SGLang has a launch for the sum and one for the shared expert, which read and write every token's hidden state once more. The
bits are those of both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import blocks, power_of_two
from nsa_backend.kernels.checks import check_tensor
from nsa_backend.kernels.dependent_launch import early, wait_for_kernel_ahead

COLUMNS = 1024
"""That a program adds up."""


@triton.jit
def choice_sums_kernel(
    given_ptr,  # bfloat16 [tokens, CHOICES, HIDDEN]
    shared_ptr,  # bfloat16 [tokens, HIDDEN]
    out_ptr,  # bfloat16 [tokens, HIDDEN]
    chosen_ptr,  # int32 [tokens, CHOICES]
    factor,
    CHOICES: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
    CHOSEN: tl.constexpr,  # whether choices below 0 gave nothing
    COMPILED: tl.constexpr,
):
    """Program (token, block of columns). All tensors contiguous."""
    wait_for_kernel_ahead(COMPILED)
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < HIDDEN
    sums = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(CHOICES):
        gave = there
        if CHOSEN:
            gave &= tl.load(chosen_ptr + token * CHOICES + choice) >= 0
        sums += tl.load(given_ptr + (token * CHOICES + choice) * HIDDEN + column, gave, 0.0).to(tl.float32)
    sums = (sums * factor).to(tl.bfloat16)
    if SHARED:
        sums = (sums.to(tl.float32) + tl.load(shared_ptr + token * HIDDEN + column, there).to(tl.float32)).to(tl.bfloat16)
    tl.store(out_ptr + token * HIDDEN + column, sums, there)


def choice_sums(
    given: torch.Tensor, factor: float, shared: torch.Tensor | None, out: torch.Tensor, chosen: torch.Tensor | None = None
) -> torch.Tensor:
    """`out`: the sum over choices, times `factor`, rounded to bfloat16, and `shared` added to that where there is one.

    Args:
        given: bfloat16 [tokens, choices, hidden].
        factor: of the sums.
        shared: bfloat16 [tokens, hidden], or None.
        out: bfloat16 [tokens, hidden]; may be `shared`.
        chosen: int32 [tokens, choices]: what a choice below 0 gave is not read. None where all gave something.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    tokens, choices, hidden = given.shape
    check_tensor("given", given, torch.bfloat16, (tokens, choices, hidden))
    for name, tensor in (("out", out), ("shared", shared)):
        if tensor is not None:
            check_tensor(name, tensor, torch.bfloat16, (tokens, hidden))
    if chosen is not None:
        check_tensor("chosen", chosen, torch.int32, (tokens, choices))
    if tokens:
        columns = min(COLUMNS, power_of_two(hidden))
        choice_sums_kernel[(tokens, blocks(hidden, columns))](
            given, out if shared is None else shared, out, out if chosen is None else chosen, float(factor), CHOICES=choices,
            HIDDEN=hidden, COLUMNS=columns, SHARED=shared is not None, CHOSEN=chosen is not None, COMPILED=given.is_cuda,
            num_warps=4, **early(given.is_cuda),
        )  # fmt: skip
    return out
