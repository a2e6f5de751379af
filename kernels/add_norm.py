"""What stands between two halves of a layer in one launch: the residual's sum, its RMS norm, and the norm quantised.

SGLang adds and norms in one launch and quantises in another, and its launch lets none begin before it has written. Where the
kernel behind this one is ours, it begins with this one, and asks for its weights.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from nsa_backend.kernels import cuda_source
from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import check_tensor
from nsa_backend.kernels.cuda_source import Launch
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.kernels.projection_inputs import empty_input

SOURCE = Path(__file__).with_name("add_norm.cu")
EACH = 2
"""Of eight values that a thread has."""
WIDEST = 8192
"""Values of a row."""


class AddNorm(ctypes.Structure):
    """`AddNorm` of add_norm.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "residual", "weight", "values", "scales")),
        *((name, ctypes.c_longlong) for name in ("row_stride", "group_stride")),
        ("eps", ctypes.c_float),
        ("before_ours", ctypes.c_int),
    ]


def problem(width: int) -> str | None:
    """Why rows of so many values cannot have the launch, or None."""
    if width % GROUP or not 0 < width <= WIDEST:
        return f"rows of {width} values: groups of {GROUP} up to {WIDEST} are served"
    return None


def constants(width: int, scales: Scales | None) -> dict[str, int]:
    """Macros of the source."""
    flags = {"QUANTISED": int(scales is not None), "POWERS": int(scales is Scales.POWERS_OF_TWO)}
    return {"WIDTH": width, "EACH": EACH} | flags


def block_of(width: int) -> tuple[int, int]:
    """(threads, bytes of shared memory) of a block."""
    warps = blocks(width, 256 * EACH)
    return 32 * warps, 4 * warps


def compile_ahead(device: torch.device, width: int, scales: Scales | None) -> None:
    """Compile it: while a forward is captured nothing can be compiled.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    cuda_source.kernel_on(cuda_source.index_of(device), SOURCE, *block_of(width), **constants(width, scales))


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scales: Scales | None = None,
    *,
    before_ours: bool = False,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Add `x` to `residual`, and have the sum's norm in the place of `x`; one launch.

    Squares of the sum before it is rounded are what is added up, as in FlashInfer's `fused_add_rmsnorm`, in another order.
    The weight is read before the kernel ahead has ended, which must not write it.

    Args:
        x: bfloat16 [rows, width], contiguous; overwritten.
        residual: like `x`; overwritten.
        weight: bfloat16 [width], contiguous.
        eps: added to the mean square.
        scales: of the norm in FP8; None where nobody asks for it.
        before_ours: whether what is launched next on this stream is a kernel of this package that waits for this one.
        launch: in place of a GPU.

    Returns:
        The norm as `projection_inputs.quantise` gives it, and None without `scales`.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why the launch cannot have it.
        RuntimeError: NVRTC or the driver refuses.
    """
    rows, width = x.shape
    for name, tensor, shape in (("x", x, (rows, width)), ("residual", residual, (rows, width)), ("weight", weight, (width,))):
        check_tensor(name, tensor, torch.bfloat16, shape)
    if (why := problem(width)) is not None:
        raise ValueError(why)
    found = empty_input(rows, width, scales, x.device) if scales is not None else None
    if rows:
        written = (0, 0, 0, 0) if found is None else (*(part.data_ptr() for part in found), *found[1].stride())
        arguments = AddNorm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), *written, eps, before_ours)
        macros = constants(width, scales)
        launch = launch or cuda_source.kernel_on(x.device.index, SOURCE, *block_of(width), **macros).launch
        launch((rows, 1), arguments)
    return found
