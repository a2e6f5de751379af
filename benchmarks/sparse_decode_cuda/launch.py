"""Sparse MLA decode for few rows in CUDA C++: compiles a tile of kernel.cu once through NVRTC and launches it.

What it computes is `sparse_decode`'s, for a bfloat16 KV cache of the model's shape on Hopper, without a cap of the scores.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import torch

from nsa_backend.benchmarks.sparse_decode_cuda import driver, nvrtc
from nsa_backend.benchmarks.sparse_decode_cuda.tiles import LATENT, MOST_PARTS, ROPE, CudaSplit, CudaTile, join_of
from nsa_backend.kernels.sparse_decode import Parts


class AttendArguments(ctypes.Structure):
    """`Attend` of tile.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q_nope", "q_rope", "kv", "slots", "lens", "out", "partial", "lse")),
        *(
            (name, ctypes.c_longlong)
            for name in ("q_nope_row", "q_nope_head", "q_rope_row", "q_rope_head", "slots_stride", "kv_stride")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("topk", "heads", "parts", "chunk")),
    ]


class JoinArguments(ctypes.Structure):
    """`Join` of join.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partial", "lse", "out")),
        *((name, ctypes.c_int) for name in ("heads", "parts")),
    ]


@dataclass(frozen=True)
class Call:
    """The launches of one call."""

    attend: AttendArguments
    grid: tuple[int, int, int]
    join: JoinArguments
    join_grid: tuple[int, int, int]
    join_warps: int  # that share the parts; 0 where nothing is joined


def prepare(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_slots: torch.Tensor,
    lens: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
    parts: Parts | None,
    tile: CudaTile,
    split: CudaSplit,
    join_warps: int,
) -> Call:
    """Arguments and grids; the tensors have to outlive the launches."""
    rows, heads, _ = q_nope.shape
    partial, lse = (parts.out.data_ptr(), parts.lse.data_ptr()) if split.parts > 1 else (None, None)
    attend = AttendArguments(
        q_nope.data_ptr(),
        q_rope.data_ptr(),
        kv_cache.data_ptr(),
        topk_slots.data_ptr(),
        lens.data_ptr(),
        out.data_ptr(),
        partial,
        lse,
        q_nope.stride(0),
        q_nope.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        topk_slots.stride(0),
        kv_cache.stride(0) * kv_cache.element_size(),
        sm_scale * math.log2(math.e),
        topk_slots.shape[1],
        heads,
        split.parts,
        split.chunk,
    )
    join_grid = (1 if join_warps == 1 else 4, heads, rows)
    return Call(
        attend,
        (split.blocks, -(-heads // tile.heads), rows),
        JoinArguments(partial, lse, out.data_ptr(), heads, split.parts),
        join_grid,
        join_warps if split.parts > 1 else 0,
    )


def sparse_decode_cuda(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_slots: torch.Tensor,
    lens: torch.Tensor,
    sm_scale: float,
    *,
    num_sms: int,
    parts: Parts | None = None,
    tile: CudaTile | None = None,
    join_warps: int | None = None,
) -> torch.Tensor:
    """softmax(sm_scale * (q_nope . latent + q_rope . rope)) @ latent over the slots of each row; one launch or two.

    Equal shapes give equal bits. Each tile is compiled at its first call, which therefore comes before a graph is captured.

    Args:
        q_nope: bfloat16 [rows, heads, 512], the last dimension dense.
        q_rope: bfloat16 [rows, heads, 64], the last dimension dense.
        kv_cache: bfloat16 [slots, 1, 576], rows dense. Slots that no row names are never read.
        topk_slots: int32 [rows, topk], rows dense; -1 where there is none.
        lens: int32 [rows], entries of each row to look at, at most topk.
        sm_scale: of the scores.
        num_sms: of the GPU.
        parts: memory for what is joined; None, or too little of it, allocates.
        tile: `CudaTile.of` if None; another one is for measurements.
        join_warps: `join_of` if None; likewise, of JOINS.

    Returns:
        bfloat16 [rows, heads, 512]; zeros where a row has no slot.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
        RuntimeError: NVRTC is missing, or the driver refuses.
    """
    rows, heads, _ = q_nope.shape
    topk = topk_slots.shape[1]
    _check(q_nope, q_rope, kv_cache, topk_slots, lens)
    out = torch.empty(rows, heads, LATENT, dtype=torch.bfloat16, device=q_nope.device)
    if rows == 0:
        return out
    # A bulk copy starts at a multiple of 16 bytes.
    q_nope, q_rope = _aligned(q_nope), _aligned(q_rope)
    tile = tile or CudaTile.of(rows, heads)
    split = CudaSplit.of(rows, heads, topk, num_sms, tile)
    size = rows * split.parts * heads
    if split.parts > 1 and (parts is None or not parts.hold(size)):
        parts = Parts.of(size, LATENT, out.device)
    join_warps = join_warps or join_of(split.parts)
    call = prepare(q_nope, q_rope, kv_cache, topk_slots, lens, sm_scale, out, parts, tile, split, join_warps)
    launch_attend(call, tile, out.device)
    launch_join(call, tile, out.device)
    return out


def launch_attend(call: Call, tile: CudaTile, device: torch.device) -> None:
    """On torch's current stream."""
    function = driver.loaded(_cubin(tile), "attend", tile.shared_bytes, device.index)
    stream = torch.cuda.current_stream(device).cuda_stream
    driver.launch(function, call.grid, tile.threads, tile.shared_bytes, call.attend, stream, tile.cluster)


def launch_join(call: Call, tile: CudaTile, device: torch.device) -> None:
    """Likewise, where there is something to join."""
    if call.join_warps:
        threads = 256 if call.join_warps == 8 else 128
        shared = threads * 16 + threads // 32 * MOST_PARTS * 4
        function = driver.loaded(_cubin(tile), f"join{call.join_warps}", shared, device.index)
        stream = torch.cuda.current_stream(device).cuda_stream
        driver.launch(function, call.join_grid, threads, shared, call.join, stream)


@functools.cache
def _cubin(tile: CudaTile) -> bytes:
    return nvrtc.compiled(tile.macros())[0]


def _aligned(query: torch.Tensor) -> torch.Tensor:
    if query.data_ptr() % 16 or any(stride % 8 for stride in query.stride()[:2]):
        return query.contiguous().clone() if query.is_contiguous() else query.contiguous()
    return query


def _check(
    q_nope: torch.Tensor, q_rope: torch.Tensor, kv_cache: torch.Tensor, topk_slots: torch.Tensor, lens: torch.Tensor
) -> None:
    rows, heads, latent = q_nope.shape
    bf16 = torch.bfloat16
    wrong = {
        "q_nope": latent != LATENT or q_nope.stride(-1) != 1 or q_nope.dtype != bf16,
        "q_rope": q_rope.shape != (rows, heads, ROPE) or q_rope.stride(-1) != 1 or q_rope.dtype != bf16,
        "kv_cache": kv_cache.shape[1:] != (1, LATENT + ROPE)
        or kv_cache.stride(-1) != 1
        or kv_cache.dtype != bf16
        or kv_cache.stride(0) % 8
        or kv_cache.data_ptr() % 16,
        "topk_slots": topk_slots.shape[0] != rows or topk_slots.stride(-1) != 1 or topk_slots.dtype != torch.int32,
        "lens": lens.shape != (rows,) or not lens.is_contiguous() or lens.dtype != torch.int32,
    }
    tensors = {"q_nope": q_nope, "q_rope": q_rope, "kv_cache": kv_cache, "topk_slots": topk_slots, "lens": lens}
    for name, is_wrong in wrong.items():
        if is_wrong:
            tensor = tensors[name]
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} with stride {tensor.stride()}: see sparse_decode_cuda"
            )
