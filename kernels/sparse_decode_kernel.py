"""The two kernels of sparse MLA decode: parts of rows attend by themselves, and a second launch joins them.

A row of decode reads at most index_topk tokens, too few programs for a GPU where there are few rows, so a row is split over
programs: each attends to one stretch of the row's slots for one block of heads and leaves its output and the logarithm of its
weights' sum. The second kernel weighs the parts of a row, in their order, so that the result depends on the shape alone.

The latent is taken in four pieces. A matrix product of sixteen heads over 512 values is one chain of 32 tensor-core
instructions that wait for each other; four shorter chains run beside each other. With an FP8 KV cache a piece is what has a
scale of its own, so that scores and weights are scaled and no value is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend.kernels.dependent_launch import let_next_begin, wait_for_kernel_ahead
from nsa_backend.kernels.local_slots import slot_of_rank

# What changes from batch to batch must not compile the kernels again: lengths of a draft step begin at any int32.
UNSPECIALIZED = ["slots_ptr", "lens_ptr", "slots_stride", "topk", "heads", "splits", "chunk"]

# Four FP8 values to bfloat16, which holds them all. In assembly that claims to have side effects, because the compiler would
# widen each value twice, once for each product, and then copies nothing ahead of its use (seen with Triton 3.6 and 3.8).
FP8_TO_BF16 = tl.constexpr(
    """{
    .reg .b16 low, high, h0, h1, h2, h3;
    .reg .b32 first, second;
    .reg .f32 f0, f1, f2, f3;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {h0, h1}, first;
    mov.b32 {h2, h3}, second;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    cvt.rn.bf16x2.f32 $0, f1, f0;
    cvt.rn.bf16x2.f32 $1, f3, f2;
}"""
)


@triton.jit
def load_piece(ptr, mask, dtype: tl.constexpr, FP8: tl.constexpr, COMPILED: tl.constexpr):
    """Values of one piece of the latent, of the query's dtype."""
    values = tl.load(ptr, mask=mask, other=0.0)
    if FP8 and COMPILED:
        return tl.inline_asm_elementwise(FP8_TO_BF16, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=False, pack=4)
    return values.to(dtype)


@triton.jit
def score_tokens(
    q0,  # [BLOCK_H, LATENT / 4], and the other pieces
    q1,
    q2,
    q3,
    q_rope,  # [BLOCK_H, ROPE]
    latent_ptr,
    k_rope_ptr,
    scales_ptr,
    token,  # int64 [BLOCK_N], slots to read
    there,  # bool [BLOCK_N], where there is one
    d,
    r,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    FP8: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Products of a query with one step's tokens, float32 [BLOCK_H, BLOCK_N], their four pieces, and the pieces' scales."""
    D: tl.constexpr = q0.shape[1]
    real_token = there[:, None]
    latent = latent_ptr + token[:, None] * LATENT_STRIDE + d
    k0 = load_piece(latent, real_token, q0.dtype, FP8, COMPILED)
    k1 = load_piece(latent + D, real_token, q0.dtype, FP8, COMPILED)
    k2 = load_piece(latent + 2 * D, real_token, q0.dtype, FP8, COMPILED)
    k3 = load_piece(latent + 3 * D, real_token, q0.dtype, FP8, COMPILED)
    k_rope = tl.load(k_rope_ptr + token[:, None] * ROPE_STRIDE + r, mask=real_token, other=0.0)
    scores0 = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    scores1 = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    scores2 = tl.dot(q2, tl.trans(k2), input_precision="ieee")
    scores3 = tl.dot(q3, tl.trans(k3), input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
    if FP8:
        scales = scales_ptr + token * SCALES_STRIDE
        scale0 = tl.load(scales, mask=there, other=0.0)[None, :]
        scale1 = tl.load(scales + 1, mask=there, other=0.0)[None, :]
        scale2 = tl.load(scales + 2, mask=there, other=0.0)[None, :]
        scale3 = tl.load(scales + 3, mask=there, other=0.0)[None, :]
        scores += (scores0 * scale0 + scores1 * scale1) + (scores2 * scale2 + scores3 * scale3)
        return scores, (k0, k1, k2, k3), (scale0, scale1, scale2, scale3)
    else:
        scores += (scores0 + scores1) + (scores2 + scores3)
        return scores, (k0, k1, k2, k3), (1.0, 1.0, 1.0, 1.0)


@triton.jit
def weigh_tokens(
    scores,  # float32 [BLOCK_H, BLOCK_N], natural
    seen,  # bool [1 or BLOCK_H, BLOCK_N], which tokens a query row attends to
    pieces,  # of the tokens, as `score_tokens` returns them
    scales,
    best,  # float32 [BLOCK_H], highest score so far, base 2
    total,  # float32 [BLOCK_H, BLOCK_N where EVERY_COLUMN, else 1], sums of weights
    out0,  # float32 [BLOCK_H, LATENT / 4], weighted sums, and of the other pieces
    out1,
    out2,
    out3,
    scale,
    cap,
    dtype: tl.constexpr,
    EVERY_COLUMN: tl.constexpr,
    FP8: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """`best`, `total` and the weighted sums with one step's tokens in them."""
    LOG2E: tl.constexpr = 1.4426950408889634
    scores *= scale
    if CAPPED:
        scores = cap * (1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * scores / cap) + 1.0))
    scores = tl.where(seen, scores * LOG2E, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - finite[:, None])
    fade = tl.exp2(best - finite)[:, None]
    total = total * fade + (weights if EVERY_COLUMN else tl.sum(weights, 1)[:, None])
    k0, k1, k2, k3 = pieces
    if FP8:
        scale0, scale1, scale2, scale3 = scales
        out0 = tl.dot((weights * scale0).to(dtype), k0, out0 * fade, input_precision="ieee")
        out1 = tl.dot((weights * scale1).to(dtype), k1, out1 * fade, input_precision="ieee")
        out2 = tl.dot((weights * scale2).to(dtype), k2, out2 * fade, input_precision="ieee")
        out3 = tl.dot((weights * scale3).to(dtype), k3, out3 * fade, input_precision="ieee")
    else:
        rounded = weights.to(dtype)
        out0 = tl.dot(rounded, k0, out0 * fade, input_precision="ieee")
        out1 = tl.dot(rounded, k1, out1 * fade, input_precision="ieee")
        out2 = tl.dot(rounded, k2, out2 * fade, input_precision="ieee")
        out3 = tl.dot(rounded, k3, out3 * fade, input_precision="ieee")
    return higher, total, out0, out1, out2, out3


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attend_kernel(
    q_nope_ptr,  # [rows, heads, LATENT], strides below
    q_rope_ptr,  # [rows, heads, ROPE], strides below
    latent_ptr,  # [slots, LATENT], LATENT_STRIDE apart; of the query's dtype, or FP8
    k_rope_ptr,  # [slots, ROPE], ROPE_STRIDE apart, of the query's dtype
    scales_ptr,  # float32 [slots, 4], SCALES_STRIDE apart, of the pieces; read where FP8
    slots_ptr,  # int32 [rows, slots_stride], -1 where there is none
    lens_ptr,  # int32 [rows], entries of each row to look at
    out_ptr,  # [rows, heads, LATENT], written where SPLIT is False
    partial_ptr,  # float32 [rows, splits, heads, LATENT], written where SPLIT is True
    lse_ptr,  # float32 [rows, splits, heads], base 2, -inf for a part without a token; written where SPLIT or LSE is True
    scale,  # of scores, natural
    cap,  # of scores, tanh; read where CAPPED
    q_nope_row_stride,
    q_nope_head_stride,
    q_rope_row_stride,
    q_rope_head_stride,
    slots_stride,
    topk,
    heads,
    splits,
    chunk,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,  # strides of the cache are constants: of an FP8 one they would else not tell how it is aligned
    ROPE_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    FP8: tl.constexpr,
    CAPPED: tl.constexpr,
    COMPILED: tl.constexpr,
    RANKS: tl.constexpr,  # that divide slots among them, as `local_slots` says
    RANK: tl.constexpr,
    LSE: tl.constexpr,
):
    D: tl.constexpr = LATENT // 4
    EVERY_COLUMN: tl.constexpr = BLOCK_H < 64  # has a sum of its own, added up at the end; more heads have no registers for it
    let_next_begin(SPLIT, COMPILED)  # the join
    wait_for_kernel_ahead(COMPILED)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    begin = split * chunk
    columns = tl.arange(0, BLOCK_N)
    slots_ptr += row * slots_stride
    # The first slots do not wait for the row's length, and a step's slots come with the step before: tokens are asked for as
    # soon as can be, several steps ahead.
    slot = tl.load(slots_ptr + begin + columns, mask=begin + columns < topk, other=-1)
    end = tl.minimum(begin + chunk, tl.load(lens_ptr + row))
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    part = (row * splits + split) * heads + h
    if SPLIT and begin >= end:
        tl.store(lse_ptr + part, tl.full((BLOCK_H,), float("-inf"), tl.float32), mask=h < heads)
        return
    slot = slot_of_rank(tl.where(begin + columns < end, slot, -1), RANKS, RANK)
    d = tl.arange(0, D)[None, :]
    r = tl.arange(0, ROPE)[None, :]
    real = (h < heads)[:, None]
    query = q_nope_ptr + row * q_nope_row_stride + h[:, None] * q_nope_head_stride + d
    q0 = tl.load(query, mask=real, other=0.0)
    q1 = tl.load(query + D, mask=real, other=0.0)
    q2 = tl.load(query + 2 * D, mask=real, other=0.0)
    q3 = tl.load(query + 3 * D, mask=real, other=0.0)
    q_rope = tl.load(q_rope_ptr + row * q_rope_row_stride + h[:, None] * q_rope_head_stride + r, mask=real, other=0.0)
    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H, BLOCK_N if EVERY_COLUMN else 1), tl.float32)
    out0 = tl.zeros((BLOCK_H, D), tl.float32)
    out1 = tl.zeros((BLOCK_H, D), tl.float32)
    out2 = tl.zeros((BLOCK_H, D), tl.float32)
    out3 = tl.zeros((BLOCK_H, D), tl.float32)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        there = slot >= 0
        token = tl.where(there, slot, 0).to(tl.int64)
        scores, pieces, scales = score_tokens(
            q0, q1, q2, q3, q_rope, latent_ptr, k_rope_ptr, scales_ptr, token, there, d, r, LATENT_STRIDE=LATENT_STRIDE,
            ROPE_STRIDE=ROPE_STRIDE, SCALES_STRIDE=SCALES_STRIDE, FP8=FP8, COMPILED=COMPILED,
        )  # fmt: skip
        following = first + BLOCK_N + columns
        slot = slot_of_rank(tl.load(slots_ptr + following, mask=following < end, other=-1), RANKS, RANK)
        best, total, out0, out1, out2, out3 = weigh_tokens(
            scores, there[None, :], pieces, scales, best, total, out0, out1, out2, out3, scale, cap,
            dtype=q0.dtype, EVERY_COLUMN=EVERY_COLUMN, FP8=FP8, CAPPED=CAPPED,
        )  # fmt: skip
    weight = tl.sum(total, 1)
    over = (1.0 / tl.where(weight == 0.0, 1.0, weight))[:, None]
    if SPLIT or LSE:
        tl.store(lse_ptr + part, best + tl.log2(weight), mask=h < heads)
    out = partial_ptr + part[:, None] * LATENT + d if SPLIT else out_ptr + part[:, None] * LATENT + d
    dtype = out.dtype.element_ty
    tl.store(out, (out0 * over).to(dtype), mask=real)
    tl.store(out + D, (out1 * over).to(dtype), mask=real)
    tl.store(out + 2 * D, (out2 * over).to(dtype), mask=real)
    tl.store(out + 3 * D, (out3 * over).to(dtype), mask=real)


@triton.jit(do_not_specialize=["heads", "splits"])
def join_kernel(
    partial_ptr,  # float32 [rows, splits, heads, LATENT]; anything in a part without a token
    lse_ptr,  # float32 [rows, splits, heads], base 2; -inf for a part without a token
    out_ptr,  # [rows, heads, LATENT]
    joined_ptr,  # float32 [rows, heads], base 2, -inf for a row without a token; written where LSE is True
    heads,
    splits,
    LATENT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPILED: tl.constexpr,
    LSE: tl.constexpr,
):
    wait_for_kernel_ahead(COMPILED)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    best = float("-inf")
    total = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, splits, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        part = (row * splits + s) * heads + head
        lse = tl.load(lse_ptr + part, mask=s < splits, other=float("-inf"))
        # asked for beside the sums, not after them
        parts = tl.load(partial_ptr + part[:, None] * LATENT + d[None, :], mask=(s < splits)[:, None], other=0.0)
        higher = tl.maximum(best, tl.max(lse, 0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(lse - finite)
        fade = tl.exp2(best - finite)
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade + tl.sum(tl.where((lse > float("-inf"))[:, None], parts, 0.0) * weights[:, None], 0)
        best = higher
    if LSE and tl.program_id(2) == 0:
        tl.store(joined_ptr + row * heads + head, best + tl.log2(total))
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (row * heads + head) * LATENT + d, out.to(out_ptr.dtype.element_ty))
