"""A layer's router of up to 32 tokens in one launch: the logits of its experts, and which ones each token chooses; router.cu.

SGLang has a product, with many rows a launch that adds up its parts, and one that chooses. Here weights come while the kernel
ahead runs, and whoever adds up a token's logits chooses for it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from nsa_backend.kernels import cuda_source
from nsa_backend.kernels.blocks import blocks, power_of_two
from nsa_backend.kernels.checks import require
from nsa_backend.kernels.cuda_source import CudaKernel, Launch

SOURCE = Path(__file__).with_name("router.cu")
EXPERTS = 256
"""That a layer has on all GPUs, without a shared one."""
MOST_ROWS = 32
"""With up to 128, in blocks of 32 experts, an H200 gained nothing behind a norm and in servers."""
COLUMNS = 16
"""Experts of a block."""
INNER = 32
"""Values of a row that a warp multiplies at once."""
MOST_CHUNKS = 8
"""Of them, that registers of a warp hold."""
MOST_CHOSEN = 8


@dataclass(frozen=True)
class Choice:
    """How a token chooses its experts."""

    chosen: int = 8
    groups: int = 1  # of the experts; the two largest scores of a group say which are kept
    kept: int = 1
    shared: bool = False  # whether every token has one expert more, numbered behind the others


@dataclass(frozen=True)
class Division:
    """How a launch is divided."""

    parts: int = 4  # of the hidden dimension, of which a block has one
    warps: int = 8  # that divide a block's part

    def chunks(self, hidden: int) -> int:
        """Of a warp's part of a row; 0 where this cannot divide rows of so many values."""
        chunks, left = divmod(hidden, self.parts * self.warps * INNER)
        return 0 if left or chunks > MOST_CHUNKS else chunks

    @property
    def blocks(self) -> int:
        """Of a launch."""
        return EXPERTS // COLUMNS * self.parts

    def shared_bytes(self, tiles: int) -> int:
        """Shared memory of a block: SHARED_BYTES of the source."""
        return 16 + self.warps * tiles * 8 * (COLUMNS + 4) * 4


SERVED = Division()


class Routed(NamedTuple):
    """What tokens chose."""

    logits: torch.Tensor  # float32 [rows, EXPERTS]
    shares: torch.Tensor  # float32 [rows, choices], those of a shared expert last
    chosen: torch.Tensor  # int32 [rows, choices], the largest score first


class Arguments(ctypes.Structure):
    """`Router` of router.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("hidden", "weight", "bias", "sums", "logits", "shares", "chosen", "arrived")),
        *((name, ctypes.c_float) for name in ("factor", "of_shared")),
        *((name, ctypes.c_int) for name in ("rows", "unused")),
    ]


def constants(hidden: int, choice: Choice, rows: int, division: Division = SERVED) -> dict[str, int]:
    """Macros of the source for up to so many rows, of which it is compiled for 8, 16 and 32."""
    return {
        "HIDDEN": hidden, "EXPERTS": EXPERTS, "PARTS": division.parts, "WARPS": division.warps, "ROW_TILES": tiles_of(rows),
        "EXPERT_GROUPS": choice.groups, "GROUPS_KEPT": choice.kept, "CHOSEN": choice.chosen, "WITH_SHARED": int(choice.shared),
    }  # fmt: skip


def tiles_of(rows: int) -> int:
    """Tiles of eight rows that a launch of so many is compiled for."""
    return power_of_two(blocks(rows, 8))


def _kernel(device: int, hidden: int, choice: Choice, rows: int, division: Division) -> CudaKernel:
    block = division.warps * 32, division.shared_bytes(tiles_of(rows))
    return cuda_source.kernel_on(device, SOURCE, *block, **constants(hidden, choice, rows, division))


def compile_ahead(device: torch.device, hidden: int, choice: Choice) -> None:
    """Compile it for every number of rows: while a forward is captured nothing can be compiled.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    for rows in range(8, MOST_ROWS + 1, 8):
        _kernel(cuda_source.index_of(device), hidden, choice, rows, SERVED)


def problem(experts: int, hidden: int, choice: Choice) -> str | None:
    """Why a router of so many experts on hidden states of that width is not served, or None."""
    if experts != EXPERTS:
        return f"{experts} experts: {EXPERTS} are served"
    if not SERVED.chunks(hidden):
        step = SERVED.parts * SERVED.warps * INNER
        return f"hidden states of {hidden} values: multiples of {step} up to {MOST_CHUNKS} times that are served"
    if choice.groups not in (1, 2, 4, 8, 16, 32) or not 0 < choice.kept <= choice.groups:
        return f"{choice.kept} of {choice.groups} groups of experts: 1, 2, 4, 8, 16 or 32 groups are served"
    if not 0 < choice.chosen <= min(MOST_CHOSEN, EXPERTS // choice.groups * choice.kept):
        return f"{choice.chosen} experts a token: up to {MOST_CHOSEN} are served"
    return None


def counter(device: torch.device) -> torch.Tensor:
    """What `route` counts the blocks of its launches with: int32 [1], for one layer's launches, which follow one another."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def route(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    choice: Choice,
    arrived: torch.Tensor,
    *,
    factor: float = 1.0,
    of_shared: float = 1.0,
    division: Division = SERVED,
    launch: Launch | None = None,
) -> Routed:
    """The experts that tokens choose, by the sigmoid of their logits and a bias that no share has; one launch.

    Groups, ties and shares are those of SGLang's `biased_grouped_topk`: of equal scores the first expert, of equal groups the
    first one; a score that is no number comes last. Weights are read before the kernel ahead has ended, which must not write
    them. The kernel behind this one may begin early, as behind SGLang's.

    Args:
        hidden: bfloat16 [rows, hidden], contiguous, 1 to MOST_ROWS rows.
        weight: bfloat16 [EXPERTS, hidden], contiguous.
        bias: float32 [EXPERTS], contiguous.
        choice: of each token.
        arrived: what `counter` gives.
        factor: times the shares, which add up to it.
        of_shared: a shared expert's share.
        division: of the launch.
        launch: in place of a GPU.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
        RuntimeError: NVRTC or the driver refuses.
    """
    rows, width = hidden.shape
    if (why := problem(len(weight), width, choice)) is not None:
        raise ValueError(why)
    for name, tensor, dtype, fits, shape in (
        ("hidden", hidden, torch.bfloat16, 0 < rows <= MOST_ROWS, f"[1 to {MOST_ROWS}, {width}]"),
        ("weight", weight, torch.bfloat16, weight.shape == (EXPERTS, width), f"[{EXPERTS}, {width}]"),
        ("bias", bias, torch.float32, bias.shape == (EXPERTS,), f"[{EXPERTS}]"),
        ("arrived", arrived, torch.int32, arrived.shape == (1,), "[1]"),
    ):
        fits = fits and tensor.dtype == dtype and tensor.is_contiguous()
        require(fits, name, tensor, f"contiguous {dtype} {shape}", "the kernel would misread it")
    each = choice.chosen + choice.shared
    sums = torch.empty(division.parts, rows, EXPERTS, device=hidden.device)
    logits = torch.empty(rows, EXPERTS, dtype=torch.float32, device=hidden.device)
    shares = torch.empty(rows, each, dtype=torch.float32, device=hidden.device)
    chosen = torch.empty(rows, each, dtype=torch.int32, device=hidden.device)
    tensors = hidden, weight, bias, sums, logits, shares, chosen, arrived
    arguments = Arguments(*(tensor.data_ptr() for tensor in tensors), factor, of_shared, rows)
    launch = launch or _kernel(hidden.device.index, width, choice, rows, division).launch
    launch((division.blocks, 1), arguments)
    return Routed(logits, shares, chosen)
