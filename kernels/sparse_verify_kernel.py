"""The kernel of sparse MLA for several rows a request: one program has all of them, and reads each slot of their union once.

Lines of its tile are query heads of one row after the other: four rows of sixteen heads fill the 64 lines of a Hopper tensor
core's instruction, where one row would leave 48 of them empty. A line attends to the slots whose mask has its row's bit.
`sparse_decode_kernel` has the rest: what a step computes, and the second launch that joins the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa_backend.kernels.sparse_decode_kernel import score_tokens, weigh_tokens

UNSPECIALIZED = ["capacity", "heads", "splits"]


@triton.jit
def entry_of(u, ends, gaps):
    """Where entry `u` of the four lists lies, which are `gaps` apart from end to begin."""
    first, second, third = ends
    gap0, gap1, gap2 = gaps
    return u + tl.where(u >= first, gap0, 0) + tl.where(u >= second, gap1, 0) + tl.where(u >= third, gap2, 0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attend_union_kernel(
    q_nope_ptr,  # [requests * ROWS, heads, LATENT], strides below
    q_rope_ptr,  # [requests * ROWS, heads, ROPE], strides below
    latent_ptr,  # [slots, LATENT], LATENT_STRIDE apart; of the query's dtype, or FP8
    k_rope_ptr,  # [slots, ROPE], ROPE_STRIDE apart, of the query's dtype
    scales_ptr,  # float32 [slots, 4], SCALES_STRIDE apart, of the pieces; read where FP8
    union_ptr,  # int32 [requests, 4, capacity], slots
    rows_ptr,  # uint8 [requests, 4, capacity], bit j where row j attends to the slot
    counts_ptr,  # int32 [requests, 4], entries of each list
    out_ptr,  # [requests * ROWS, heads, LATENT], written where SPLIT is False
    partial_ptr,  # float32 [requests, splits, ROWS * heads, LATENT], written where SPLIT is True
    lse_ptr,  # float32 [requests, splits, ROWS * heads], base 2; -inf for a part without a token
    scale,  # of scores, natural
    cap,  # of scores, tanh; read where CAPPED
    q_nope_row_stride,
    q_nope_head_stride,
    q_rope_row_stride,
    q_rope_head_stride,
    capacity,
    heads,
    splits,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    FP8: tl.constexpr,
    CAPPED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    D: tl.constexpr = LATENT // 4
    EVERY_COLUMN: tl.constexpr = BLOCK_H < 64
    if COMPILED:
        if SPLIT:
            gdc_launch_dependents()  # to the join alone, which waits before all else
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    counts = counts_ptr + request * 4
    count0 = tl.load(counts)
    count1 = tl.load(counts + 1)
    count2 = tl.load(counts + 2)
    first = count0
    second = first + count1
    third = second + count2
    total_count = third + tl.load(counts + 3)
    ends = (first, second, third)
    gaps = (capacity - count0, capacity - count1, capacity - count2)
    chunk = tl.cdiv(tl.cdiv(total_count, splits), BLOCK_N) * BLOCK_N
    begin = split * chunk
    end = tl.minimum(begin + chunk, total_count)
    lines = ROWS * heads
    line = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    part = (request * splits + split) * lines + line
    if SPLIT and begin >= end:
        tl.store(lse_ptr + part, tl.full((BLOCK_H,), float("-inf"), tl.float32), mask=line < lines)
        return
    columns = tl.arange(0, BLOCK_N)
    union_ptr += request * 4 * capacity
    rows_ptr += request * 4 * capacity
    entry = entry_of(begin + columns, ends, gaps)
    slot = tl.load(union_ptr + entry, mask=begin + columns < end, other=-1)
    rows = tl.load(rows_ptr + entry, mask=begin + columns < end, other=0)
    j = tl.minimum(line // heads, ROWS)  # of lines past the last one none: no bit is theirs
    row = request * ROWS + j
    h = line % heads
    d = tl.arange(0, D)[None, :]
    r = tl.arange(0, ROPE)[None, :]
    real = (line < lines)[:, None]
    query = q_nope_ptr + (row * q_nope_row_stride + h * q_nope_head_stride)[:, None] + d
    q0 = tl.load(query, mask=real, other=0.0)
    q1 = tl.load(query + D, mask=real, other=0.0)
    q2 = tl.load(query + 2 * D, mask=real, other=0.0)
    q3 = tl.load(query + 3 * D, mask=real, other=0.0)
    q_rope = tl.load(q_rope_ptr + (row * q_rope_row_stride + h * q_rope_head_stride)[:, None] + r, mask=real, other=0.0)
    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H, BLOCK_N if EVERY_COLUMN else 1), tl.float32)
    out0 = tl.zeros((BLOCK_H, D), tl.float32)
    out1 = tl.zeros((BLOCK_H, D), tl.float32)
    out2 = tl.zeros((BLOCK_H, D), tl.float32)
    out3 = tl.zeros((BLOCK_H, D), tl.float32)
    for step in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        there = slot >= 0
        token = tl.where(there, slot, 0).to(tl.int64)
        scores, pieces, scales = score_tokens(
            q0, q1, q2, q3, q_rope, latent_ptr, k_rope_ptr, scales_ptr, token, there, d, r, LATENT_STRIDE=LATENT_STRIDE,
            ROPE_STRIDE=ROPE_STRIDE, SCALES_STRIDE=SCALES_STRIDE, FP8=FP8, COMPILED=COMPILED,
        )  # fmt: skip
        seen = ((rows.to(tl.int32)[None, :] >> j[:, None]) & 1) != 0
        following = step + BLOCK_N + columns
        entry = entry_of(following, ends, gaps)
        slot = tl.load(union_ptr + entry, mask=following < end, other=-1)
        rows = tl.load(rows_ptr + entry, mask=following < end, other=0)
        best, total, out0, out1, out2, out3 = weigh_tokens(
            scores, seen, pieces, scales, best, total, out0, out1, out2, out3, scale, cap,
            dtype=q0.dtype, EVERY_COLUMN=EVERY_COLUMN, FP8=FP8, CAPPED=CAPPED,
        )  # fmt: skip
    weight = tl.sum(total, 1)
    over = (1.0 / tl.where(weight == 0.0, 1.0, weight))[:, None]
    if SPLIT:
        out = partial_ptr + part[:, None] * LATENT + d
        lse = tl.where(weight == 0.0, float("-inf"), best + tl.log2(tl.where(weight == 0.0, 1.0, weight)))
        tl.store(lse_ptr + part, lse, mask=line < lines)
    else:
        out = out_ptr + (request * lines + line)[:, None] * LATENT + d
    dtype = out.dtype.element_ty
    tl.store(out, (out0 * over).to(dtype), mask=real)
    tl.store(out + D, (out1 * over).to(dtype), mask=real)
    tl.store(out + 2 * D, (out2 * over).to(dtype), mask=real)
    tl.store(out + 3 * D, (out3 * over).to(dtype), mask=real)
