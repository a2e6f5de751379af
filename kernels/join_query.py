"""The join of the latent and the RoPE part of absorbed MLA queries, for kernels that read one tensor with padded heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import blocks, power_of_two
from nsa_backend.kernels.checks import require

HEAD_BLOCK = 4
"""Heads a program copies: 4.5 KiB of bfloat16 at DeepSeek-V3.2's 512 + 64."""


@triton.jit
def join_query_kernel(
    q_nope_ptr,  # [rows, heads, LATENT], last dimension contiguous
    q_nope_row_stride,
    q_nope_head_stride,
    q_rope_ptr,  # [rows, heads, ROPE], last dimension contiguous
    q_rope_row_stride,
    q_rope_head_stride,
    out_ptr,  # [rows, padded heads, LATENT + ROPE], contiguous
    out_row_stride,
    heads,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # A head of SGLang's q_nope lies rows * LATENT after the one before it: of many heads in a long prefill past 2**31 values.
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    far = head.to(tl.int64)
    real = head < heads
    latent = tl.arange(0, LATENT_BLOCK)[None, :]
    rope = tl.arange(0, ROPE_BLOCK)[None, :]
    in_latent, in_rope = real & (latent < LATENT), real & (rope < ROPE)
    # Both are asked for before either is stored: a store waits for its values, and loads stay behind it.
    nope = tl.load(q_nope_ptr + row * q_nope_row_stride + far * q_nope_head_stride + latent, mask=in_latent)
    part = tl.load(q_rope_ptr + row * q_rope_row_stride + far * q_rope_head_stride + rope, mask=in_rope)
    out = out_ptr + row * out_row_stride + head * (LATENT + ROPE)
    tl.store(out + latent, nope, mask=in_latent)
    tl.store(out + LATENT + rope, part, mask=in_rope)


def join_query(q_nope: torch.Tensor, q_rope: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write `q_nope` and `q_rope` side by side into the first heads of `out`; one launch, the other heads keep their values.

    Args:
        q_nope: [rows, heads, latent], last dimension contiguous (SGLang's is a transposed view).
        q_rope: [rows, heads, rope], last dimension contiguous, of the same dtype.
        out: [rows, at least heads, latent + rope], contiguous, of the same dtype.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit; says what would be read or written wrong.
    """
    rows, heads, latent_dim = q_nope.shape
    rope_dim = q_rope.shape[-1]
    width = latent_dim + rope_dim
    require(q_rope.shape[:2] == (rows, heads), "q_rope", q_rope, f"[{rows}, {heads}, rope]", "parts would mix")
    fits = out.shape[0] == rows and out.shape[1] >= heads and out.shape[2] == width and out.is_contiguous()
    require(fits, "out", out, f"contiguous [{rows}, at least {heads}, {width}]", "the kernel would write past its end")
    for name, part in (("q_nope", q_nope), ("q_rope", q_rope)):
        alike = part.dtype == out.dtype and part.device == out.device
        require(alike, name, part, f"{out.dtype} on {out.device} as out is", "bits would be misread")
        require(part.stride(2) == 1, name, part, "contiguous in its last dimension", "values would mix")
    if rows:
        join_query_kernel[(rows, blocks(heads, HEAD_BLOCK))](
            q_nope,
            q_nope.stride(0),
            q_nope.stride(1),
            q_rope,
            q_rope.stride(0),
            q_rope.stride(1),
            out,
            out.stride(0),
            heads,
            LATENT=latent_dim,
            ROPE=rope_dim,
            LATENT_BLOCK=power_of_two(latent_dim),
            ROPE_BLOCK=power_of_two(rope_dim),
            HEADS=HEAD_BLOCK,
        )
    return out


def join_query_torch(q_nope: torch.Tensor, q_rope: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The torch twin of `join_query`."""
    heads = q_nope.shape[1]
    out[:, :heads] = torch.cat([q_nope, q_rope], dim=-1)
    return out
