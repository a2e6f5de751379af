"""The second product of experts of many tokens, in CUDA C++: of down_blocks.cu, behind `gate_up_rows`.

`down_rows` computes the same in Triton. Here two SMs share the weights that they load, and a row leaves in pieces of 256 bytes.
An H200 takes 0.86 to 0.99 of its time from 2048 to 8192 tokens (`prefill_launches_by_blocks` of
benchmarks/results/experts_0_5_23_h200.json).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from nsa_backend.kernels.cuda_source import Boxes, Launch, TensorMap, tensor_map
from nsa_backend.kernels.down_rows import check_product
from nsa_backend.kernels.expert_tiles import BOX_ROWS, WIDTH, Kernel, check_order
from nsa_backend.kernels.layer_front_weights import GROUP

STAGES = 3
HIDDEN = range(4 * GROUP, 64 * GROUP + 1, 2 * GROUP)
"""A half has two steps of GROUP columns at least, and a lane of a warp the scales of one."""


class Arguments(ctypes.Structure):
    """`Multiply` of down_blocks.cu, whose size is a multiple of 64."""

    _fields_ = [
        ("values", TensorMap),
        ("second", TensorMap),
        *((name, ctypes.c_void_p) for name in ("scales", "second_scales", "shares", "sorted", "experts", "padded", "out")),
        ("choices", ctypes.c_int),
        ("unused", ctypes.c_int),
    ]


def problem(hidden: int, width: int) -> str | None:
    """Why experts of this width cannot have the launch, or None."""
    if hidden not in HIDDEN or width != WIDTH:
        served = f"{WIDTH} on multiples of {HIDDEN.step} from {HIDDEN.start} to {HIDDEN.stop - 1}"
        return f"experts of {width} on hidden states of {hidden}: {served} are served"
    return None


def kernel_for(hidden: int) -> Kernel:
    """On hidden states of this width: panels of stages, of two tiles' rows and, twice as wide, of what two steps write."""
    return Kernel(Path(__file__).with_name("down_blocks.cu"), hidden, (STAGES + 2) * 2 + 2 * 2, 2 * STAGES)


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
    boxes: Boxes = tensor_map,
) -> torch.Tensor:
    """`out`, with what experts give for each choice of a token, times its share; zeros for an expert of another GPU.

    Args:
        values: float8_e4m3fn [rows, WIDTH], in blocks of BLOCK by expert.
        scales: float32 [rows, WIDTH / GROUP].
        second, second_scales, shares: as `down_rows` has them.
        sorted_ids, expert_ids, padded, num_sms, launch, boxes: as `gate_up_rows` has them.
        out: bfloat16 [tokens, choices, hidden].

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
        RuntimeError: NVRTC or the driver refuses.
    """
    (rows, width), hidden = values.shape, second.shape[1]
    if (why := problem(hidden, width)) is not None:
        raise ValueError(why)
    check_product(values, scales, second, second_scales, shares, out)
    check_order(rows, sorted_ids, expert_ids, padded)
    if rows:
        of_rows, of_weights = boxes(values, BOX_ROWS), boxes(second.view(-1, width), BOX_ROWS)
        tensors = scales, second_scales, shares, sorted_ids, expert_ids, padded, out
        arguments = Arguments(of_rows, of_weights, *(tensor.data_ptr() for tensor in tensors), shares.numel())
        kernel_for(hidden).run(rows, values.device, arguments, num_sms, launch)
    return out
