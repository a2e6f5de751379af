"""Sparse MLA decode for few rows: the launcher of both kernels, and the memory of the parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.dependent_launch import early
from nsa_backend.kernels.local_slots import check_rank
from nsa_backend.kernels.sparse_decode_kernel import attend_kernel, join_kernel
from nsa_backend.kernels.sparse_decode_plan import Join, Split, Tile

SCALE_BYTES = 16
"""Of a slot of an FP8 cache: a float32 for each quarter of the latent."""


@dataclass(frozen=True)
class Parts:
    """Memory between the two kernels; calls on one stream may share it."""

    out: torch.Tensor  # float32 [size * latent]
    lse: torch.Tensor  # float32 [size]

    @classmethod
    def allocate(
        cls, max_rows: int, heads: int, latent: int, topk: int, num_sms: int, device: torch.device | str, *, fp8: bool = False
    ) -> Parts:
        """Room for every call of up to `max_rows` rows."""
        size = 0
        for rows in range(1, max_rows + 1):
            parts = Split.of(rows, heads, topk, num_sms, Tile.of(rows, heads, fp8=fp8)).parts
            size = max(size, rows * parts * heads if parts > 1 else 0)
        return cls.of(size, latent, device)

    @classmethod
    def of(cls, size: int, latent: int, device: torch.device | str) -> Parts:
        """Room for `size` parts, each of one row and head; zeros, because the join reads also those that it then skips."""
        zeros = torch.zeros(size * (latent + 1), dtype=torch.float32, device=device)
        return cls(zeros[: size * latent], zeros[size * latent :])

    def hold(self, size: int) -> bool:
        """Whether there is room for `size` of them."""
        return self.lse.numel() >= size


def sparse_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_slots: torch.Tensor,
    lens: torch.Tensor,
    sm_scale: float,
    *,
    num_sms: int,
    logit_cap: float = 0.0,
    parts: Parts | None = None,
    tile: Tile | None = None,
    join: Join | None = None,
    ranks: int = 1,
    rank: int = 0,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(sm_scale * (q_nope . latent + q_rope . rope)) @ latent over the slots of each row; one launch or two.

    Equal shapes give equal bits. In PyTorch, where all slots of a row are there:
    `keys = kv_cache[topk_slots[row], 0].float(); p = (sm_scale * q @ keys.T).softmax(-1); p @ keys[:, :latent]`.

    Args:
        q_nope: [rows, heads, latent], the last dimension dense; bfloat16, or float16 or float32 for tests.
        q_rope: [rows, heads, rope], the last dimension dense.
        kv_cache: [slots, 1, latent + rope] of the query's dtype; or float8_e4m3fn, rows as FlashMLA's: latent values, then
            four float32 scales, one of each quarter of them, then rope values of the query's dtype. Rows dense. Slots that no
            row names are never read.
        topk_slots: int32 [rows, topk], rows dense; -1 where there is none.
        lens: int32 [rows], entries of each row to look at, at most topk.
        sm_scale: of the scores.
        num_sms: of the GPU.
        logit_cap: scores become logit_cap * tanh(score / logit_cap); 0 leaves them.
        parts: memory for what is joined, from `Parts.allocate`; None, or too little of it, allocates.
        tile: `Tile.of` if None; another one is for measurements.
        join: `Join.of` if None; likewise.
        ranks: that divide slots among them, as `local_slots` says; this one is `rank`, and reads its own alone.
        lse: float32 [rows, heads], contiguous, which gets the log-sum-exp of each row in base 2, -inf where it has no slot;
            None where nobody asks.

    Returns:
        [rows, heads, latent] of the query's dtype; zeros where a row has no slot.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    rows, heads, latent = q_nope.shape
    rope, topk = q_rope.shape[-1], topk_slots.shape[1]
    check_tensors(q_nope, q_rope, kv_cache, topk_slots, lens)
    check_rank(ranks, rank)
    if lse is not None:
        check_tensor("lse", lse, torch.float32, (rows, heads))
    out = torch.empty(rows, heads, latent, dtype=q_nope.dtype, device=q_nope.device)
    if rows == 0:
        return out
    fp8 = kv_cache.dtype == torch.float8_e4m3fn
    tile, join = tile or Tile.of(rows, heads, fp8=fp8), join or Join.of(rows, heads)
    split = Split.of(rows, heads, topk, num_sms, tile)
    size = rows * split.parts * heads
    if split.parts > 1 and (parts is None or not parts.hold(size)):
        parts = Parts.of(size, latent, out.device)
    partial, lse_of_parts = (parts.out, parts.lse) if split.parts > 1 else (out, out if lse is None else lse)
    k_rope, scales = behind_the_latent(kv_cache, latent, q_nope.dtype)
    on_gpu = out.is_cuda
    attend_kernel[(rows, blocks(heads, tile.heads), split.parts)](
        q_nope,
        q_rope,
        kv_cache,
        k_rope,
        scales,
        topk_slots,
        lens,
        out,
        partial,
        lse_of_parts,
        sm_scale,
        logit_cap or 1.0,
        q_nope.stride(0),
        q_nope.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        topk_slots.stride(0),
        topk,
        heads,
        split.parts,
        split.chunk,
        LATENT=latent,
        ROPE=rope,
        LATENT_STRIDE=kv_cache.stride(0),
        ROPE_STRIDE=k_rope.stride(0),
        SCALES_STRIDE=scales.stride(0),
        BLOCK_H=tile.heads,
        BLOCK_N=tile.tokens,
        STAGES=tile.stages,
        SPLIT=split.parts > 1,
        FP8=fp8,
        CAPPED=logit_cap != 0,
        COMPILED=on_gpu,
        RANKS=ranks,
        RANK=rank,
        LSE=lse is not None,
        num_warps=tile.warps,
        **early(on_gpu),
    )
    if split.parts > 1:
        width = min(join.latent, latent)
        join_kernel[(rows, heads, latent // width)](
            partial,
            lse_of_parts,
            out,
            lse_of_parts if lse is None else lse,
            heads,
            split.parts,
            LATENT=latent,
            BLOCK_S=join.parts,
            BLOCK_D=width,
            COMPILED=on_gpu,
            LSE=lse is not None,
            num_warps=join.warps,
            **early(on_gpu),
        )
    return out


def behind_the_latent(kv_cache: torch.Tensor, latent: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of every slot's rotated part and of its scales, which a cache without scales has none of."""
    if kv_cache.dtype == dtype:
        return kv_cache[..., latent:], kv_cache
    after_scales = latent + SCALE_BYTES
    return kv_cache[..., after_scales:].view(dtype), kv_cache[..., latent:after_scales].view(torch.float32)


def check_tensors(
    q_nope: torch.Tensor, q_rope: torch.Tensor, kv_cache: torch.Tensor, topk_slots: torch.Tensor, lens: torch.Tensor
) -> None:
    """Refuse what a kernel of this family would misread; raises ValueError. Arguments are `sparse_decode`'s."""
    rows, heads, latent = q_nope.shape
    rope = q_rope.shape[-1]
    widths = {q_nope.dtype: latent + rope, torch.float8_e4m3fn: latent + SCALE_BYTES + rope * q_nope.element_size()}
    fits = {
        "q_rope": q_rope.shape == (rows, heads, rope) and q_rope.stride(-1) == 1 and q_rope.dtype == q_nope.dtype,
        "q_nope": q_nope.stride(-1) == 1 and heads * q_nope.stride(1) < 2**31,  # offsets of heads have 32 bits
        "kv_cache": kv_cache.shape[1:] == (1, widths.get(kv_cache.dtype)) and kv_cache.stride(-1) == 1,
        "topk_slots": topk_slots.shape[0] == rows and topk_slots.stride(-1) == 1 and topk_slots.dtype == torch.int32,
        "lens": lens.shape == (rows,) and lens.is_contiguous() and lens.dtype == torch.int32,
    }
    form = f"of a query of {q_nope.dtype} {tuple(q_nope.shape)} and {tuple(q_rope.shape)}, rows dense"
    for name, tensor in zip(fits, (q_rope, q_nope, kv_cache, topk_slots, lens), strict=True):
        require(fits[name], name, tensor, form, "the kernel would misread it")
