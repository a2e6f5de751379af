"""The first product of experts of many tokens with what lies between both products, in one launch: of gate_up_rows.cu.

SGLang has a launch for the product, in Triton, and two for the activation and its quantisation, of which `expert_activation`
makes one. Here a tile's sums become FP8 values before they leave registers, and two SMs share the weights that they load.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.cuda_source import CudaKernel, TensorMap, tensor_map
from nsa_backend.kernels.expert_order import check_blocks
from nsa_backend.kernels.layer_front_weights import GROUP

SOURCE = Path(__file__).with_name("gate_up_rows.cu")
BLOCK = 128
"""Rows of a block of the order, all of one expert."""
WIDTH = 2 * GROUP
"""Of the experts that are served."""
THREADS = 384
STAGES = 4
BOX_ROWS = 64
"""Of weights that come at once."""


class Arguments(ctypes.Structure):
    """`Multiply` of gate_up_rows.cu, whose size is a multiple of 64."""

    _fields_ = [
        ("first", TensorMap),
        *((name, ctypes.c_void_p) for name in ("x", "x_scales", "first_scales", "sorted", "experts", "padded")),
        *((name, ctypes.c_void_p) for name in ("values", "scales")),
        *((name, ctypes.c_int) for name in ("choices", "of_token", "scales_token", "scales_step")),
        ("unused", ctypes.c_int * 12),
    ]


Launch = Callable[[tuple[int, int], ctypes.Structure], None]
"""Runs a kernel for (blocks, 1)."""


def problem(hidden: int, width: int) -> str | None:
    """Why experts of this width cannot have the launch, or None."""
    if hidden % GROUP or width != WIDTH:
        return f"experts of {width} on hidden states of {hidden}: {WIDTH} on multiples of {GROUP} are served"
    return None


def constants(hidden: int) -> dict[str, int]:
    """Macros of the source."""
    return {"HIDDEN": hidden}


def shared_bytes() -> int:
    """Shared memory of a block: of each stage panels of rows, of the gate and of the projection up, scales and two barriers."""
    return STAGES * (3 * BLOCK * GROUP + (BLOCK + 4) * 4 + 2 * 8) + 1024


@functools.cache
def compiled_on(hidden: int, device: int) -> CudaKernel:
    """The kernel, compiled at its first call on a device."""
    with torch.cuda.device(device):
        return CudaKernel(SOURCE, "multiply", constants(hidden), THREADS, shared_bytes())


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
    boxes: Callable[[torch.Tensor, int], TensorMap] = tensor_map,
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
        boxes: what describes weights in boxes of so many rows for it.

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
    check_tensor("padded", padded, torch.int32, (1,))
    check_tensor("expert_ids", expert_ids, torch.int32, (len(expert_ids),))
    check_blocks(rows, BLOCK, sorted_ids, expert_ids)
    if rows % BLOCK:
        raise ValueError(f"{rows} rows: blocks have {BLOCK} each")
    values = torch.empty(rows, WIDTH, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, WIDTH // GROUP, dtype=torch.float32, device=x.device)
    if rows:
        tensors = x, x_scales, first_scales, sorted_ids, expert_ids, padded, values, scales
        pointers = (tensor.data_ptr() for tensor in tensors)
        weights = boxes(first.view(-1, hidden), BOX_ROWS)
        arguments = Arguments(weights, *pointers, tokens * of_token, of_token, *x_scales.stride())
        num_sms = num_sms or torch.cuda.get_device_properties(x.device).multi_processor_count
        launch = launch or compiled_on(hidden, x.device.index).launch
        launch((2 * min(num_sms // 2, blocks(rows, BLOCK)), 1), arguments)
    return values, scales
