"""Sparse MLA for several rows a request on Hopper: the launcher of sparse_verify.cu and sparse_prefill.cu."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import check_tensor
from nsa_backend.kernels.cuda_source import CudaKernel
from nsa_backend.kernels.local_slots import check_rank
from nsa_backend.kernels.sparse_decode import check_tensors

PARTED, WHOLE = (Path(__file__).with_name(name) for name in ("sparse_verify.cu", "sparse_prefill.cu"))
"""For groups whose slots several blocks share, and for those that have one block each."""
LATENT, ROPE = 512, 64
LINES = 64
"""Of a tile: query heads of one row after the other."""
MOST_ROWS = 8
"""Of a group: a slot has a bit for each."""
MOST_SLOTS = 2**24 - 1
"""Of a KV cache: a slot and the bits of rows share 32 bits."""
MOST_CHOSEN = 16384
"""Entries of a group's rows, those of each rounded up to its threads: they must fit shared memory."""
MOST_OF_ROW = 8192
"""Entries of a row: 32 a thread."""
MOST_RANKS = 128
"""-1 over their number is no slot."""
MOST_PARTS = 16
"""Of a group: more have less to do than it takes to begin and to join them."""
ATTENDING = 256
"""Threads of a block that list and attend; as many as half of them gather."""
THREADS = 384
SHARED_BYTES = 231680


def rows_of_tile(heads: int) -> int:
    """Most rows of so many heads that a group can have."""
    return max(1, min(MOST_ROWS, LINES // heads))


@dataclass(frozen=True)
class Groups:
    """How the rows of a request are divided into tiles, as evenly as can be."""

    rows: int  # of a group; of the last one perhaps fewer
    of_request: int

    @classmethod
    def of(cls, rows_per_request: int, heads: int) -> Groups:
        of_request = blocks(rows_per_request, rows_of_tile(heads))
        return cls(blocks(rows_per_request, of_request), of_request)


def problem(heads: int, latent: int, rope: int, topk: int, rows_per_request: int) -> str | None:
    """Why a query of this shape cannot be served; None where it can."""
    if (latent, rope) != (LATENT, ROPE):
        return f"it is written for a latent of {LATENT} and RoPE of {ROPE} values, and these are {latent} and {rope}"
    if heads > LINES:
        return f"a tile has {LINES} heads and this rank has {heads}"
    chosen = Groups.of(rows_per_request, heads).rows * blocks(topk, ATTENDING) * ATTENDING
    if chosen > MOST_CHOSEN:
        return f"rows of a tile choose {chosen} slots, and it has room for {MOST_CHOSEN}"
    if topk > MOST_OF_ROW:
        return f"a row chooses {topk} slots, and it takes up to {MOST_OF_ROW}"
    return None


def parts_of(groups: int, num_sms: int) -> int:
    """Blocks that share the slots of a group: as many as fill the GPU once."""
    return max(1, min(num_sms // max(groups, 1), MOST_PARTS))


@dataclass(frozen=True)
class Need:
    """Sizes of what a call takes of a `VerifyMemory`."""

    listed: int  # entries of lists
    lines: int  # to be joined
    groups: int

    @classmethod
    def of(cls, rows: int, rows_per_request: int, heads: int, topk: int, num_sms: int, parts: int | None = None) -> Need:
        groups = Groups.of(rows_per_request, heads)
        count = blocks(rows, rows_per_request) * groups.of_request
        parts = parts or parts_of(count, num_sms)
        listed = count * parts * groups.rows * blocks(topk, ATTENDING) * ATTENDING
        return cls(listed, rows * heads * parts if parts > 1 else 0, count)


@dataclass(frozen=True)
class VerifyMemory:
    """What the blocks of a call hand on; calls on one stream may share it."""

    lists: torch.Tensor  # int32, entries of every group and part
    parts: torch.Tensor  # bfloat16 [lines, 512]
    lse: torch.Tensor  # float32 [lines], base 2
    met: torch.Tensor  # int32 [groups, 2], zeros before and after a call

    @classmethod
    def allocate(
        cls, max_rows: int, rows_per_request: int, heads: int, topk: int, num_sms: int, device: torch.device | str
    ) -> VerifyMemory:
        """Room for every call of up to `max_rows` rows, and of the requests that these begin."""
        most = blocks(max_rows, rows_per_request) * rows_per_request
        needs = [Need.of(rows, rows_per_request, heads, topk, num_sms) for rows in range(most, 0, -rows_per_request)]
        lines = max(need.lines for need in needs)
        return cls(
            torch.empty(max(need.listed for need in needs), dtype=torch.int32, device=device),
            torch.empty(lines, LATENT, dtype=torch.bfloat16, device=device),
            torch.empty(lines, dtype=torch.float32, device=device),
            torch.zeros(max(need.groups for need in needs), 2, dtype=torch.int32, device=device),
        )

    def hold(self, need: Need) -> bool:
        """Whether there is room for a call."""
        return self.lists.numel() >= need.listed and len(self.lse) >= need.lines and len(self.met) >= need.groups


class Arguments(ctypes.Structure):
    """`Attend` of rows_together.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q_nope", "q_rope", "kv", "slots", "lens")),
        *((name, ctypes.c_void_p) for name in ("lists", "out", "of_parts", "lse", "joined_lse", "met")),
        *(
            (name, ctypes.c_longlong)
            for name in ("q_nope_row", "q_nope_head", "q_rope_row", "q_rope_head", "slots_stride", "kv_stride")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("parts", "all_rows", "rows_per_request", "groups_per_request")),
    ]


Launch = Callable[[tuple[int, int], Arguments], None]
"""Runs the kernel for (parts, groups)."""


def source_of(parts: int, *, fp8: bool) -> Path:
    """What computes groups in so many parts: of FP8 values PARTED makes bfloat16 ones, and WHOLE does not."""
    return WHOLE if parts == 1 and not fp8 else PARTED


@functools.cache
def attend_of(
    source: Path, rows: int, heads: int, topk: int, device: int, ranks: int = 1, rank: int = 0, *, fp8: bool = False
) -> CudaKernel:
    """The kernel of `source` for groups of `rows` rows on one of `ranks` ranks, compiled at its first call on a device.

    It takes about a second.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    with torch.cuda.device(device):
        return CudaKernel(source, "attend", constants(rows, heads, topk, ranks, rank, fp8=fp8), THREADS, SHARED_BYTES)


def constants(rows: int, heads: int, topk: int, ranks: int = 1, rank: int = 0, *, fp8: bool = False) -> dict[str, int]:
    """Macros of a source."""
    divided = {"RANKS_LOG2": ranks.bit_length() - 1, "RANK": rank}
    return {"ROWS": rows, "HEADS": heads, "TOPK": topk, **divided, "FP8": int(fp8)}


def compile_ahead(
    rows: int, heads: int, topk: int, device: torch.device, ranks: int = 1, rank: int = 0, *, fp8: bool = False
) -> None:
    """Compile the kernels for groups of `rows` rows at start, rather than in the first forward.

    Args:
        rows: of a group.
        heads: of a row.
        topk: entries of a row.
        device: that calls will be on; without an index the current one, as SGLang's ranks name theirs.
        ranks: that divide slots among them.
        rank: this one.
        fp8: whether the KV cache is FlashMLA's FP8, and not bfloat16.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    for source in sorted({source_of(parts, fp8=fp8) for parts in (1, 2)}):
        attend_of(source, rows, heads, topk, index, ranks, rank, fp8=fp8)


def sparse_verify(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_slots: torch.Tensor,
    lens: torch.Tensor,
    sm_scale: float,
    rows_per_request: int,
    memory: VerifyMemory,
    *,
    num_sms: int,
    out: torch.Tensor | None = None,
    ranks: int = 1,
    rank: int = 0,
    lse: torch.Tensor | None = None,
    parts: int | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """What `sparse_decode` computes, each KV slot read once for all rows of a group, in one launch.

    Equal inputs give equal bits, unless a row names a slot twice. KV of every slot that some row of a group chose must be
    finite: a line that does not attend to it weighs it with 0.

    Args:
        q_nope: bfloat16 [rows, heads, 512], the last dimension dense.
        q_rope: bfloat16 [rows, heads, 64], the last dimension dense.
        kv_cache: as `sparse_decode` takes it, bfloat16 or FlashMLA's FP8. Slots that no row names are never read.
        topk_slots: int32 [rows, topk], rows dense; -1 where there is none. A slot that a row names twice counts once.
        lens: int32 [rows], entries of each row to look at, at most topk.
        sm_scale: of the scores.
        rows_per_request: rows that follow each other and choose much alike; of the last request there may be fewer.
        memory: from `VerifyMemory.allocate`, for these heads and rows a request.
        num_sms: of the GPU.
        out: what is returned, contiguous and written whole; allocated if None.
        ranks: that divide slots among them, a power of two up to 128: slot s lies on rank s modulo that number, in row s
            divided by it. `kv_cache` is what `rank` has, and slots of others count as missing.
        rank: this one.
        lse: float32 [rows, heads], contiguous, written whole: log-sum-exps in base 2, -inf where a row has no slot.
        parts: `parts_of` if None; another one is for measurements, of no more blocks than SMs unless it is one.
        launch: what runs the kernel; a GPU if None, an emulation in tests.

    Returns:
        bfloat16 [rows, heads, 512]; zeros where a row has no slot.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `memory` has no room.
        RuntimeError: NVRTC or the driver refuses.
    """
    rows, heads, latent = q_nope.shape
    topk = topk_slots.shape[1]
    check_tensors(q_nope, q_rope, kv_cache, topk_slots, lens)
    reason = problem(heads, latent, q_rope.shape[-1], topk, rows_per_request)
    fp8 = kv_cache.dtype == torch.float8_e4m3fn
    if not reason and (q_nope.dtype != torch.bfloat16 or len(kv_cache) > MOST_SLOTS):
        reason = f"{len(kv_cache)} slots and a query of {q_nope.dtype}: it takes at most {MOST_SLOTS} and bfloat16"
    if reason:
        raise ValueError(reason)
    if out is None:
        out = torch.empty(rows, heads, latent, dtype=q_nope.dtype, device=q_nope.device)
    check_tensor("out", out, q_nope.dtype, (rows, heads, latent))
    if lse is not None:
        check_tensor("lse", lse, torch.float32, (rows, heads))
    check_rank(ranks, rank)
    if ranks > MOST_RANKS:
        raise ValueError(f"{ranks} ranks divide slots: it tells those of up to {MOST_RANKS} apart from none")
    if rows == 0:
        return out
    groups = Groups.of(rows_per_request, heads)
    count = blocks(rows, rows_per_request) * groups.of_request
    parts = parts or parts_of(count, num_sms)
    if not memory.hold(Need.of(rows, rows_per_request, heads, topk, num_sms, parts)):
        raise ValueError(f"memory has no room for {count} groups in {parts} parts: the kernel would write past it")
    if parts > 1 and parts * count > num_sms:
        raise ValueError(f"{count} groups in {parts} parts wait for each other, and {num_sms} SMs run as many blocks at once")
    q_nope, q_rope = _aligned(q_nope), _aligned(q_rope)
    if launch is None:
        source = source_of(parts, fp8=fp8)
        launch = attend_of(source, groups.rows, heads, topk, q_nope.device.index, ranks, rank, fp8=fp8).launch
    launch(
        (parts, count),
        Arguments(
            q_nope.data_ptr(),
            q_rope.data_ptr(),
            kv_cache.data_ptr(),
            topk_slots.data_ptr(),
            lens.data_ptr(),
            memory.lists.data_ptr(),
            out.data_ptr(),
            memory.parts.data_ptr(),
            memory.lse.data_ptr(),
            None if lse is None else lse.data_ptr(),
            memory.met.data_ptr(),
            *(2 * stride for stride in (*q_nope.stride()[:2], *q_rope.stride()[:2])),
            topk_slots.stride(0),
            kv_cache.element_size() * kv_cache.stride(0),
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
