"""Ask for weights before they are needed, so that L2 has them: products of few rows wait for memory longer than they read it.

Nothing is read and nothing written, so whatever is asked for, no result depends on it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.checks import require

MOST_WEIGHTS = 4
LINE = tl.constexpr(128)
"""Bytes that one request brings."""
LINES = tl.constexpr(1024)
"""That a program asks for."""


@triton.jit
def ask_for_lines(address):
    """Ask for the lines that these addresses, int64 or pointers, lie in."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["first_lines", "second_lines", "third_lines", "fourth_lines"])
def ask_kernel(first_ptr, second_ptr, third_ptr, fourth_ptr, first_lines, second_lines, third_lines, fourth_lines):
    """Program: LINES lines of one of four weights, of any type; the last one of a weight asks for its last line again."""
    ahead = tl.program_id(0)
    address, lines = first_ptr.to(tl.int64), first_lines
    if ahead >= tl.cdiv(first_lines, LINES):
        ahead -= tl.cdiv(first_lines, LINES)
        address, lines = second_ptr.to(tl.int64), second_lines
        if ahead >= tl.cdiv(second_lines, LINES):
            ahead -= tl.cdiv(second_lines, LINES)
            address, lines = third_ptr.to(tl.int64), third_lines
            if ahead >= tl.cdiv(third_lines, LINES):
                ahead -= tl.cdiv(third_lines, LINES)
                address, lines = fourth_ptr.to(tl.int64), fourth_lines
    ask_for_lines(address + tl.minimum(ahead * LINES + tl.arange(0, LINES), lines - 1) * LINE)


def lines_of(weight: torch.Tensor) -> int:
    """Lines that a weight lies in, in whatever order its dimensions are.

    Raises:
        ValueError: it has gaps, which are not its own.
    """
    spread = 1
    for stride, size in sorted(zip(weight.stride(), weight.shape, strict=True)):
        require(size == 1 or stride == spread, "weight", weight, "without gaps", "what lies in them would be asked for too")
        spread *= size
    return triton.cdiv(weight.numel() * weight.element_size(), LINE.value)


def ask_for(*weights: torch.Tensor) -> None:
    """Ask for up to four weights of a GPU, on the current stream.

    Args:
        weights: of any type and shape, each without gaps.

    Raises:
        ValueError: one has gaps.
    """
    lines = [lines_of(weight) for weight in weights]
    if not 0 < len(weights) <= MOST_WEIGHTS:
        raise ValueError(f"one to {MOST_WEIGHTS} weights can be asked for at once, not {len(weights)}")
    missing = MOST_WEIGHTS - len(weights)
    programs = sum(triton.cdiv(count, LINES.value) for count in lines)
    if programs and weights[0].is_cuda:
        ask_kernel[(programs,)](*weights, *weights[:1] * missing, *lines, *[0] * missing, num_warps=4)
