"""The first product of experts of many tokens with what lies between both products, in one launch: of gate_up_rows.cu.

SGLang has a launch for the product, in Triton, and two for the activation and its quantisation, of which `expert_activation`
makes one. Here a tile's sums become FP8 values before they leave registers, and two SMs share the weights that they load.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.cuda_source import Boxes, Launch, TensorMap, tensor_map
from nsa_backend.kernels.expert_tiles import BLOCK, BOX_ROWS, WIDTH, Kernel, check_order
from nsa_backend.kernels.layer_front_weights import GROUP

STAGES = 4


class Arguments(ctypes.Structure):
    """`Multiply` of gate_up_rows.cu, whose size is a multiple of 64."""

    _fields_ = [
        ("first", TensorMap),
        *((name, ctypes.c_void_p) for name in ("x", "x_scales", "first_scales", "sorted", "experts", "padded")),
        *((name, ctypes.c_void_p) for name in ("values", "scales")),
        *((name, ctypes.c_int) for name in ("choices", "of_token", "scales_token", "scales_step")),
        ("unused", ctypes.c_int * 12),
    ]


def problem(hidden: int, width: int) -> str | None:
    """Why experts of this width cannot have the launch, or None."""
    if hidden % GROUP or width != WIDTH:
        return f"experts of {width} on hidden states of {hidden}: {WIDTH} on multiples of {GROUP} are served"
    return None


def kernel_for(hidden: int) -> Kernel:
    """On hidden states of this width: a stage has rows, weights of the gate and of the projection up, and scales of all."""
    return Kernel(Path(__file__).with_name("gate_up_rows.cu"), hidden, 3 * STAGES, 2 * STAGES, STAGES * (BLOCK + 4) * 4)


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
    boxes: Boxes = tensor_map,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of FP8 and their scales for the second product of experts: what the first one gives, activated and quantised.

    Args:
        x: float8_e4m3fn [tokens, hidden].
        x_scales: float32 [tokens, hidden / GROUP], in any layout: SGLang has those of a token or of a group side by side.
        first: float8_e4m3fn [experts, 2 * WIDTH, hidden], gate before up.
        first_scales: float32 [experts, 2 * WIDTH / GROUP, hidden / GROUP].
        of_token: choices of a token.
        sorted_ids: int32, at least [rows]: the choice of each row, the number of choices or more in padding, which comes behind
            the other rows of its block.
        expert_ids: int32 [blocks], the expert of each block, those of one side by side; -1 is another GPU's.
        padded: int32 [1], rows of all blocks.
        rows: most of them, a multiple of BLOCK.
        num_sms: blocks at once, an even number; as many as the GPU has SMs if None.
        launch: what runs the kernel; a GPU if None, an emulation in tests.
        boxes: what describes weights for it.

    Returns:
        float8_e4m3fn [rows, WIDTH] and float32 [rows, WIDTH / GROUP], exact scales. Rows of padding and of another GPU's
        experts are left as they are.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
        RuntimeError: NVRTC or the driver refuses.
    """
    (tokens, hidden), (experts, both) = x.shape, first.shape[:2]
    if (why := problem(hidden, both // 2)) is not None:
        raise ValueError(why)
    check_tensor("x", x, torch.float8_e4m3fn, (tokens, hidden))
    fits = x_scales.shape == (tokens, hidden // GROUP) and x_scales.dtype == torch.float32
    require(fits, "x_scales", x_scales, f"float32 {[tokens, hidden // GROUP]}", "the kernel would misread it")
    check_tensor("first", first, torch.float8_e4m3fn, (experts, 2 * WIDTH, hidden))
    check_tensor("first_scales", first_scales, torch.float32, (experts, 2 * WIDTH // GROUP, hidden // GROUP))
    check_order(rows, sorted_ids, expert_ids, padded)
    values = torch.empty(rows, WIDTH, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, WIDTH // GROUP, dtype=torch.float32, device=x.device)
    if rows:
        tensors = x, x_scales, first_scales, sorted_ids, expert_ids, padded, values, scales
        pointers = (tensor.data_ptr() for tensor in tensors)
        weights = boxes(first.view(-1, hidden), BOX_ROWS)
        arguments = Arguments(weights, *pointers, tokens * of_token, of_token, *x_scales.stride())
        kernel_for(hidden).run(rows, x.device, arguments, num_sms, launch)
    return values, scales
