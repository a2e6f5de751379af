"""Products of few rows with a weight of each head's own, whose weights come while the kernel ahead runs, in CUDA C++.

MLA's query is made ready for attention in one launch, head_queries.cu, where SGLang has a product and a rotation; what
attention gives becomes o_proj's input in another, head_values.cu, where SGLang has a product and a quantisation.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from nsa_backend.kernels import cuda_source
from nsa_backend.kernels.blocks import blocks, power_of_two
from nsa_backend.kernels.checks import require
from nsa_backend.kernels.cuda_source import Launch
from nsa_backend.kernels.layer_front_weights import GROUP, FrontWeights, Scales
from nsa_backend.kernels.projection_inputs import empty_input
from nsa_backend.kernels.rope_quantise import Turned, turned

QUERIES = Path(__file__).with_name("head_queries.cu")
VALUES = Path(__file__).with_name("head_values.cu")
MOST_ROWS = 32
"""With all of them an H200 was faster than with what is replaced (`heads_beside_sglang` of attention_0_5_23_h200.json)."""
TILE = 8
"""Rows that tensor cores multiply at once."""
THREADS = 128
LATENT = 512
"""Values of a head that attention gives, and that it takes of a query."""
OF_WARP = 16
"""Columns of a warp."""
MLA_TOGETHER = 4
"""Heads that a warp turns."""
MOST_HEADS = 16
"""Of a rank; more were not timed."""
TIMED_QUERIES = 128, 192
"""Values of a head that are not turned, with which an H200 was faster than with what queries replace."""
MISREAD = "the kernel would misread it"


class Queries(ctypes.Structure):
    """`Queries` of head_queries.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("nope", "weight", "out")),
        *((name, ctypes.c_longlong) for name in ("row_bytes", "head_bytes", "weight_head_bytes", "weight_column_bytes")),
        *((name, ctypes.c_int) for name in ("rows", "turning")),
        ("mla", Turned),
    ]


class Values(ctypes.Structure):
    """`Values` of head_values.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attended", "weight", "out", "scales")),
        *((name, ctypes.c_longlong) for name in ("row_bytes", "head_bytes", "weight_head_bytes", "weight_column_bytes")),
        *((name, ctypes.c_longlong) for name in ("out_row", "scales_row", "scales_group")),
        *((name, ctypes.c_int) for name in ("rows", "before_ours")),
    ]


def tiles_of(rows: int) -> int:
    """Of TILE rows, that a launch of so many rows is compiled for."""
    return power_of_two(blocks(rows, TILE))


def query_problem(weight: torch.Tensor) -> str | None:
    """Why a query cannot be multiplied by SGLang's w_kc, [heads, values of a head, LATENT], here, or None."""
    return _problem(weight, not weight.shape[1] % 32 and weight.shape[2] == LATENT)


def value_problem(weight: torch.Tensor) -> str | None:
    """Why attended latents cannot be multiplied by SGLang's w_vc, [heads, LATENT, values of a head], here, or None."""
    return _problem(weight, weight.shape[1] == LATENT and weight.shape[2] > 0 and not weight.shape[2] % GROUP)


def served_queries(weight: torch.Tensor) -> int:
    """Rows up to which a layer with such a weight has `head_queries`."""
    return MOST_ROWS if query_problem(weight) is None and weight.shape[1] in TIMED_QUERIES else 0


def served_values(weight: torch.Tensor) -> int:
    """Rows up to which a layer with such a weight has `head_values`."""
    return MOST_ROWS if value_problem(weight) is None else 0


def _problem(weight: torch.Tensor, fits: bool) -> str | None:
    heads = len(weight)
    if weight.dtype != torch.bfloat16 or not fits or heads > MOST_HEADS:
        return f"{heads} heads with weights of {weight.dtype} {list(weight.shape[1:])}: others were not timed"
    if weight.stride(1) != 1 or weight.stride(0) % 8 or weight.stride(2) % 8 or weight.data_ptr() % 16:
        return f"weights have strides {weight.stride()}: columns are dense in the weights that are served"
    return None


def query_constants(inner: int, rows: int, *, neox: bool) -> dict[str, int]:
    """Macros of head_queries.cu, for heads of so many values that are not turned."""
    return {"NOPE": inner, "LATENT": LATENT, "ROW_TILES": tiles_of(rows), "NEOX": int(neox)}


def value_constants(width: int, rows: int, scales: Scales) -> dict[str, int]:
    """Macros of head_values.cu, for heads of so many values."""
    powers = int(scales is Scales.POWERS_OF_TWO)
    return {"LATENT": LATENT, "WIDTH": width, "ROW_TILES": tiles_of(rows), "POWERS": powers}


def value_shared_bytes(rows: int) -> int:
    """Shared memory of a block of head_values.cu: SHARED_BYTES of the source."""
    padded = tiles_of(rows) * TILE
    return 4 * padded * (OF_WARP + 4) * 4 + GROUP // OF_WARP * padded * 4 + 16


def compile_queries_ahead(weight: torch.Tensor, *, neox: bool) -> None:
    """Compile for every number of rows: while a forward is captured nothing can be compiled.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    for rows in range(TILE, served_queries(weight) + 1, TILE):
        macros = query_constants(weight.shape[1], rows, neox=neox)
        cuda_source.kernel_on(cuda_source.index_of(weight.device), QUERIES, THREADS, **macros)


def compile_values_ahead(weight: torch.Tensor, scales: Scales) -> None:
    """The same of values."""
    for rows in range(TILE, served_values(weight) + 1, TILE):
        macros = value_constants(weight.shape[2], rows, scales)
        cuda_source.kernel_on(cuda_source.index_of(weight.device), VALUES, THREADS, value_shared_bytes(rows), **macros)


def head_queries(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    weight: torch.Tensor,
    weights: FrontWeights,
    positions: torch.Tensor,
    *,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is not turned of every head times the head's weight, and the rest turned; one launch.

    The weight is read before the kernel ahead has ended, which must not write it.

    Args:
        q_nope: bfloat16 [rows, heads, inner], the last dimension dense, 1 to MOST_ROWS rows.
        q_rope: bfloat16 [rows, heads, rope], likewise.
        weight: bfloat16 [heads, inner, LATENT] that `query_problem` finds nothing against: SGLang's w_kc.
        weights: of the layer.
        positions: int64 [rows], contiguous.
        launch: in place of a GPU.

    Returns:
        (bfloat16 [rows, heads, LATENT], bfloat16 [rows, heads, rope]), contiguous.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
        RuntimeError: NVRTC or the driver refuses.
    """
    (rows, heads), inner = q_nope.shape[:2], weight.shape[1]
    _check("q_nope", q_nope, (rows, len(weight), inner))
    if (why := query_problem(weight)) is not None:
        raise ValueError(why)
    out = torch.empty(rows, heads, LATENT, dtype=torch.bfloat16, device=q_nope.device)
    q_rope_out, mla = turned(q_rope, weights, positions)
    turning = blocks(rows * blocks(heads, MLA_TOGETHER), THREADS // 32)
    strides = *q_nope.stride()[:2], weight.stride(0), weight.stride(2)
    pointers = (tensor.data_ptr() for tensor in (q_nope, weight, out))
    arguments = Queries(*pointers, *(2 * stride for stride in strides), rows, turning, mla)
    if launch is None:
        macros = query_constants(inner, rows, neox=weights.neox)
        launch = cuda_source.kernel_on(q_nope.device.index, QUERIES, THREADS, **macros).launch
    launch((turning + heads * LATENT // (THREADS // 32 * OF_WARP), 1), arguments)
    return out, q_rope_out


def head_values(
    attended: torch.Tensor, weight: torch.Tensor, scales: Scales, *, before_ours: bool = False, launch: Launch | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every head's latent times its weight, rounded to bfloat16, and quantised as SGLang does for o_proj; one launch.

    The weight is read before the kernel ahead has ended, which must not write it.

    Args:
        attended: bfloat16 [rows, heads, LATENT], the last dimension dense, 1 to MOST_ROWS rows.
        weight: bfloat16 [heads, LATENT, width] that `value_problem` finds nothing against: SGLang's w_vc.
        scales: of the result.
        before_ours: whether what is launched next on this stream is a kernel of this package that waits for this one.
        launch: in place of a GPU.

    Returns:
        (FP8 [rows, heads * width], its scales), as `empty_input` describes.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
        RuntimeError: NVRTC or the driver refuses.
    """
    rows, (heads, _, width) = len(attended), weight.shape
    _check("attended", attended, (rows, heads, LATENT))
    if (why := value_problem(weight)) is not None:
        raise ValueError(why)
    out, out_scales = empty_input(rows, heads * width, scales, attended.device)
    strides = *attended.stride()[:2], weight.stride(0), weight.stride(2)
    pointers = (tensor.data_ptr() for tensor in (attended, weight, out, out_scales))
    arguments = Values(*pointers, *(2 * stride for stride in strides), heads * width, *out_scales.stride(), rows, before_ours)
    if launch is None:
        macros = value_constants(width, rows, scales)
        launch = cuda_source.kernel_on(attended.device.index, VALUES, THREADS, value_shared_bytes(rows), **macros).launch
    launch((heads * width // OF_WARP, 1), arguments)
    return out, out_scales


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, int, int]) -> None:
    """Refuse what the kernels cannot read sixteen bytes at a time, and more rows than they have."""
    fits = tensor.dtype == torch.bfloat16 and tensor.shape == shape and 0 < len(tensor) <= MOST_ROWS and tensor.stride(2) == 1
    fits = fits and not (tensor.data_ptr() % 16 or any(stride % 8 for stride in tensor.stride()[:2]))
    form = f"torch.bfloat16 [1 to {MOST_ROWS}, {shape[1]}, {shape[2]}], the last dimension dense, in multiples of 16 bytes"
    require(fits, name, tensor, form, MISREAD)
