"""Sparse MLA for several rows a request on Hopper, in bfloat16: the launcher of sparse_verify.cu."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.cuda_source import CudaKernel
from nsa_backend.kernels.sparse_decode import check_tensors

SOURCE = Path(__file__).with_name("sparse_verify.cu")
LATENT, ROPE = 512, 64
LINES = 64
"""Of a tile: query heads of one row after the other."""
MOST_ROWS = 8
"""Of a group: a slot has a bit for each."""
MOST_SLOTS = 2**24 - 1
"""Of a KV cache: a slot and the bits of rows share 32 bits."""
MOST_CHOSEN = 16384
"""Entries of a group's rows: cells of the hash table."""
MOST_PARTS = 8
"""Blocks of a cluster, as every Hopper GPU runs them."""
THREADS = 256
SHARED_BYTES = 231424


@dataclass(frozen=True)
class Groups:
    """How the rows of a request are divided into tiles, as evenly as can be."""

    rows: int  # of a group; of the last one perhaps fewer
    of_request: int

    @classmethod
    def of(cls, rows_per_request: int, heads: int) -> Groups:
        most = max(1, min(MOST_ROWS, LINES // heads))
        of_request = blocks(rows_per_request, most)
        return cls(blocks(rows_per_request, of_request), of_request)


def problem(heads: int, latent: int, rope: int, topk: int, rows_per_request: int) -> str | None:
    """Why a query of this shape cannot be served; None where it can."""
    if (latent, rope) != (LATENT, ROPE):
        return f"it is written for a latent of {LATENT} and RoPE of {ROPE} values, and these are {latent} and {rope}"
    if heads > LINES:
        return f"a tile has {LINES} heads and there are {heads}"
    chosen = Groups.of(rows_per_request, heads).rows * topk
    if chosen > MOST_CHOSEN:
        return f"rows of a tile choose {chosen} slots, and it has room for {MOST_CHOSEN}"
    return None


def parts_of(groups: int, num_sms: int) -> int:
    """Blocks that share the slots of a group: as many as fill the GPU once, at most a cluster."""
    parts = MOST_PARTS
    while parts > 1 and groups * parts > num_sms:
        parts //= 2
    return parts


def list_entries(rows: int, rows_per_request: int, heads: int, topk: int, num_sms: int, parts: int | None = None) -> int:
    """int32 that a call of so many rows needs for its lists."""
    groups = Groups.of(rows_per_request, heads)
    count = blocks(rows, rows_per_request) * groups.of_request
    return count * (parts or parts_of(count, num_sms)) * groups.rows * blocks(topk, THREADS) * THREADS


def make_lists(
    max_rows: int, rows_per_request: int, heads: int, topk: int, num_sms: int, device: torch.device | str
) -> torch.Tensor:
    """Room for the lists of every call of up to `max_rows` rows; calls on one stream may share it."""
    needed = (list_entries(rows, rows_per_request, heads, topk, num_sms) for rows in range(1, max_rows + 1, rows_per_request))
    return torch.empty(max(needed), dtype=torch.int32, device=device)


class Arguments(ctypes.Structure):
    """`Attend` of sparse_verify.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q_nope", "q_rope", "kv", "slots", "lens", "lists", "out")),
        *(
            (name, ctypes.c_longlong)
            for name in ("q_nope_row", "q_nope_head", "q_rope_row", "q_rope_head", "slots_stride", "kv_stride")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("parts", "all_rows", "rows_per_request", "groups_per_request")),
    ]


Launch = Callable[[tuple[int, int], Arguments], None]
"""Runs the kernel for (parts, groups), the parts of a group as a cluster."""


@functools.cache
def attend_of(rows: int, heads: int, topk: int, device: int) -> CudaKernel:
    """The kernel for groups of `rows` rows, compiled at its first call on a device, in about a second.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    with torch.cuda.device(device):
        return CudaKernel(SOURCE, "attend", {"ROWS": rows, "HEADS": heads, "TOPK": topk}, THREADS, SHARED_BYTES)


def sparse_verify_cuda(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_slots: torch.Tensor,
    lens: torch.Tensor,
    sm_scale: float,
    rows_per_request: int,
    lists: torch.Tensor,
    *,
    num_sms: int,
    parts: int | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """What `sparse_decode` computes, each KV slot read once for all rows of a group; one launch.

    Equal inputs give equal bits. KV of every slot that some row of a group chose must be finite: a line that does not attend
    to it weighs it with 0.

    Args:
        q_nope: bfloat16 [rows, heads, 512], the last dimension dense.
        q_rope: bfloat16 [rows, heads, 64], the last dimension dense.
        kv_cache: bfloat16 [slots, 1, 576], rows dense. Slots that no row names are never read.
        topk_slots: int32 [rows, topk], rows dense; -1 where there is none. A slot that a row names twice counts once.
        lens: int32 [rows], entries of each row to look at, at most topk.
        sm_scale: of the scores.
        rows_per_request: rows that follow each other and choose much alike; of the last request there may be fewer.
        lists: int32, from `make_lists` for these heads and rows a request; written.
        num_sms: of the GPU.
        parts: `parts_of` if None; another power of two is for measurements.
        launch: what runs the kernel; a GPU if None, an emulation in tests.

    Returns:
        bfloat16 [rows, heads, 512]; zeros where a row has no slot.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `lists` has no room.
        RuntimeError: NVRTC or the driver refuses.
    """
    rows, heads, latent = q_nope.shape
    topk = topk_slots.shape[1]
    check_tensors(q_nope, q_rope, kv_cache, topk_slots, lens)
    reason = problem(heads, latent, q_rope.shape[-1], topk, rows_per_request)
    if reason or kv_cache.dtype != torch.bfloat16 or len(kv_cache) > MOST_SLOTS:
        raise ValueError(reason or f"{len(kv_cache)} slots of {kv_cache.dtype}: it takes at most {MOST_SLOTS} of bfloat16")
    out = torch.empty(rows, heads, latent, dtype=q_nope.dtype, device=q_nope.device)
    if rows == 0:
        return out
    groups = Groups.of(rows_per_request, heads)
    count = blocks(rows, rows_per_request) * groups.of_request
    parts = parts or parts_of(count, num_sms)
    if lists.numel() < list_entries(rows, rows_per_request, heads, topk, num_sms, parts):
        raise ValueError(f"lists has no room for {count} groups in {parts} parts: the kernel would write past it")
    q_nope, q_rope = _aligned(q_nope), _aligned(q_rope)
    launch = launch or attend_of(groups.rows, heads, topk, q_nope.device.index).launch
    launch(
        (parts, count),
        Arguments(
            q_nope.data_ptr(),
            q_rope.data_ptr(),
            kv_cache.data_ptr(),
            topk_slots.data_ptr(),
            lens.data_ptr(),
            lists.data_ptr(),
            out.data_ptr(),
            *(2 * stride for stride in (*q_nope.stride()[:2], *q_rope.stride()[:2])),
            topk_slots.stride(0),
            2 * kv_cache.stride(0),
            sm_scale * math.log2(math.e),
            parts,
            rows,
            rows_per_request,
            groups.of_request,
        ),
    )
    return out


def _aligned(query: torch.Tensor) -> torch.Tensor:
    """Whose heads begin at multiples of 16 bytes, as what SGLang hands over does."""
    if query.data_ptr() % 16 or any(stride % 8 for stride in query.stride()[:2]):
        return query.contiguous() if not query.is_contiguous() else query.clone()
    return query
