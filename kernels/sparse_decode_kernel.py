"""The two kernels of sparse MLA decode: parts of rows attend by themselves, and a second launch joins them.

A row of decode reads at most index_topk tokens, too few programs for a GPU where there are few rows, so a row is split over
programs: each attends to one stretch of the row's slots for one block of heads and leaves its output and the logarithm of its
weights' sum. The second kernel weighs the parts of a row, in their order, so that the result depends on the shape alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# What changes from batch to batch must not compile the kernels again.
UNSPECIALIZED = ["slots_stride", "heads", "splits", "chunk"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attend_kernel(
    q_nope_ptr,  # [rows, heads, LATENT], heads and latent dense in a row
    q_rope_ptr,  # [rows, heads, ROPE], strides below
    kv_ptr,  # [slots, LATENT + ROPE]
    slots_ptr,  # int32 [rows, slots_stride], -1 where there is none
    lens_ptr,  # int32 [rows], entries of each row to look at
    out_ptr,  # [rows, heads, LATENT], written where SPLIT is False
    partial_ptr,  # float32 [rows, splits, heads, LATENT], written where SPLIT is True
    lse_ptr,  # float32 [rows, splits, heads], base 2; -inf for a part without a token
    scale,  # of scores, natural
    cap,  # of scores, tanh; read where CAPPED
    q_nope_row_stride,
    q_nope_head_stride,
    q_rope_row_stride,
    q_rope_head_stride,
    kv_stride,
    slots_stride,
    heads,
    splits,
    chunk,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    CAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    begin = split * chunk
    end = tl.minimum(begin + chunk, tl.load(lens_ptr + row))
    if SPLIT and begin >= end:  # nobody reads the parts past a row's length
        return
    columns = tl.arange(0, BLOCK_N)
    slots_ptr += row * slots_stride
    # a step's slots come with the step before, so that its tokens can be asked for at once
    slot = tl.load(slots_ptr + begin + columns, mask=begin + columns < end, other=-1)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, LATENT)
    r = tl.arange(0, ROPE)
    real = (h < heads)[:, None]
    q_nope = tl.load(q_nope_ptr + row * q_nope_row_stride + h[:, None] * q_nope_head_stride + d[None, :], mask=real, other=0.0)
    q_rope = tl.load(q_rope_ptr + row * q_rope_row_stride + h[:, None] * q_rope_head_stride + r[None, :], mask=real, other=0.0)
    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, LATENT), tl.float32)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        there = slot >= 0
        token = kv_ptr + tl.where(there, slot, 0).to(tl.int64)[:, None] * kv_stride
        latent = tl.load(token + d[None, :], mask=there[:, None], other=0.0)
        rope = tl.load(token + LATENT + r[None, :], mask=there[:, None], other=0.0)
        following = first + BLOCK_N + columns
        slot = tl.load(slots_ptr + following, mask=following < end, other=-1)
        scores = tl.dot(q_nope, tl.trans(latent))
        scores = tl.dot(q_rope, tl.trans(rope), scores) * scale
        if CAPPED:
            scores = cap * (1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * scores / cap) + 1.0))
        scores = tl.where(there[None, :], scores * LOG2E, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - finite[:, None])
        fade = tl.exp2(best - finite)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * fade[:, None])
        best = higher
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLIT:
        part = (row * splits + split) * heads + h
        tl.store(partial_ptr + part[:, None] * LATENT + d[None, :], out, mask=real)
        tl.store(lse_ptr + part, best + tl.log2(total), mask=h < heads)
    else:
        tl.store(out_ptr + (row * heads + h)[:, None] * LATENT + d[None, :], out.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["heads", "splits", "chunk"])
def join_kernel(
    partial_ptr,  # float32 [rows, splits, heads, LATENT]
    lse_ptr,  # float32 [rows, splits, heads], base 2
    lens_ptr,  # int32 [rows]
    out_ptr,  # [rows, heads, LATENT]
    heads,
    splits,
    chunk,
    LATENT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,  # a power of two
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    if DEPENDENT:
        gdc_wait()
    written = tl.minimum(tl.cdiv(tl.load(lens_ptr + row), chunk), splits)
    first = row * splits
    every = tl.arange(0, MAX_SPLITS)
    lse = tl.load(lse_ptr + (first + every) * heads + head, mask=every < written, other=float("-inf"))
    best = tl.max(lse, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp2(lse - best), 0)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for begin in range(0, written, BLOCK_S):
        s = begin + tl.arange(0, BLOCK_S)
        part = (first + s) * heads + head
        lse_of_s = tl.load(lse_ptr + part, mask=s < written, other=float("-inf"))
        parts = tl.load(partial_ptr + part[:, None] * LATENT + d[None, :], mask=(s < written)[:, None], other=0.0)
        acc += tl.sum(parts * tl.exp2(lse_of_s - best)[:, None], 0)
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (row * heads + head) * LATENT + d, out.to(out_ptr.dtype.element_ty))
