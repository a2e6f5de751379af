"""Experts of few tokens in two launches that tensor cores multiply, in CUDA C++: of early_experts.cu.

`few_experts` computes the same in Triton, of experts of any width. There a thread adds up products of its own, and a program
asks for a few of its weights at a time. Here the second launch has all of its weights on their way while the first one runs.
To ask L2 for weights ahead of registers took longer (`weights_asked_of_l2` of benchmarks/results/experts_0_5_23_h200.json).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_backend.kernels.cuda_source import CudaKernel
from nsa_backend.kernels.few_experts import ExpertWeights, check_experts
from nsa_backend.kernels.layer_front_weights import GROUP, Scales

SOURCE = Path(__file__).with_name("early_experts.cu")
WIDTH = 2 * GROUP
"""Of the experts that are served."""
MOST_EACH = 16
"""Choices of a token, its shared expert among them: a warp each."""
VALUES, WARPS, COLUMNS = 8, 8, 32
"""Of a block: values of gate and of up, and warps of the first launch; values of a token's sum in the second."""
GATE_UP, DOWN = "gate_up", "down"

Launch = Callable[[str, tuple[int, int], ctypes.Structure], None]
"""Runs one of both launches for (blocks, rows)."""


class Weights(ctypes.Structure):
    """`Weights` of early_experts.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("first", "first_scales", "second", "second_scales")]


class Arguments(ctypes.Structure):
    """`Experts` of early_experts.cu."""

    _fields_ = [
        *((name, Weights) for name in ("chosen_ones", "shared_one")),
        *((name, ctypes.c_void_p) for name in ("x", "chosen", "shares", "inner", "out")),
        ("factor", ctypes.c_float),
        ("unused", ctypes.c_int),
    ]


def constants(which: str, hidden: int, choices: int, shared: int, *, powers: bool) -> dict[str, int]:
    """Macros of the source for one of both launches."""
    threads, of_sm = (WARPS * 32, 3) if which == GATE_UP else ((choices + shared) * 32, 2)
    return {
        "HIDDEN": hidden, "WIDTH": WIDTH, "CHOSEN": choices, "WITH_SHARED": shared, "POWERS": int(powers), "THREADS": threads,
        "BLOCKS_OF_SM": of_sm,
    }  # fmt: skip


def shared_bytes(which: str, hidden: int, each: int) -> int:
    """Shared memory of a block of one of both launches."""
    return 16 + (hidden * 2 + WARPS * 2 * VALUES * 4 if which == GATE_UP else each * (WIDTH * 2 + COLUMNS * 4))


@functools.cache
def compiled_on(device: int, which: str, hidden: int, choices: int, shared: int, *, powers: bool) -> CudaKernel:
    """One of both launches, compiled at its first call on a device."""
    with torch.cuda.device(device):
        macros = constants(which, hidden, choices, shared, powers=powers)
        return CudaKernel(SOURCE, which, macros, macros["THREADS"], shared_bytes(which, hidden, choices + shared))


def problem(hidden: int, width: int, choices: int, shared: int) -> str | None:
    """Why experts of this width on hidden states of that one cannot have the launches, or None."""
    if hidden % (WARPS * GROUP) or width != WIDTH:
        return f"hidden states of {hidden} and experts of {width}: multiples of {WARPS * GROUP} and {WIDTH} are served"
    if choices + shared > MOST_EACH:
        return f"{choices + shared} experts of a token: up to {MOST_EACH} are served"
    return None


def early_experts(
    x: torch.Tensor,
    experts: ExpertWeights,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    *,
    factor: float = 1.0,
    shared: ExpertWeights | None = None,
    out: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """factor * the sum over a token's choices of share * down(silu(gate) * up), by block-FP8 experts; two launches.

    Weights, choices and shares are read before the kernel ahead of the second launch, which is the first, has ended.

    Args:
        x, experts, shares, chosen, factor, shared, out: as `few_experts` has them.
        launch: in place of a GPU.

    Returns:
        `out`, rounded where that of `few_experts` is; sums are in another order.

    Raises:
        ValueError: as `few_experts` does, or `problem` says why the launches cannot have them.
        RuntimeError: NVRTC or the driver refuses.
    """
    (tokens, hidden), choices = x.shape, chosen.shape[1]
    of_shared = int(shared is not None)
    if (why := problem(hidden, experts.width, choices, of_shared)) is not None:
        raise ValueError(why)
    out = torch.empty_like(x) if out is None else out
    check_experts(x, experts, shares, chosen, shared, out)
    if not tokens:
        return out
    inner = torch.empty(tokens, choices + of_shared, WIDTH, dtype=torch.bfloat16, device=x.device)
    other = shared or experts  # not read without a shared one
    arguments = Arguments(
        *(Weights(*(tensor.data_ptr() for tensor in weights[:4])) for weights in (experts, other)),
        *(tensor.data_ptr() for tensor in (x, chosen, shares, inner, out)), factor,
    )  # fmt: skip
    powers = by_powers(shared)

    def on_gpu(which: str, grid: tuple[int, int], arguments: Arguments) -> None:
        compiled_on(x.device.index, which, hidden, choices, of_shared, powers=powers).launch(grid, arguments)

    launch = launch or on_gpu
    launch(GATE_UP, (WIDTH // VALUES, tokens * (choices + of_shared)), arguments)
    launch(DOWN, (hidden // COLUMNS, tokens), arguments)
    return out


def by_powers(shared: ExpertWeights | None) -> bool:
    """Whether a shared expert's inputs have scales that are powers of two."""
    return shared is not None and shared.scales is Scales.POWERS_OF_TWO
