"""Both queries of a layer in one launch, each to the bits of SGLang's own sequence of small kernels: rope_quantise.cu.

It stands between the query's projections and the logits. A prefill in pieces has the indexer's query alone, and a layer that
attends to what another has selected MLA's.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from nsa_backend.kernels import cuda_source
from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.cuda_source import Launch
from nsa_backend.kernels.layer_front_weights import GROUP, ROPE, FrontWeights

SOURCE = Path(__file__).with_name("rope_quantise.cu")
THREADS = 128
"""Of a block."""
FEW_ROWS, LANES_OF_FEW, LANES = 128, 16, 4
"""Up to so many rows a head has more lanes: less work in a row for each, where a GPU has room for all of them."""
TOGETHER = 32 // LANES
"""Index heads of a warp; a multiple of those that have more lanes."""
MISREAD = "the kernel would misread it"


class Turned(ctypes.Structure):
    """`Turned` of rope.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("from_", "cos_sin", "positions", "out")),
        *((name, ctypes.c_longlong) for name in ("row_bytes", "head_bytes")),
        ("heads", ctypes.c_int),
    ]


class Queries(ctypes.Structure):
    """`Queries` of rope_quantise.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "gates", "index_cos_sin", "quantised", "weights")),
        *((name, ctypes.c_longlong) for name in ("query_row", "gates_row")),
        *((name, ctypes.c_float) for name in ("gate_scale", "softmax_scale")),
        ("mla", Turned),
    ]


def constants(index_heads: int, weights: FrontWeights, lanes: int) -> dict[str, int]:
    """Macros of the source, where a head has so many lanes."""
    flags = {"NEOX": weights.neox, "INDEX_NEOX": weights.index_neox, "FUSED": weights.index_fused}
    return {"INDEX_HEADS": index_heads, "THREADS": THREADS, "LANES": lanes} | {name: int(flag) for name, flag in flags.items()}


def lanes_of(rows: int) -> int:
    """Of a head, where there are so many rows."""
    return LANES_OF_FEW if rows <= FEW_ROWS else LANES


def compile_ahead(device: torch.device, index_heads: int, weights: FrontWeights) -> None:
    """Compile it: while a forward is captured nothing can be compiled.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    for lanes in (LANES_OF_FEW, LANES):
        cuda_source.kernel_on(cuda_source.index_of(device), SOURCE, THREADS, **constants(index_heads, weights, lanes))


def rope_quantise(
    query: torch.Tensor,
    gates: torch.Tensor,
    q_rope: torch.Tensor,
    weights: FrontWeights,
    positions: torch.Tensor,
    *,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate both queries, quantise the indexer's, and weigh its gates with the scales; one launch.

    Args:
        query: bfloat16 [rows, index heads, GROUP], heads dense.
        gates: float32 [rows, index heads], heads dense: what weights_proj gives; bfloat16 where `weights.index_fused`.
        q_rope: bfloat16 [rows, heads, ROPE], the last dimension dense: the part of MLA's query that is rotated.
        weights: of the layer, whose `problem()` is None.
        positions: int64 [rows], contiguous.
        launch: in place of a GPU.

    Returns:
        (FP8 [rows, index heads, GROUP], float32 [rows, index heads, 1] that weigh the heads' logits,
        bfloat16 [rows, heads, ROPE]), all contiguous.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
        RuntimeError: NVRTC or the driver refuses.
    """
    rows, index_heads = query.shape[:2]
    require(not index_heads % TOGETHER, "query", query, f"of a multiple of {TOGETHER} heads", MISREAD)
    _check("query", query, (rows, index_heads, GROUP))
    require(query.stride(1) == GROUP, "query", query, "of dense heads", MISREAD)
    gates_dtype = torch.bfloat16 if weights.index_fused else torch.float32
    dense = gates.shape == (rows, index_heads) and gates.dtype == gates_dtype and gates.stride(1) == 1
    require(dense, "gates", gates, f"{gates_dtype} [{rows}, {index_heads}] with dense heads", MISREAD)
    quantised = torch.empty(rows, index_heads, GROUP, dtype=torch.float8_e4m3fn, device=query.device)
    weighed = torch.empty(rows, index_heads, 1, dtype=torch.float32, device=query.device)
    gate, softmax = index_heads**-0.5, GROUP**-0.5
    of_index = Queries(
        query=query.data_ptr(), gates=gates.data_ptr(), index_cos_sin=weights.index_cos_sin.data_ptr(),
        quantised=quantised.data_ptr(), weights=weighed.data_ptr(), query_row=2 * query.stride(0),
        gates_row=gates.element_size() * gates.stride(0), gate_scale=gate * softmax if weights.index_fused else gate,
        softmax_scale=softmax,
    )  # fmt: skip
    return quantised, weighed, _turned(q_rope, weights, positions, index_heads, of_index, launch)


def index_queries(
    query: torch.Tensor, gates: torch.Tensor, weights: FrontWeights, positions: torch.Tensor, *, launch: Launch | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The indexer's part of `rope_quantise` alone."""
    no_heads = query.new_empty(len(query), 0, ROPE)
    return rope_quantise(query, gates, no_heads, weights, positions, launch=launch)[:2]


def rope_query(
    q_rope: torch.Tensor, weights: FrontWeights, positions: torch.Tensor, *, launch: Launch | None = None
) -> torch.Tensor:
    """MLA's part of `rope_quantise` alone, also of layers without an indexer."""
    return _turned(q_rope, weights, positions, 0, Queries(), launch)


def _turned(
    q_rope: torch.Tensor,
    weights: FrontWeights,
    positions: torch.Tensor,
    index_heads: int,
    arguments: Queries,
    launch: Launch | None,
) -> torch.Tensor:
    """bfloat16 [rows, heads, ROPE] of MLA's query rotated; the launch does what `arguments` has of the indexer's too."""
    rows, heads = q_rope.shape[:2]
    out, arguments.mla = turned(q_rope, weights, positions)
    lanes = lanes_of(rows)
    warps = index_heads * lanes // 32 + blocks(heads * min(lanes, ROPE // 8), 32)
    if rows and warps:
        macros = constants(index_heads, weights, lanes)
        launch = launch or cuda_source.kernel_on(q_rope.device.index, SOURCE, THREADS, **macros).launch
        launch((rows, blocks(warps, THREADS // 32)), arguments)
    return out


def turned(q_rope: torch.Tensor, weights: FrontWeights, positions: torch.Tensor) -> tuple[torch.Tensor, Turned]:
    """Room for MLA's query rotated, and what a launch is told to write there.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    rows, heads = q_rope.shape[:2]
    _check("q_rope", q_rope, (rows, heads, ROPE))
    check_tensor("positions", positions, torch.int64, (rows,))
    out = torch.empty(rows, heads, ROPE, dtype=torch.bfloat16, device=q_rope.device)
    pointers = (tensor.data_ptr() for tensor in (q_rope, weights.cos_sin, positions, out))
    return out, Turned(*pointers, *(2 * stride for stride in q_rope.stride()[:2]), heads)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, int, int]) -> None:
    """Refuse what the kernel cannot read sixteen bytes at a time."""
    fits = tensor.dtype == torch.bfloat16 and tensor.shape == shape and tensor.stride(2) == 1
    rows, heads = (len(tensor) > 1) * tensor.stride(0), (tensor.shape[1] > 1) * tensor.stride(1)
    fits = fits and not (tensor.data_ptr() % 16 or rows % 8 or heads % 8)
    form = f"torch.bfloat16 {list(shape)}, the last dimension dense, rows and heads multiples of 16 bytes apart"
    require(fits or (not tensor.numel() and tensor.shape == shape), name, tensor, form, MISREAD)
