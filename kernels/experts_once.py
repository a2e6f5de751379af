"""Experts of up to 16 tokens in two launches that read an expert's weights once, in CUDA C++: of experts_once.cu.

`early_experts` reads them once for each token that chose the expert, and has less to find out before it asks for them.
Values and their order are the same in both.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from nsa_backend.kernels import early_experts
from nsa_backend.kernels.cuda_source import CudaKernel
from nsa_backend.kernels.early_experts import GATE_UP, VALUES, WARPS, WIDTH, Launch, by_powers, launched
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.layer_front_weights import GROUP

SOURCE = Path(__file__).with_name("experts_once.cu")
MOST_TOKENS, TILE = 16, 8
"""Of a call, and those that a warp multiplies at once: launches are compiled for either number."""
MOST_EACH = 10
"""Choices of a token, its shared expert among them."""
COLUMNS = 16
"""Values of a token's sum that a block of the second launch has."""
SUM_WARPS = {TILE: 6, MOST_TOKENS: 5}
"""Of such a block, by the most tokens: with more, registers are too few for scales that come early."""
BLOCKS_OF_SM = {TILE: 3, MOST_TOKENS: 2}
"""Of the first launch: three would leave weights of 16 tokens no registers while values are quantised."""


def constants(which: str, hidden: int, choices: int, shared: int, tokens: int = TILE, *, powers: bool) -> dict[str, int]:
    """Macros of the source for one of both launches of up to so many tokens, TILE or MOST_TOKENS."""
    threads, of_sm = (WARPS * 32, BLOCKS_OF_SM[tokens]) if which == GATE_UP else (SUM_WARPS[tokens] * 32, 4)
    macros = early_experts.constants(which, hidden, choices, shared, powers=powers)
    return macros | {"THREADS": threads, "BLOCKS_OF_SM": of_sm, "TOKENS": tokens}


def shared_bytes(which: str, hidden: int, choices: int, shared: int, tokens: int = TILE) -> int:
    """Shared memory of a block of one of both launches: GATE_UP_BYTES and DOWN_BYTES of the source, and its alignment."""
    if which == GATE_UP:
        return 16 + TILE * (hidden + WARPS * (64 + 2 * VALUES * 4)) + hidden // GROUP * (TILE + 2) * 4
    pairs, slots, apart = tokens * choices, tokens * (choices + shared), 64 if tokens == TILE else 0
    return 16 + slots * (WIDTH + apart + WIDTH // GROUP * 4 + COLUMNS * 4) + 4 * pairs * 4 + (pairs + 31) // 32 * 4


@functools.cache
def compiled_on(device: int, which: str, hidden: int, choices: int, shared: int, tokens: int, *, powers: bool) -> CudaKernel:
    """One of both launches, compiled at its first call on a device."""
    with torch.cuda.device(device):
        macros = constants(which, hidden, choices, shared, tokens, powers=powers)
        return CudaKernel(SOURCE, which, macros, macros["THREADS"], shared_bytes(which, hidden, choices, shared, tokens))


def compiled_for(tokens: int) -> int:
    """The number of tokens that launches of so many are compiled for."""
    return TILE if tokens <= TILE else MOST_TOKENS


def problem(hidden: int, width: int, choices: int, shared: int, tokens: int = 1) -> str | None:
    """Why so many tokens of experts of this width on hidden states of that one cannot have the launches, or None."""
    if tokens > MOST_TOKENS:
        return f"{tokens} tokens: up to {MOST_TOKENS} are served"
    if choices + shared > MOST_EACH:
        return f"{choices + shared} experts of a token: up to {MOST_EACH} are served"
    return early_experts.problem(hidden, width, choices, shared)


def experts_once(
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
    """`early_experts` of up to MOST_TOKENS tokens, bit by bit, where tokens that chose the same expert share its weights.

    Args:
        x, experts, shares, chosen, factor, shared, out: as `few_experts` has them.
        launch: in place of a GPU.

    Returns:
        `out`, as `early_experts` does.

    Raises:
        ValueError: as `few_experts` does, or `problem` says why the launches cannot have them.
        RuntimeError: NVRTC or the driver refuses.
    """
    (tokens, hidden), choices = x.shape, chosen.shape[1]
    of_shared = int(shared is not None)
    if (why := problem(hidden, experts.width, choices, of_shared, tokens)) is not None:
        raise ValueError(why)
    powers = by_powers(shared)

    most = compiled_for(tokens)

    def on_gpu(which: str, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        compiled_on(x.device.index, which, hidden, choices, of_shared, most, powers=powers).launch(grid, arguments)

    grids = (WIDTH // VALUES, tokens * choices + of_shared), (hidden // COLUMNS, 1)
    return launched(launch or on_gpu, grids, x, experts, shares, chosen, factor, shared, out)
