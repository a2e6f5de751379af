"""Index queries and index keys of any number of rows, a launch each, to the bits of SGLang's own sequence of small kernels.

They are parts of the launches of `layer_front`, for forwards whose latents SGLang norms and writes itself: prefills in pieces.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.cuda_source import CudaKernel, Launch
from nsa_backend.kernels.dependent_launch import early, wait_for_kernel_ahead
from nsa_backend.kernels.layer_front import INDEX_PAGE_BYTES
from nsa_backend.kernels.layer_front_kernel import write_index_key
from nsa_backend.kernels.layer_front_steps import GROUP as GROUP_OF_KERNEL
from nsa_backend.kernels.layer_front_weights import GROUP, FrontWeights

THREADS = 256
TOGETHER = 8
"""Index heads of a warp."""
ROPE = 64
"""Values of an index head that are turned."""
SOURCE = Path(__file__).with_name("index_queries.cu")


class Queries(ctypes.Structure):
    """`Queries` of index_queries.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "gates", "cos_sin", "positions", "quantised", "weights")),
        ("gates_stride", ctypes.c_longlong),
        ("rows", ctypes.c_int),
        ("gate_scale", ctypes.c_float),
        ("softmax_scale", ctypes.c_float),
    ]


def problem(weights: FrontWeights, heads: int) -> str | None:
    """Why queries of so many index heads cannot have the launch, or None."""
    if weights.index_fused:
        return "SGLang has one kernel for these index queries and one for their keys: leave them to it"
    if weights.rope != ROPE or heads % TOGETHER:
        return f"{heads} index heads, {weights.rope} values turned: multiples of {TOGETHER} heads and {ROPE} values are served"
    return None


def constants(heads: int, *, neox: bool) -> dict[str, int]:
    """Macros of the source."""
    return {"HEADS": heads, "NEOX": int(neox), "THREADS": THREADS}


@functools.cache
def compiled_on(device: int, heads: int, *, neox: bool) -> CudaKernel:
    """The kernel of queries, compiled at its first call on a device."""
    with torch.cuda.device(device):
        return CudaKernel(SOURCE, SOURCE.stem, constants(heads, neox=neox), THREADS, 0)


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
    query: torch.Tensor,
    gates: torch.Tensor,
    weights: FrontWeights,
    positions: torch.Tensor,
    *,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate index queries by RoPE and Hadamard, quantise them, and weigh their gates with the scales; one launch.

    Args:
        query: bfloat16 [rows, index heads, GROUP], contiguous: what wq_b gives.
        gates: float32 [rows, index heads], heads dense: what weights_proj gives.
        weights: of the layer, whose `problem()` is None.
        positions: int64 [rows], contiguous.
        launch: in place of a GPU.

    Returns:
        (FP8 [rows, index heads, GROUP], float32 [rows, index heads, 1] that weigh the heads' logits), contiguous.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `problem` says why these heads cannot have it.
        RuntimeError: NVRTC or the driver refuses.
    """
    rows, heads = query.shape[:2]
    if (why := problem(weights, heads)) is not None:
        raise ValueError(why)
    check_tensor("query", query, torch.bfloat16, (rows, heads, GROUP))
    dense = gates.shape == (rows, heads) and gates.dtype == torch.float32 and gates.stride(1) == 1
    require(dense, "gates", gates, f"float32 [{rows}, {heads}] with dense heads", "the kernel would misread it")
    check_tensor("positions", positions, torch.int64, (rows,))
    quantised = torch.empty(rows, heads, GROUP, dtype=torch.float8_e4m3fn, device=query.device)
    weighed = torch.empty(rows, heads, 1, dtype=torch.float32, device=query.device)
    if rows:
        tensors = query, gates, weights.index_cos_sin, positions, quantised, weighed
        arguments = Queries(*(tensor.data_ptr() for tensor in tensors), gates.stride(0), rows, heads**-0.5, GROUP**-0.5)
        launch = launch or compiled_on(query.device.index, heads, neox=weights.index_neox).launch
        launch((blocks(rows * heads // TOGETHER, THREADS // 32), 1), arguments)
    return quantised, weighed


def store_index_keys(
    key: torch.Tensor, weights: FrontWeights, positions: torch.Tensor, slots: torch.Tensor, index_cache: torch.Tensor
) -> None:
    """Norm index keys, rotate them by RoPE and Hadamard, quantise and write them; one launch.

    Args:
        key: bfloat16 [rows, GROUP], contiguous: what wk gives.
        weights: of the layer, whose `problem()` is None and whose index heads SGLang does not fuse.
        positions: int64 [rows], contiguous.
        slots: int64 [rows], contiguous, each another or 0.
        index_cache: uint8 [pages, INDEX_PAGE_BYTES], contiguous.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or SGLang has kernels of its own for these keys.
    """
    rows = len(key)
    if weights.index_fused:
        raise ValueError("SGLang has one kernel for these index keys and one for their queries: leave them to it")
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
