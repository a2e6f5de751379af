"""Index queries and index keys of any number of rows, a launch each, to the bits of SGLang's own sequence of small kernels.

They are parts of the launches of `layer_front`, for forwards whose latents SGLang norms and writes itself: prefills in pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.dependent_launch import early, wait_for_kernel_ahead
from nsa_backend.kernels.layer_front import INDEX_PAGE_BYTES
from nsa_backend.kernels.layer_front_kernel import quantise_index_query, write_index_key
from nsa_backend.kernels.layer_front_steps import GROUP as GROUP_OF_KERNEL
from nsa_backend.kernels.layer_front_weights import GROUP, FrontWeights


@dataclass(frozen=True)
class Tile:
    """What a program has of a row. One warp needs no barrier between the steps of a Hadamard rotation."""

    heads: int = 8
    warps: int = 1


FASTEST = Tile()
"""On an H200, with 1024 to 8192 rows."""


@triton.jit(do_not_specialize=["positions_ptr"])
def index_queries_kernel(
    query_ptr,  # bfloat16 [rows, INDEX_HEADS, GROUP], QUERY_STRIDE between rows, heads dense
    gates_ptr,  # float32 [rows, INDEX_HEADS], gates_stride apart: what weights_proj gives
    gates_stride,
    cos_sin_ptr,  # float32 [positions, ROPE], cosines first
    positions_ptr,  # int64 [rows]
    quantised_ptr,  # FP8 [rows, INDEX_HEADS, GROUP], contiguous
    weights_ptr,  # float32 [rows, INDEX_HEADS], contiguous: gate * heads**-0.5 * scale * GROUP**-0.5
    INDEX_HEADS: tl.constexpr,
    ROPE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,  # that a program takes
    GATE_SCALE: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    NEOX: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program (row, block of heads)."""
    wait_for_kernel_ahead(COMPILED)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    place = row * INDEX_HEADS + first
    quantise_index_query(
        query_ptr + row * QUERY_STRIDE + first * GROUP_OF_KERNEL, gates_ptr + row * gates_stride + first, cos_sin_ptr,
        tl.load(positions_ptr + row), quantised_ptr + place * GROUP_OF_KERNEL, weights_ptr + place, HEADS, ROPE, NEOX, False,
        GATE_SCALE, SOFTMAX_SCALE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])
def index_keys_kernel(
    key_ptr,  # bfloat16 [rows, GROUP], contiguous: keys before their norm
    weight_ptr,  # float32 [GROUP]
    bias_ptr,  # float32 [GROUP]
    cos_sin_ptr,  # float32 [positions, ROPE], cosines first
    positions_ptr,  # int64 [rows]
    slots_ptr,  # int64 [rows]
    index_ptr,  # FP8 [pages, bytes of a page]: keys of a page, then their scales
    index_scales_ptr,  # the same as float32
    eps,
    ROPE: tl.constexpr,
    NEOX: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program: a row."""
    wait_for_kernel_ahead(COMPILED)
    row = tl.program_id(0).to(tl.int64)
    write_index_key(
        key_ptr + row * GROUP_OF_KERNEL, weight_ptr, bias_ptr, eps, cos_sin_ptr, tl.load(positions_ptr + row),
        tl.load(slots_ptr + row), index_ptr, index_scales_ptr, ROPE, NEOX, False,
    )  # fmt: skip


def index_queries(
    query: torch.Tensor, gates: torch.Tensor, weights: FrontWeights, positions: torch.Tensor, tile: Tile = FASTEST
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate index queries by RoPE and Hadamard, quantise them, and weigh their gates with the scales; one launch.

    Args:
        query: bfloat16 [rows, index heads, GROUP], contiguous: what wq_b gives.
        gates: float32 [rows, index heads], heads dense: what weights_proj gives.
        weights: of the layer, whose `problem()` is None and whose index heads SGLang does not fuse.
        positions: int64 [rows], contiguous.
        tile: of the programs.

    Returns:
        (FP8 [rows, index heads, GROUP], float32 [rows, index heads, 1] that weigh the heads' logits), contiguous.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or SGLang has kernels of its own for these heads.
    """
    rows, heads = query.shape[:2]
    _refuse_fused(weights)
    require(heads % tile.heads == 0, "query", query, f"of a multiple of {tile.heads} heads", "a program takes so many")
    check_tensor("query", query, torch.bfloat16, (rows, heads, GROUP))
    dense = gates.shape == (rows, heads) and gates.dtype == torch.float32 and gates.stride(1) == 1
    require(dense, "gates", gates, f"float32 [{rows}, {heads}] with dense heads", "the kernel would misread it")
    check_tensor("positions", positions, torch.int64, (rows,))
    quantised = torch.empty(rows, heads, GROUP, dtype=torch.float8_e4m3fn, device=query.device)
    weighed = torch.empty(rows, heads, 1, dtype=torch.float32, device=query.device)
    if rows:
        index_queries_kernel[(rows, heads // tile.heads)](
            query, gates, gates.stride(0), weights.index_cos_sin, positions, quantised, weighed, INDEX_HEADS=heads,
            ROPE=weights.rope, QUERY_STRIDE=query.stride(0), HEADS=tile.heads, GATE_SCALE=heads**-0.5,
            SOFTMAX_SCALE=GROUP**-0.5, NEOX=weights.index_neox, COMPILED=query.is_cuda, num_warps=tile.warps,
            **early(query.is_cuda),
        )  # fmt: skip
    return quantised, weighed


def store_index_keys(
    key: torch.Tensor, weights: FrontWeights, positions: torch.Tensor, slots: torch.Tensor, index_cache: torch.Tensor
) -> None:
    """Norm index keys, rotate them by RoPE and Hadamard, quantise and write them; one launch.

    Args:
        key: bfloat16 [rows, GROUP], contiguous: what wk gives.
        weights: as `index_queries` has them.
        positions: int64 [rows], contiguous.
        slots: int64 [rows], contiguous, each another or 0.
        index_cache: uint8 [pages, INDEX_PAGE_BYTES], contiguous.

    Raises:
        ValueError: as `index_queries` does.
    """
    rows = len(key)
    _refuse_fused(weights)
    check_tensor("key", key, torch.bfloat16, (rows, GROUP))
    check_tensor("positions", positions, torch.int64, (rows,))
    check_tensor("slots", slots, torch.int64, (rows,))
    check_tensor("index_cache", index_cache, torch.uint8, (len(index_cache), INDEX_PAGE_BYTES))
    if rows:
        index_keys_kernel[(rows,)](
            key, weights.key_norm, weights.key_bias, weights.index_cos_sin, positions, slots,
            index_cache.view(torch.float8_e4m3fn), index_cache.view(torch.float32), weights.key_eps, ROPE=weights.rope,
            NEOX=weights.index_neox, COMPILED=key.is_cuda, **early(key.is_cuda),
        )  # fmt: skip


def _refuse_fused(weights: FrontWeights) -> None:
    if weights.index_fused:
        raise ValueError("SGLang has one kernel for these index queries and one for their keys: leave them to it")
