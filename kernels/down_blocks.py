"""The second product of experts of many tokens, in CUDA C++: of down_blocks.cu, behind `gate_up_rows`.

`down_rows` computes the same in Triton, in smaller blocks of rows.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from nsa_backend.kernels.checks import check_tensor
from nsa_backend.kernels.expert_tiles import BESIDE_PANELS, PANEL, Kernel, Launch, check_order
from nsa_backend.kernels.layer_front_weights import GROUP

STAGES = 3
MOST_WIDTH = 2 * GROUP
"""Rows of two tiles must fit shared memory."""
PARTS = 4
"""Of a block's rows, at most: tiles of many columns would leave SMs without work at the end."""


class Arguments(ctypes.Structure):
    """`Multiply` of down_blocks.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "scales", "second", "second_scales", "shares")),
        *((name, ctypes.c_void_p) for name in ("sorted", "experts", "padded", "out")),
        ("choices", ctypes.c_int),
    ]


def problem(hidden: int, width: int) -> str | None:
    """Why experts of this width cannot have the launch, or None."""
    if hidden % GROUP or width not in range(GROUP, MOST_WIDTH + 1, GROUP):
        return f"experts of {width} on hidden states of {hidden}: up to {MOST_WIDTH}, and multiples of {GROUP}, are served"
    return None


def kernel_for(hidden: int, width: int) -> Kernel:
    """Of experts of this width; a part of a block's rows has some of the columns."""
    parts = next(parts for parts in range(PARTS, 0, -1) if hidden // GROUP % parts == 0)
    panels = (STAGES + 2) * (width // GROUP) + 2 * 2  # of weights, of rows, and of what is written
    return Kernel(
        Path(__file__).with_name("down_blocks.cu"), hidden, width, parts, panels * PANEL + (STAGES * 2 + 2) * 8 + BESIDE_PANELS
    )


def down_blocks(
    values: torch.Tensor,
    scales: torch.Tensor,
    second: torch.Tensor,
    second_scales: torch.Tensor,
    shares: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded: torch.Tensor,
    out: torch.Tensor,
    *,
    num_sms: int | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """`out`, with what experts give for each choice of a token, times its share; zeros for an expert of another GPU.

    Args:
        values: float8_e4m3fn [rows, width], in blocks of BLOCK by expert.
        scales: float32 [rows, width / GROUP].
        second, second_scales, shares: as `down_rows` has them.
        sorted_ids: int32, at least [rows]: the choice of each row, the number of choices or more in padding, which comes behind
            the other rows of its block.
        expert_ids: int32 [blocks], the expert of each block; -1 is one of another GPU.
        padded: int32 [1], rows of all blocks.
        out: bfloat16 [tokens, choices, hidden].
        num_sms: blocks at once; as many as the GPU has SMs if None.
        launch: what runs the kernel; a GPU if None, an emulation in tests.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
        RuntimeError: NVRTC or the driver refuses.
    """
    (rows, width), (experts, hidden) = values.shape, second.shape[:2]
    if (why := problem(hidden, width)) is not None:
        raise ValueError(why)
    check_tensor("values", values, torch.float8_e4m3fn, (rows, width))
    check_tensor("scales", scales, torch.float32, (rows, width // GROUP))
    check_tensor("second", second, torch.float8_e4m3fn, (experts, hidden, width))
    check_tensor("second_scales", second_scales, torch.float32, (experts, hidden // GROUP, width // GROUP))
    check_tensor("shares", shares, torch.float32, tuple(shares.shape))
    check_tensor("out", out, torch.bfloat16, (*shares.shape, hidden))
    check_order(rows, sorted_ids, expert_ids, padded)
    tensors = values, scales, second, second_scales, shares, sorted_ids, expert_ids, padded, out
    arguments = Arguments(*(tensor.data_ptr() for tensor in tensors), shares.numel())
    kernel_for(hidden, width).run(rows, values.device, arguments, num_sms, launch)
    return out
