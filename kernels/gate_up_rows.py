"""The first product of experts of many tokens with what lies between both products, in one launch: of gate_up_rows.cu.

SGLang has a launch for the product, in Triton, and two for the activation and its quantisation, of which `expert_activation`
makes one. Here a tile's sums become FP8 values before they leave registers.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.expert_tiles import BESIDE_PANELS, PANEL, Kernel, Launch, check_order
from nsa_backend.kernels.layer_front_weights import GROUP

STAGES = 4
APART = 0
"""Nanoseconds between both warpgroups: of none it is known whether it helps."""


class Arguments(ctypes.Structure):
    """`Multiply` of gate_up_rows.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "x_scales", "first", "first_scales", "sorted", "experts", "padded")),
        *((name, ctypes.c_void_p) for name in ("values", "scales")),
        *((name, ctypes.c_int) for name in ("choices", "of_token", "scales_token", "scales_step")),
    ]


def problem(hidden: int, width: int) -> str | None:
    """Why experts of this width cannot have the launch, or None."""
    if hidden % GROUP or width % GROUP:
        return f"experts of {width} on hidden states of {hidden}: multiples of {GROUP} are served"
    return None


def kernel_for(hidden: int, width: int) -> Kernel:
    """Of experts of this width; a part of a block's rows has a group of their columns."""
    shared = STAGES * (3 * PANEL + 2 * 8) + BESIDE_PANELS
    return Kernel(Path(__file__).with_name("gate_up_rows.cu"), hidden, width, width // GROUP, shared, APART)


def gate_up_rows(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    first: torch.Tensor,
    first_scales: torch.Tensor,
    of_token: int,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded: torch.Tensor,
    rows: int,
    *,
    num_sms: int | None = None,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of FP8 and their scales for the second product of experts: what the first one gives, activated and quantised.

    Args:
        x: float8_e4m3fn [tokens, hidden].
        x_scales: float32 [tokens, hidden / GROUP], in any layout: SGLang has those of a token or of a group side by side.
        first: float8_e4m3fn [experts, 2 * width, hidden], gate before up.
        first_scales: float32 [experts, 2 * width / GROUP, hidden / GROUP].
        of_token: choices of a token.
        sorted_ids: int32, at least [rows]: the choice of each row, the number of choices or more in padding, which comes behind
            the other rows of its block.
        expert_ids: int32 [blocks], the expert of each block of BLOCK rows; -1 is one of another GPU.
        padded: int32 [1], rows of all blocks.
        rows: most of them, a multiple of BLOCK.
        num_sms: blocks at once; as many as the GPU has SMs if None.
        launch: what runs the kernel; a GPU if None, an emulation in tests.

    Returns:
        float8_e4m3fn [rows, width] and float32 [rows, width / GROUP], exact scales. Rows of padding and of another GPU's
        experts are left as they are.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
        RuntimeError: NVRTC or the driver refuses.
    """
    (tokens, hidden), (experts, both) = x.shape, first.shape[:2]
    width = both // 2
    if (why := problem(hidden, width)) is not None:
        raise ValueError(why)
    check_tensor("x", x, torch.float8_e4m3fn, (tokens, hidden))
    fits = x_scales.shape == (tokens, hidden // GROUP) and x_scales.dtype == torch.float32
    require(fits, "x_scales", x_scales, f"float32 {[tokens, hidden // GROUP]}", "the kernel would misread it")
    check_tensor("first", first, torch.float8_e4m3fn, (experts, 2 * width, hidden))
    check_tensor("first_scales", first_scales, torch.float32, (experts, 2 * width // GROUP, hidden // GROUP))
    check_order(rows, sorted_ids, expert_ids, padded)
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, width // GROUP, dtype=torch.float32, device=x.device)
    tensors = x, x_scales, first, first_scales, sorted_ids, expert_ids, padded, values, scales
    arguments = Arguments(*(tensor.data_ptr() for tensor in tensors), tokens * of_token, of_token, *x_scales.stride())
    kernel_for(hidden, width).run(rows, x.device, arguments, num_sms, launch)
    return values, scales
