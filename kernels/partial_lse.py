"""The log-sum-exp of a rank's part of attention, in the form that ranks join their parts by.

Where ranks divide the KV of a request, each attends to what it has, and parts are weighed by the logarithms of their sums of
weights. Kernels return those in base e or 2, and for a row without a token anything: infinity of either sign beside an output
that may be no number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import power_of_two
from nsa_backend.kernels.checks import check_tensor, require


# FA3's heads lie as far apart as a batch has rows.
@triton.jit(do_not_specialize=["lse_row_stride", "lse_head_stride"])
def partial_lse_kernel(
    lse_ptr,  # float32 [rows, heads], strides below
    lse_row_stride,
    lse_head_stride,
    counts_ptr,  # int32 [rows], KV tokens that a row attended to
    joined_ptr,  # float32 [rows, heads]
    out_ptr,  # [rows, heads, latent], strides below, the last dimension dense
    out_row_stride,
    out_head_stride,
    heads,
    latent,
    NATURAL: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    empty = tl.load(counts_ptr + row) == 0
    head = tl.arange(0, HEADS_BLOCK)
    lse = tl.load(lse_ptr + row * lse_row_stride + head.to(tl.int64) * lse_head_stride, mask=head < heads, other=0.0)
    if NATURAL:
        lse *= LOG2E
    tl.store(joined_ptr + row * heads + head, tl.where(empty, float("-inf"), lse), mask=head < heads)
    if empty:
        column = tl.arange(0, LATENT_BLOCK)
        nothing = tl.zeros((LATENT_BLOCK,), out_ptr.dtype.element_ty)
        at = out_ptr + row * out_row_stride + column
        for _ in range(heads):
            tl.store(at, nothing, mask=column < latent)
            at += out_head_stride


def partial_lse(out: torch.Tensor, lse: torch.Tensor, counts: torch.Tensor, *, natural: bool) -> torch.Tensor:
    """What ranks join `out` by, and zeros in `out` where a row attended to nothing; one launch.

    Args:
        out: [rows, heads, latent], the last dimension dense; attention's.
        lse: float32 [rows, heads] with any strides, its log-sum-exp.
        counts: int32 [rows], KV tokens of each row.
        natural: whether `lse` is in base e; else in base 2.

    Returns:
        float32 [rows, heads], base 2; -inf where a row attended to nothing.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    rows, heads, latent = out.shape
    require(out.stride(2) == 1, "out", out, "dense in its last dimension", "other values would be cleared")
    fits = lse.shape == (rows, heads) and lse.dtype == torch.float32
    require(fits, "lse", lse, f"float32 [{rows}, {heads}]", "parts would be weighed by others' sums")
    check_tensor("counts", counts, torch.int32, (rows,))
    joined = torch.empty(rows, heads, dtype=torch.float32, device=out.device)
    if rows:
        partial_lse_kernel[(rows,)](
            lse,
            lse.stride(0),
            lse.stride(1),
            counts,
            joined,
            out,
            out.stride(0),
            out.stride(1),
            heads,
            latent,
            NATURAL=natural,
            HEADS_BLOCK=power_of_two(heads),
            LATENT_BLOCK=power_of_two(latent),
        )
    return joined


def partial_lse_torch(out: torch.Tensor, lse: torch.Tensor, counts: torch.Tensor, *, natural: bool) -> torch.Tensor:
    """The torch twin of `partial_lse`."""
    out[counts == 0] = 0
    joined = lse * 1.4426950408889634 if natural else lse.clone()
    return joined.masked_fill((counts == 0)[:, None], float("-inf"))
