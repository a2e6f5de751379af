"""What block-FP8 projections of a layer read: values in FP8 and their scales, as SGLang quantises them, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import require
from nsa_backend.kernels.dependent_launch import early, let_next_begin, wait_for_kernel_ahead
from nsa_backend.kernels.layer_front_steps import GROUP as GROUP_OF_KERNEL
from nsa_backend.kernels.layer_front_steps import quantised
from nsa_backend.kernels.layer_front_weights import GROUP, Scales

GROUPS = 8
"""Groups a program takes of a row that it quantises."""
ALIGNED = 4
"""Rows of a projection's input: of a multiple of so many, scales leave no room between groups."""


@triton.jit(do_not_specialize=["row_stride", "group_stride"])
def quantise_kernel(
    x_ptr,  # bfloat16 [rows, WIDTH], contiguous
    out_ptr,  # FP8 [rows, WIDTH], contiguous
    scales_ptr,  # float32 [rows, WIDTH / GROUP], strides below
    row_stride,
    group_stride,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,  # that a program takes
    POWERS: tl.constexpr,
    BEFORE_OURS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program (row, block) quantises a block of a row's groups."""
    let_next_begin(BEFORE_OURS, COMPILED)
    wait_for_kernel_ahead(COMPILED)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    dim, real = group * GROUP_OF_KERNEL + tl.arange(0, GROUP_OF_KERNEL)[None, :], group < WIDTH // GROUP_OF_KERNEL
    x = tl.load(x_ptr + row * WIDTH + dim, mask=real, other=0.0).to(tl.float32)
    values, scale = quantised(x, POWERS, COMPILED)
    tl.store(out_ptr + row * WIDTH + dim, values, mask=real)
    tl.store(scales_ptr + row * row_stride + group * group_stride, scale, mask=real)


def empty_input(rows: int, width: int, scales: Scales | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Room for a projection's input: FP8 with scales as DeepGEMM reads them, or bfloat16 without any.

    SGLang has the scales of a row beside each other where they are powers of two, and a kernel more a projection moves them.

    Returns:
        ([rows, width] contiguous, float32 [rows, width / GROUP], columns dense from multiples of 16 bytes on).
    """
    if scales is None:
        return torch.empty(rows, width, dtype=torch.bfloat16, device=device), None
    of_groups = torch.empty(width // GROUP, blocks(rows, ALIGNED) * ALIGNED, dtype=torch.float32, device=device)
    return torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device), of_groups.T[:rows]


def quantise(x: torch.Tensor, scales: Scales, *, before_ours: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A projection's input in FP8, values and scales to the bit of SGLang's own for block-FP8 projections; one launch.

    Args:
        x: bfloat16 [rows, a multiple of GROUP], contiguous.
        scales: of the result.
        before_ours: whether what is launched next on this stream is a kernel of this package that waits for this one.

    Returns:
        What `empty_input` describes, filled.

    Raises:
        ValueError: x has another dtype or layout.
    """
    rows, width = x.shape
    fits = x.dtype == torch.bfloat16 and x.is_contiguous() and not width % GROUP
    require(fits, "x", x, f"contiguous torch.bfloat16 [rows, a multiple of {GROUP}]", "the kernel would misread it")
    out, out_scales = empty_input(rows, width, scales, x.device)
    if rows:
        quantise_kernel[(rows, blocks(width // GROUP, GROUPS))](
            x, out, out_scales, *out_scales.stride(), WIDTH=width, GROUPS=GROUPS, POWERS=scales is Scales.POWERS_OF_TWO,
            BEFORE_OURS=before_ours, COMPILED=x.is_cuda, **early(x.is_cuda),
        )  # fmt: skip
    return out, out_scales
