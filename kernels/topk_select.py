"""KV slots of the highest index scores of each row, in CUDA C++: topk_select.cu, in place of SGLang's top-k v2 of paged rows.

SGLang's kernel has one block for a row of up to 65536 scores, which reads more than 16384 of them twice. Here a few rows have
clusters of blocks, which keep scores in registers between both looks at them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_backend.kernels.checks import check_device, check_tensor, require
from nsa_backend.kernels.cuda_source import CudaKernel
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.topk_slots import topk_slots_torch

THREADS, VECTORS, BINS, BLOCKS_OF_SM = 1024, 2, 1024, 2
SOURCE = Path(__file__).with_name("topk_select.cu")
CLUSTERS = (8, 4, 2, 1)
"""Blocks that a row may have."""
SHARE = THREADS * VECTORS * 2
"""Scores of a row that deserve a block of their own, whose registers hold twice as many."""
MOST_TOPK = 2048
MOST_ROWS = 264
"""Of a call: two for each multiprocessor."""

Launch = Callable[[tuple[int, int], ctypes.Structure], None]
"""Runs the kernel for (blocks of a row, rows)."""


class Arguments(ctypes.Structure):
    """`Select` of topk_select.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "lengths", "pages", "slots")),
        ("stride", ctypes.c_longlong),
        ("table_stride", ctypes.c_longlong),
        ("topk", ctypes.c_int),
        ("share", ctypes.c_int),
    ]


def problem(scores: torch.Tensor, topk: int) -> str | None:
    """Why the kernel does not serve these rows of scores, or None."""
    if len(scores) > MOST_ROWS:
        return f"{len(scores)} rows: up to {MOST_ROWS} are served"
    if not 0 < topk <= MOST_TOPK:
        return f"top {topk}: 1 to {MOST_TOPK} are served"
    if scores.stride(0) % 4 or scores.data_ptr() % 16:
        return "scores: the kernel reads four at a time, so rows must begin at multiples of 16 bytes"
    return None


def blocks_of(rows: int, sms: int) -> int:
    """Of each of so many rows: as many as run at once. Blocks of a cluster are neighbours, so some SMs are left."""
    return next(blocks for blocks in CLUSTERS if blocks == 1 or rows * blocks <= sms * 3 // 4)


def constants(
    blocks: int, threads: int = THREADS, vectors: int = VECTORS, bins: int = BINS, of_sm: int = BLOCKS_OF_SM
) -> dict[str, int]:
    """Macros of the source, for so many blocks a row of so many threads, each with four times `vectors` scores in registers."""
    return {"CLUSTER": blocks, "THREADS": threads, "VECTORS": vectors, "BINS": bins, "BLOCKS_OF_SM": of_sm}


def shared_bytes(blocks: int, bins: int = BINS) -> int:
    """Shared memory of one of them."""
    return 4 * (bins * blocks + 1024 + 2 * 2048 + 64 + 8 + 2) + 16 + 16


@functools.cache
def compiled_on(blocks: int, device: int) -> CudaKernel:
    """The kernel for so many blocks a row, compiled at its first call on a device."""
    with torch.cuda.device(device):
        return CudaKernel(SOURCE, SOURCE.stem, constants(blocks), THREADS, shared_bytes(blocks))


def compile_ahead(device: torch.device) -> None:
    """Compile it for every number of blocks: while a forward is captured nothing can be compiled.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    for blocks in CLUSTERS:
        compiled_on(blocks, torch.cuda.current_device() if device.index is None else device.index)


def topk_select(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
    *,
    blocks: int | None = None,
    share: int = SHARE,
    launch: Launch | None = None,
) -> torch.Tensor:
    """`out`, with the KV slots of each row's highest scores, in no order; -1 behind them where a row has fewer.

    Of equal scores the first ones are taken; -0 counts as less than 0. A score that is no number may count as any.

    Args:
        scores: float32 [rows, width], of which a row's first ones count. Rows begin at multiples of four values.
        lengths: int32 [rows], how many count, at most `width`. The kernel just ahead must not write them: they are read before
            it ends.
        page_table: int32 [rows, pages], rows contiguous; the page of every PAGE_SIZE tokens of a row.
        out: int32 [rows, topk], contiguous.
        blocks: of a row, one of CLUSTERS; chosen by the number of rows if None.
        share: scores of a row that deserve a block of their own, at least one.
        launch: in place of a GPU.

    Raises:
        ValueError: a tensor has another shape, dtype, layout or device, or `problem` says why not.
        RuntimeError: NVRTC or the driver refuses.
    """
    rows, topk = out.shape
    fits = scores.dim() == 2 and scores.shape[0] == rows and scores.dtype == torch.float32 and scores.stride(1) == 1
    require(fits, "scores", scores, f"float32 [{rows}, width] with contiguous rows", "the kernel would misread it")
    if (why := problem(scores, topk)) is not None:
        raise ValueError(why)
    check_tensor("lengths", lengths, torch.int32, (rows,))
    fits = page_table.dim() == 2 and page_table.shape[0] == rows and page_table.dtype == torch.int32
    fits = fits and page_table.stride(1) == 1
    require(fits, "page_table", page_table, f"int32 [{rows}, pages] with contiguous rows", "slots would be other rows'")
    check_tensor("out", out, torch.int32, (rows, topk))
    for name, tensor in (("lengths", lengths), ("page_table", page_table), ("out", out)):
        check_device(name, tensor, "scores", scores.device)
    if blocks not in (None, *CLUSTERS) or share < 1:
        raise ValueError(f"{blocks} blocks, one for each {share} scores: a row has one of {CLUSTERS}")
    if rows:
        blocks = blocks or blocks_of(rows, torch.cuda.get_device_properties(scores.device).multi_processor_count)
        arguments = Arguments(
            *(tensor.data_ptr() for tensor in (scores, lengths, page_table, out)),
            scores.stride(0), page_table.stride(0), topk, share,
        )  # fmt: skip
        (launch or compiled_on(blocks, scores.device.index).launch)((blocks, rows), arguments)
    return out


def topk_select_torch(scores: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The torch twin of `topk_select`, whose slots are in the order of their scores."""
    topk = out.shape[1]
    positions = torch.full_like(out, -1)
    for row, length in enumerate(lengths.tolist()):
        bits = scores[row, :length].view(torch.int32).long()
        keys = torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)  # in the order of scores
        best = torch.sort(keys, descending=True, stable=True).indices[:topk]
        positions[row, : len(best)] = best
    return out.copy_(topk_slots_torch(positions, page_table, torch.arange(len(out), device=out.device), PAGE_SIZE))
