"""Values of attended latents, quantised for o_proj: the products of all heads and their quantisation in one launch.

A head's values are one or two groups that share a scale, so a program that has a group of a row has all that its scale depends
on. For few rows the sums over the latent are divided among programs, and the last one to arrive adds the parts in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import blocks, power_of_two
from nsa_backend.kernels.checks import require
from nsa_backend.kernels.dependent_launch import early, wait_for_kernel_ahead
from nsa_backend.kernels.layer_front_steps import GROUP as GROUP_OF_KERNEL
from nsa_backend.kernels.layer_front_steps import quantised, rounded
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.kernels.projection_inputs import empty_input

MOST_ROWS = 128
LEAST_TILE, MOST_TILE = 16, 64
"""Rows of a program; not tuned."""
PROGRAMS = 264
"""Two a multiprocessor of Hopper: fewer, and sums are divided."""
DIVIDED = 4


@triton.jit
def is_last_to_arrive(part, sums, arrived, split, split_size, SPLITS: tl.constexpr):
    """Store this program's part of a sum; whether all SPLITS parts are there. `sums`: where the first part goes."""
    tl.store(sums + split * split_size, part)
    tl.debug_barrier()  # every warp has stored its part
    return tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1


@triton.jit
def sum_of_parts(part, sums, split_size, SPLITS: tl.constexpr):
    """All parts of a sum in their order; `part` is any of them."""
    total = tl.zeros_like(part)
    for other in tl.static_range(SPLITS):
        total += tl.load(sums + other * split_size, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["rows", "scales_row_stride", "scales_group_stride"])
def value_products_kernel(
    attended_ptr,  # bfloat16 [rows, heads, LATENT], strides below
    weight_ptr,  # bfloat16 [heads, LATENT, WIDTH], strides below
    out_ptr,  # FP8 [rows, heads * WIDTH], contiguous
    scales_ptr,  # float32 [rows, heads * WIDTH / GROUP], strides below
    sums_ptr,  # float32 [SPLITS, programs of a split, GROUP, ROWS]
    arrived_ptr,  # int32 [programs of a split]: zeros before, and left so
    rows,
    scales_row_stride,
    scales_group_stride,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WEIGHT_HEAD_STRIDE: tl.constexpr,
    WEIGHT_LATENT_STRIDE: tl.constexpr,
    WEIGHT_VALUE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    POWERS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program (group of values of a head, block of rows, split of the latent)."""
    wait_for_kernel_ahead(COMPILED)
    groups: tl.constexpr = WIDTH // GROUP_OF_KERNEL
    group, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = group // groups
    row = block * ROWS + tl.arange(0, ROWS)
    there = row < rows
    value, inner = tl.arange(0, GROUP_OF_KERNEL), tl.arange(0, GROUP_OF_KERNEL)
    weight = weight_ptr + head * WEIGHT_HEAD_STRIDE + (group % groups) * GROUP_OF_KERNEL * WEIGHT_VALUE_STRIDE
    attended = attended_ptr + row.to(tl.int64)[None, :] * ROW_STRIDE + head * HEAD_STRIDE
    total = tl.zeros([GROUP_OF_KERNEL, ROWS], tl.float32)
    steps: tl.constexpr = LATENT // GROUP_OF_KERNEL // SPLITS
    for step in tl.range(split * steps, (split + 1) * steps, num_stages=min(3, steps)):
        at = step * GROUP_OF_KERNEL + inner
        w = tl.load(weight + value[:, None] * WEIGHT_VALUE_STRIDE + at[None, :] * WEIGHT_LATENT_STRIDE)
        x = tl.load(attended + at[:, None], there[None, :], 0.0)
        if not COMPILED:  # the interpreter multiplies the bits of bfloat16
            w, x = w.to(tl.float32), x.to(tl.float32)
        total = tl.dot(w, x, total)
    whole = True
    if SPLITS > 1:
        programs, program = tl.num_programs(0) * tl.num_programs(1), block * tl.num_programs(0) + group
        size: tl.constexpr = GROUP_OF_KERNEL * ROWS
        sums = sums_ptr + program * size + value[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        whole = is_last_to_arrive(total, sums, arrived_ptr + program, split, programs * size, SPLITS)
        if whole:
            total = sum_of_parts(total, sums, programs * size, SPLITS)
            tl.store(arrived_ptr + program, 0)
    if whole:
        values, scale = quantised(rounded(tl.trans(total)), POWERS, COMPILED)
        out = out_ptr + row.to(tl.int64)[:, None] * (HEADS * WIDTH) + group * GROUP_OF_KERNEL + value[None, :]
        tl.store(out, values, there[:, None])
        tl.store(scales_ptr + row[:, None] * scales_row_stride + group * scales_group_stride, scale, there[:, None])


def few_rows(width: int) -> int:
    """Rows up to which a server has values of this width from here; of more, two launches take as long or less."""
    return 32 if width == GROUP else 16


def value_counters(weight: torch.Tensor) -> torch.Tensor:
    """What `value_products` of this weight counts its programs with: zeros, and zeros again after every launch.

    Launches that may run at the same time need one each.
    """
    return torch.zeros(_most_programs(*weight.shape[::2]), dtype=torch.int32, device=weight.device)


def _most_programs(heads: int, width: int) -> int:
    return heads * width // GROUP * blocks(MOST_ROWS, LEAST_TILE)


def value_products(
    attended: torch.Tensor, weight: torch.Tensor, scales: Scales, arrived: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every head's latent times its weight, rounded to bfloat16, and quantised as SGLang does for o_proj; one launch.

    Args:
        attended: bfloat16 [rows, heads, latent], the last dimension dense, at most MOST_ROWS rows, latent a multiple of
            DIVIDED * GROUP.
        weight: bfloat16 [heads, latent, a multiple of GROUP] of any strides: SGLang's w_vc.
        scales: of the result.
        arrived: from `value_counters`.

    Returns:
        (FP8 [rows, heads * width], its scales), as `empty_input` describes.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    (rows, heads, latent), width = attended.shape, weight.shape[2]
    fits = attended.dtype == torch.bfloat16 and attended.stride(2) == 1 and not latent % (DIVIDED * GROUP)
    form = f"torch.bfloat16 [at most {MOST_ROWS}, heads, a multiple of {DIVIDED * GROUP}], latents dense"
    require(fits and rows <= MOST_ROWS, "attended", attended, form, "the kernel would misread it")
    fits = weight.dtype == torch.bfloat16 and weight.shape[:2] == (heads, latent) and not width % GROUP
    form = f"torch.bfloat16 [{heads}, {latent}, a multiple of {GROUP}]"
    require(fits, "weight", weight, form, "the kernel would misread it")
    programs = _most_programs(heads, width)
    fits = arrived.dtype == torch.int32 and arrived.shape == (programs,)
    require(fits, "arrived", arrived, f"torch.int32 [{programs}]", "the kernel would count past its end")
    out, out_scales = empty_input(rows, heads * width, scales, attended.device)
    if rows:
        tile, groups = min(max(power_of_two(rows), LEAST_TILE), MOST_TILE), heads * width // GROUP
        programs = groups * blocks(rows, tile)
        splits = DIVIDED if programs * DIVIDED <= PROGRAMS else 1
        sums = torch.empty(programs * splits * GROUP * tile if splits > 1 else 0, dtype=torch.float32, device=out.device)
        value_products_kernel[(groups, blocks(rows, tile), splits)](
            attended, weight, out, out_scales, sums, arrived, rows, *out_scales.stride(), *attended.stride()[:2],
            *weight.stride(), HEADS=heads, LATENT=latent, WIDTH=width, ROWS=tile, SPLITS=splits,
            POWERS=scales is Scales.POWERS_OF_TWO, COMPILED=out.is_cuda, num_warps=4, **early(out.is_cuda),
        )  # fmt: skip
    return out, out_scales
