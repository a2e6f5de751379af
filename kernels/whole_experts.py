"""Both products of experts of up to 128 tokens in one launch, in CUDA C++: of whole_experts.cu.

SGLang has a launch for each product, in Triton, and two between them. Reading weights is what takes long, and where a launch
ends memory rests until the next one's weights come. Here they come without a break. `gate_up_rows` and `down_blocks` have the
tokens of a prefill.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from nsa_backend.kernels.checks import check_tensor
from nsa_backend.kernels.cuda_source import ALIGNMENT, Boxes, CudaKernel, Launch, TensorMap, tensor_map
from nsa_backend.kernels.expert_order import Order, check_blocks
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.layer_front_weights import GROUP

SOURCE = Path(__file__).with_name("whole_experts.cu")
WIDTH = 2 * GROUP
"""Of the experts that are served."""
HIDDEN = 8 * GROUP
"""Of hidden states a multiple."""
BLOCK = 16
"""Rows of a tile, all of one expert."""
BOX_ROWS = 64
"""Of weights, that come at once."""
STAGES = 4
"""Steps of 256 rows of weights, GROUP bytes each, that are there or on their way."""
WARPS = 8
THREADS = WARPS * 32 + 64
PIECES = 4 + 8
"""Of a tile, that blocks take: of its first product and of its second."""


class Arguments(ctypes.Structure):
    """`Experts` of whole_experts.cu, whose size is a multiple of 64."""

    _fields_ = [
        *((name, TensorMap) for name in ("first", "second")),
        *((name, ctypes.c_void_p) for name in ("x", "x_scales", "first_scales", "second_scales", "shares")),
        *((name, ctypes.c_void_p) for name in ("sorted", "experts", "padded", "taken", "inner", "out")),
        *((name, ctypes.c_int) for name in ("choices", "of_token")),
        ("unused", ctypes.c_int * 8),
    ]


def constants(hidden: int, stages: int = STAGES) -> dict[str, int]:
    """Macros of the source."""
    return {"HIDDEN": hidden, "ROWS": BLOCK, "STAGES": stages}


def shared_bytes(stages: int = STAGES) -> int:
    """Shared memory of a block: steps, with their scales; activations of two pieces; sums of a warpgroup; what warps write."""
    steps = stages * ((WIDTH + 2 * BLOCK) * GROUP + (2 * BLOCK + 4) * 4)
    activations = 2 * (BLOCK * WIDTH * 3 + 2 * BLOCK * 4 + 2 * BLOCK * 4)
    of_warps = BLOCK * 128 * 4 + WARPS * BLOCK * 48
    return steps + activations + of_warps + 4 * 8 + 2 * (stages + 2 + 4) * 8 + ALIGNMENT


@functools.cache
def compiled_on(device: int, hidden: int, stages: int = STAGES) -> CudaKernel:
    """The kernel for hidden states of this width, compiled at its first call on a device."""
    with torch.cuda.device(device):
        return CudaKernel(SOURCE, SOURCE.stem, constants(hidden, stages), THREADS, shared_bytes(stages))


def compile_ahead(device: torch.device, hidden: int) -> None:
    """Compile it for hidden states of this width: while a forward is captured nothing can be compiled.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    compiled_on(torch.cuda.current_device() if device.index is None else device.index, hidden)


def problem(hidden: int, width: int) -> str | None:
    """Why experts of this width cannot have the launch, or None."""
    if hidden % HIDDEN or width != WIDTH:
        return f"experts of {width} on hidden states of {hidden}: {WIDTH} on multiples of {HIDDEN} are served"
    return None


def whole_experts(
    order: Order,
    weights: ExpertWeights,
    shares: torch.Tensor,
    out: torch.Tensor,
    *,
    num_sms: int | None = None,
    stages: int = STAGES,
    launch: Launch | None = None,
    boxes: Boxes = tensor_map,
) -> torch.Tensor:
    """`out`, with what experts give for each choice of a token, times its share; zeros for an expert of another GPU.

    Args:
        order: of hidden states and choices in blocks of BLOCK. Its counters are zeros, which only one launch finds.
        weights: of experts of WIDTH.
        shares: float32 [tokens, choices].
        out: bfloat16 [tokens, choices, hidden].
        num_sms: blocks at once; as many as the GPU has SMs if None.
        stages: see STAGES.
        launch, boxes: in place of a GPU.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
        RuntimeError: NVRTC or the driver refuses.
    """
    (tokens, hidden), (experts, both), each = order.values.shape, weights.first.shape[:2], shares.shape[1]
    if (why := problem(hidden, both // 2)) is not None:
        raise ValueError(why)
    groups, rows = hidden // GROUP, len(order.sorted_ids)
    for name, tensor, dtype, shape in (
        ("values", order.values, torch.float8_e4m3fn, (tokens, hidden)),
        ("scales", order.scales, torch.float32, (tokens, groups)),
        ("padded", order.padded, torch.int32, (1,)),
        ("expert_ids", order.expert_ids, torch.int32, (len(order.expert_ids),)),
        ("counters", order.counters, torch.int32, (1 + len(order.expert_ids),)),
        ("first", weights.first, torch.float8_e4m3fn, (experts, 2 * WIDTH, hidden)),
        ("first_scales", weights.first_scales, torch.float32, (experts, 2 * WIDTH // GROUP, groups)),
        ("second", weights.second, torch.float8_e4m3fn, (experts, hidden, WIDTH)),
        ("second_scales", weights.second_scales, torch.float32, (experts, groups, WIDTH // GROUP)),
        ("shares", shares, torch.float32, (tokens, each)),
        ("out", out, torch.bfloat16, (tokens, each, hidden)),
    ):
        check_tensor(name, tensor, dtype, shape)
    check_blocks(shares.numel(), BLOCK, order.sorted_ids, order.expert_ids)
    if tokens:
        num_sms = num_sms or torch.cuda.get_device_properties(out.device).multi_processor_count
        inner = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device=out.device)
        tensors = (
            order.values, order.scales, weights.first_scales, weights.second_scales, shares, order.sorted_ids,
            order.expert_ids, order.padded, order.counters, inner, out,
        )  # fmt: skip
        of_weights = boxes(weights.first.view(-1, hidden), BOX_ROWS), boxes(weights.second.view(-1, WIDTH), BOX_ROWS)
        arguments = Arguments(*of_weights, *(tensor.data_ptr() for tensor in tensors), shares.numel(), each)
        launch = launch or compiled_on(out.device.index, hidden, stages).launch
        launch((min(num_sms, PIECES * len(order.expert_ids)), 1), arguments)
    return out
