"""Both products of experts of some tokens in one launch, in CUDA C++: of whole_experts.cu.

SGLang has a launch for each product, in Triton, and two between them. Reading weights is what takes long, and where a launch
ends memory rests until the next one's weights come. Here they come without a break. `gate_up_rows` and `down_blocks` have the
tokens of a prefill.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa_backend.kernels import cuda_source, expert_order
from nsa_backend.kernels.checks import check_tensor
from nsa_backend.kernels.cuda_source import ALIGNMENT, Boxes, CudaKernel, Launch, TensorMap, tensor_map
from nsa_backend.kernels.few_experts import ExpertWeights, check_weights
from nsa_backend.kernels.layer_front_weights import GROUP

SOURCE = Path(__file__).with_name("whole_experts.cu")
ROWS = 16, 32, 64
"""Of a tile, all of one expert."""
MOST_WIDTH = 16 * GROUP
"""Of the experts that are served."""
BOX_ROWS = 64
"""Of weights, that come at once."""
STEPS_OF_PIECE = 8
"""Of a second product, at most."""
MEAN = 0.75
"""Of a tile's rows, how many an expert may have on average: with more, too many have a second tile."""
WARPS = 8
THREADS = WARPS * 32 + 64


@dataclass(frozen=True)
class Form:
    """What a source is compiled for."""

    hidden: int
    width: int
    rows: int

    @property
    def stages(self) -> int:
        """Steps that are there or on their way: of 256 rows of weights, GROUP bytes each."""
        return 4 if self.rows < 64 else 3

    @property
    def each(self) -> int:
        """GROUPs of columns of a second product that are one piece."""
        steps, of_columns = self.hidden // GROUP, self.width // GROUP // 2
        return max(
            each for each in range(1, steps + 1) if not steps % each and (each * of_columns <= STEPS_OF_PIECE or each == 1)
        )

    @property
    def constants(self) -> dict[str, int]:
        """Macros of the source."""
        return {"HIDDEN": self.hidden, "WIDTH": self.width, "ROWS": self.rows, "EACH": self.each, "STAGES": self.stages}

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: steps, with their scales; sums of a warpgroup; what warps write; pieces and barriers."""
        steps = self.stages * ((2 * GROUP + 2 * self.rows) * GROUP + 4 * self.rows * 4 + 4 * 4)
        return steps + self.rows * (128 * 4 + WARPS * 48) + 4 * 8 + 8 + 2 * (self.stages + 4) * 8 + ALIGNMENT


class Arguments(ctypes.Structure):
    """`Experts` of whole_experts.cu, whose size is a multiple of 64."""

    _fields_ = [
        *((name, TensorMap) for name in ("first", "second")),
        *((name, ctypes.c_void_p) for name in ("x", "x_scales", "first_scales", "second_scales", "shares")),
        *((name, ctypes.c_void_p) for name in ("sorted", "experts", "padded", "counters")),
        *((name, ctypes.c_void_p) for name in ("activated", "inner", "inner_scales", "out")),
        *((name, ctypes.c_int) for name in ("choices", "of_token")),
        ("unused", ctypes.c_int * 4),
    ]


def _kernel(device: int, form: Form) -> CudaKernel:
    return cuda_source.kernel_on(device, SOURCE, THREADS, form.shared_bytes, **form.constants)


def compile_ahead(device: torch.device, hidden: int, width: int, rows: Iterable[int]) -> None:
    """Compile it for experts like these and tiles of so many rows: while a forward is captured nothing can be compiled.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    for count in rows:
        _kernel(cuda_source.index_of(device), Form(hidden, width, count))


def problem(hidden: int, width: int) -> str | None:
    """Why experts of this width cannot have the launch, or None."""
    if hidden % (2 * GROUP) or width not in (2 * GROUP, 4 * GROUP, 8 * GROUP, MOST_WIDTH):
        served = f"{2 * GROUP} to {MOST_WIDTH} in powers of two on multiples of {2 * GROUP} are served"
        return f"experts of {width} on hidden states of {hidden}: {served}"
    return None


def most_choices(experts: int) -> int:
    """Of so many experts in all: with more, too many have a second tile of the most rows, and read their weights again."""
    return int(experts * max(ROWS) * MEAN)


def rows_for(choices: int, experts: int) -> int:
    """Of a tile, where tokens have so many choices of so many experts in all."""
    return next((rows for rows in ROWS if choices <= experts * rows * MEAN), max(ROWS))


def ordered(
    x: torch.Tensor, chosen: torch.Tensor, experts: int, width: int, rows: int, *, others: bool = True
) -> expert_order.Order:
    """What `whole_experts` takes: `expert_order.order` in blocks of `rows`, with counters for experts of this width."""
    return expert_order.order(x, chosen, rows, experts, width // GROUP, others=others)


def whole_experts(
    order: expert_order.Order,
    rows: int,
    weights: ExpertWeights,
    shares: torch.Tensor,
    out: torch.Tensor,
    *,
    num_sms: int | None = None,
    launch: Launch | None = None,
    boxes: Boxes = tensor_map,
) -> torch.Tensor:
    """`out`, with what experts give for each choice that has a row, times its share; zeros for another GPU's expert.

    Args:
        order: of hidden states and choices, by `ordered`. Its counters are zeros, which only one launch finds.
        rows: of its blocks.
        weights: of experts that `problem` says nothing of.
        shares: float32 [tokens, choices].
        out: bfloat16 [tokens, choices, hidden].
        num_sms: blocks at once; as many as the GPU has SMs if None.
        launch, boxes: in place of a GPU.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
        RuntimeError: NVRTC or the driver refuses.
    """
    (tokens, hidden), experts, each = order.values.shape, len(weights.first), shares.shape[1]
    width, tiles = weights.width, len(order.expert_ids)
    if (why := problem(hidden, width)) is not None:
        raise ValueError(why)
    of_width = width // GROUP
    for name, tensor, dtype, shape in (
        ("values", order.values, torch.float8_e4m3fn, (tokens, hidden)),
        ("scales", order.scales, torch.float32, (tokens, hidden // GROUP)),
        ("padded", order.padded, torch.int32, (1,)),
        ("expert_ids", order.expert_ids, torch.int32, (tiles,)),
        ("counters", order.counters, torch.int32, (1 + tiles * of_width,)),
        ("shares", shares, torch.float32, (tokens, each)),
        ("out", out, torch.bfloat16, (tokens, each, hidden)),
    ):
        check_tensor(name, tensor, dtype, shape)
    check_weights("weights", weights, hidden, width, experts)
    expert_order.check_blocks(shares.numel(), rows, order.sorted_ids, order.expert_ids)
    if tokens:
        num_sms = num_sms or torch.cuda.get_device_properties(out.device).multi_processor_count
        activated = torch.empty(tiles * rows, width, dtype=torch.bfloat16, device=out.device)
        inner = torch.empty(tiles * rows, width, dtype=torch.float8_e4m3fn, device=out.device)
        inner_scales = torch.empty(tiles * rows, of_width, dtype=torch.float32, device=out.device)
        tensors = (
            order.values, order.scales, weights.first_scales, weights.second_scales, shares, order.sorted_ids,
            order.expert_ids, order.padded, order.counters, activated, inner, inner_scales, out,
        )  # fmt: skip
        of_weights = boxes(weights.first.view(-1, hidden), BOX_ROWS), boxes(weights.second.view(-1, width), BOX_ROWS)
        arguments = Arguments(*of_weights, *(tensor.data_ptr() for tensor in tensors), shares.numel(), each)
        launch = launch or _kernel(out.device.index, Form(hidden, width, rows)).launch
        launch((num_sms, 1), arguments)
    return out
