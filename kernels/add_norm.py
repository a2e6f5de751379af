"""What stands between two halves of a layer in one launch: the residual's sum, its RMS norm, and the norm quantised.

SGLang adds and norms in one launch and quantises in another, and its launch lets none begin before it has written. Where the
kernel behind this one is ours, it begins with this one, and asks for its weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import power_of_two
from nsa_backend.kernels.checks import check_tensor
from nsa_backend.kernels.dependent_launch import early, let_next_begin, wait_for_kernel_ahead
from nsa_backend.kernels.layer_front import empty_input
from nsa_backend.kernels.layer_front_steps import GROUP as GROUP_OF_KERNEL
from nsa_backend.kernels.layer_front_steps import quantised
from nsa_backend.kernels.layer_front_weights import GROUP, Scales

WARPS = 16


@triton.jit(do_not_specialize=["row_stride", "group_stride"])
def add_norm_kernel(
    x_ptr,  # bfloat16 [rows, WIDTH], contiguous; becomes the norm
    residual_ptr,  # bfloat16 [rows, WIDTH], contiguous; becomes the sum
    weight_ptr,  # bfloat16 [WIDTH]
    values_ptr,  # FP8 [rows, WIDTH], contiguous; written where QUANTISED
    scales_ptr,  # float32 [rows, WIDTH / GROUP], strides below; likewise
    row_stride,
    group_stride,
    eps,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two
    QUANTISED: tl.constexpr,
    POWERS: tl.constexpr,
    BEFORE_OURS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """A program has a row."""
    let_next_begin(BEFORE_OURS, COMPILED)
    group = tl.arange(0, GROUPS)[:, None]
    dim, real = group * GROUP_OF_KERNEL + tl.arange(0, GROUP_OF_KERNEL)[None, :], group < WIDTH // GROUP_OF_KERNEL
    weight = tl.load(weight_ptr + dim, mask=real, other=0.0).to(tl.float32)
    wait_for_kernel_ahead(COMPILED)
    at = tl.program_id(0).to(tl.int64) * WIDTH + dim
    x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + at, mask=real, other=0.0).to(tl.float32)
    tl.store(residual_ptr + at, x.to(tl.bfloat16), mask=real)
    of_row = tl.sum(tl.sum(x * x, axis=1), axis=0)
    normed = (x * tl.rsqrt(of_row / WIDTH + eps) * weight).to(tl.bfloat16)
    tl.store(x_ptr + at, normed, mask=real)
    if QUANTISED:
        values, scale = quantised(normed.to(tl.float32), POWERS, COMPILED)
        tl.store(values_ptr + at, values, mask=real)
        row = tl.program_id(0).to(tl.int64)
        tl.store(scales_ptr + row * row_stride + group * group_stride, scale, mask=real)


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scales: Scales | None = None,
    *,
    before_ours: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Add `x` to `residual`, and have the sum's norm in the place of `x`; one launch.

    Squares of the sum before it is rounded are what is added up, as in FlashInfer's `fused_add_rmsnorm`, in another order.

    Args:
        x: bfloat16 [rows, a multiple of GROUP], contiguous; overwritten.
        residual: like `x`; overwritten.
        weight: bfloat16 [width], contiguous.
        eps: added to the mean square.
        scales: of the norm in FP8; None where nobody asks for it.
        before_ours: whether what is launched next on this stream is a kernel of this package that waits for this one.

    Returns:
        The norm as `layer_front.quantise` gives it, and None without `scales`.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    rows, width = x.shape
    for name, tensor, shape in (("x", x, (rows, width)), ("residual", residual, (rows, width)), ("weight", weight, (width,))):
        check_tensor(name, tensor, torch.bfloat16, shape)
    if width % GROUP:
        raise ValueError(f"rows of {width} values are not groups of {GROUP}")
    found = empty_input(rows, width, scales, x.device) if scales is not None else None
    if rows:
        values, of_groups = found or (x, x)
        add_norm_kernel[(rows,)](
            x, residual, weight, values, of_groups, *(of_groups.stride() if found else (0, 0)), eps, WIDTH=width,
            GROUPS=power_of_two(width // GROUP), QUANTISED=found is not None, POWERS=scales is Scales.POWERS_OF_TWO,
            BEFORE_OURS=before_ours, COMPILED=x.is_cuda, num_warps=WARPS, **early(x.is_cuda),
        )  # fmt: skip
    return found
