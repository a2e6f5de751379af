"""Sparse MLA for several rows a request, as target_verify and draft_extend have them: the launcher, and how a call is run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.selection_union import (
    SelectionUnion,
    marks_width,
    write_selection_union,
)
from nsa_backend.kernels.sparse_decode import Parts, behind_the_latent, check_tensors
from nsa_backend.kernels.sparse_decode_kernel import join_kernel
from nsa_backend.kernels.sparse_decode_plan import Join, Tile
from nsa_backend.kernels.sparse_verify_kernel import attend_union_kernel


def tile_of(lines: int) -> Tile:
    """Heads of all rows that a program has, and tokens of a step; by registers and shared memory alone, no GPU has timed it.

    Sixty-four lines take the warpgroup instructions of Hopper, and eight warps, so that the output fits their registers; with
    them 64 tokens a step would spill in bfloat16, and in FP8 far more.
    """
    if lines <= 16:
        return Tile(16, 32, 4, 3)
    return Tile(32, 64, 8, 3) if lines <= 32 else Tile(64, 32, 8, 3)


def splits_of(requests: int, lines: int, num_sms: int, tile: Tile) -> int:
    """Programs that share the union of a request: as many as fill the GPU once. Short unions leave some without a step."""
    return max(1, num_sms * tile.programs // max(requests * blocks(lines, tile.heads), 1))


@dataclass(frozen=True)
class VerifyMemory:
    """What the three launches of a call hand on to each other; calls on one stream may share it."""

    marks: torch.Tensor  # int32 [max_requests, marks_width], zeros between calls
    union: SelectionUnion
    parts: Parts

    @classmethod
    def allocate(
        cls,
        max_requests: int,
        rows_per_request: int,
        heads: int,
        latent: int,
        topk: int,
        num_slots: int,
        num_sms: int,
        device: torch.device | str,
    ) -> VerifyMemory:
        """Room for every call of up to `max_requests` requests over `num_slots` KV slots."""
        lines = rows_per_request * heads
        tile = tile_of(lines)
        splits = {requests: splits_of(requests, lines, num_sms, tile) for requests in range(1, max_requests + 1)}
        size = max((requests * lines * n for requests, n in splits.items() if n > 1), default=0)
        return cls(
            torch.zeros(max_requests, marks_width(num_slots), dtype=torch.int32, device=device),
            SelectionUnion.allocate(max_requests, rows_per_request, topk, device),
            Parts.of(size, latent, device),
        )

    def hold(self, requests: int, rows_per_request: int, topk: int, num_slots: int) -> bool:
        """Whether there is room for such a call of the heads that it was allocated for."""
        most, width = self.marks.shape
        return requests <= most and marks_width(num_slots) <= width and self.union.slots.shape[2] == rows_per_request * topk


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
    logit_cap: float = 0.0,
    tile: Tile | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """What `sparse_decode` computes, each KV slot read once for all rows of a request; two launches or three.

    Equal inputs give equal bits. KV of every slot that some row of a request chose must be finite: a line that does not attend
    to it weighs it with 0.

    Args:
        q_nope: [requests * rows_per_request, heads, latent], the last dimension dense; bfloat16, or another for tests.
        q_rope: [requests * rows_per_request, heads, rope], the last dimension dense.
        kv_cache: as `sparse_decode` takes it, bfloat16 or FlashMLA's FP8. Slots that no row names are never read.
        topk_slots: int32 [requests * rows_per_request, topk], rows dense; -1 where there is none. A slot that a row names
            twice counts once.
        lens: int32 [requests * rows_per_request], entries of each row to look at, at most topk.
        sm_scale: of the scores.
        rows_per_request: at most `selection_union.MAX_ROWS_PER_REQUEST`.
        memory: from `VerifyMemory.allocate`, for these heads.
        num_sms: of the GPU.
        logit_cap: scores become logit_cap * tanh(score / logit_cap); 0 leaves them.
        tile: `tile_of` if None; another one is for measurements.
        splits: `splits_of` if None; likewise, but not more.

    Returns:
        [requests * rows_per_request, heads, latent] of the query's dtype; zeros where a row has no slot.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `memory` has no room.
    """
    rows, heads, latent = q_nope.shape
    rope, topk, num_slots = q_rope.shape[-1], topk_slots.shape[1], kv_cache.shape[0]
    check_tensors(q_nope, q_rope, kv_cache, topk_slots, lens)
    requests, lines = rows // rows_per_request, rows_per_request * heads
    if not memory.hold(requests, rows_per_request, topk, num_slots):
        raise ValueError(
            f"memory of {tuple(memory.marks.shape)} marks and {tuple(memory.union.slots.shape)} entries has no room for "
            f"{requests} requests of {rows_per_request} rows of {topk} of {num_slots} slots: the kernel would write past it"
        )
    out = torch.empty(rows, heads, latent, dtype=q_nope.dtype, device=q_nope.device)
    write_selection_union(topk_slots, lens, rows_per_request, marks=memory.marks, union=memory.union)
    if rows == 0:
        return out
    fp8, on_gpu = kv_cache.dtype == torch.float8_e4m3fn, out.is_cuda
    tile = tile or tile_of(lines)
    splits = splits or splits_of(requests, lines, num_sms, tile)
    parts = memory.parts
    if splits > 1 and not parts.hold(requests * splits * lines):
        raise ValueError(f"memory has no room for {requests * splits * lines} parts: the kernel would write past it")
    partial, lse = (parts.out, parts.lse) if splits > 1 else (out, out)
    k_rope, scales = behind_the_latent(kv_cache, latent, q_nope.dtype)
    attend_union_kernel[(requests, blocks(lines, tile.heads), splits)](
        q_nope,
        q_rope,
        kv_cache,
        k_rope,
        scales,
        memory.union.slots,
        memory.union.rows,
        memory.union.counts,
        out,
        partial,
        lse,
        sm_scale,
        logit_cap or 1.0,
        q_nope.stride(0),
        q_nope.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        memory.union.slots.stride(1),
        heads,
        splits,
        ROWS=rows_per_request,
        LATENT=latent,
        ROPE=rope,
        LATENT_STRIDE=kv_cache.stride(0),
        ROPE_STRIDE=k_rope.stride(0),
        SCALES_STRIDE=scales.stride(0),
        BLOCK_H=tile.heads,
        BLOCK_N=tile.tokens,
        STAGES=tile.stages,
        SPLIT=splits > 1,
        FP8=fp8,
        CAPPED=logit_cap != 0,
        COMPILED=on_gpu,
        num_warps=tile.warps,
        **({"launch_pdl": True} if on_gpu else {}),
    )
    if splits > 1:
        join = Join.of(requests, lines)
        width = min(join.latent, latent)
        join_kernel[(requests, lines, latent // width)](
            partial,
            lse,
            out,
            lse,
            lines,
            splits,
            LATENT=latent,
            BLOCK_S=join.parts,
            BLOCK_D=width,
            COMPILED=on_gpu,
            LSE=False,
            num_warps=join.warps,
            **({"launch_pdl": True} if on_gpu else {}),
        )
    return out
