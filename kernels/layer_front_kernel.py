"""The kernels in front of a sparse MLA layer: norms, RoPE, Hadamard rotation, quantisation and writes to both caches."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend.kernels.dependent_launch import let_next_begin, wait_for_kernel_ahead
from nsa_backend.kernels.layer_front_steps import (
    FP8_MAX,
    GROUP,
    LANES,
    add_squares_of_four,
    hadamard,
    next_power_of_two,
    normed_key,
    quantised,
    reciprocal_rms,
    rope_angles,
    rotated,
    rotated_neighbours,
    rounded,
    sum_of_far_lanes,
    sum_of_lanes,
)

PAGE: tl.constexpr = tl.constexpr(64)
INDEX_PAGE_BYTES: tl.constexpr = tl.constexpr(8448)


@triton.jit
def norm_query(
    raw_ptr, weight_ptr, eps, out_ptr, scales_ptr, scales_stride,
    RANK: tl.constexpr, GROUPS: tl.constexpr, FP8: tl.constexpr, POWERS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The query's latent of one row normed, and quantised with a scale a group where FP8: a power of two where POWERS."""
    rstd = reciprocal_rms(raw_ptr, eps, RANK)
    group = tl.arange(0, GROUPS)[:, None]
    dim, real = group * GROUP + tl.arange(0, GROUP)[None, :], group < RANK // GROUP
    weight = tl.load(weight_ptr + dim, mask=real, other=0.0).to(tl.float32) + 0.0
    x = rounded(tl.load(raw_ptr + dim, mask=real, other=0.0).to(tl.float32) * rstd * weight)
    if FP8:
        values, scale = quantised(x, POWERS, COMPILED)
        tl.store(out_ptr + dim, values, mask=real)
        tl.store(scales_ptr + group * scales_stride, scale, mask=real)
    else:
        tl.store(out_ptr + dim, x.to(tl.bfloat16), mask=real)


@triton.jit
def write_kv(
    raw_ptr, weight_ptr, eps, cos_sin_ptr, position, latent_ptr, scales_ptr, k_rope_ptr, real,
    LATENT: tl.constexpr, ROPE: tl.constexpr, FP8: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """The latent of one row normed, its RoPE part rotated, and both written to a slot of the KV cache where `real`."""
    rstd = reciprocal_rms(raw_ptr, eps, LATENT)
    group = tl.arange(0, LATENT // GROUP)[:, None]
    dim = group * GROUP + tl.arange(0, GROUP)[None, :]
    weight = tl.load(weight_ptr + dim).to(tl.float32) + 0.0
    x = rounded(tl.load(raw_ptr + dim).to(tl.float32) * rstd * weight)
    if FP8:
        scale = tl.max(tl.abs(x), axis=1, keep_dims=True) / FP8_MAX
        inverse = 1.0 / scale
        tl.store(latent_ptr + dim, tl.clamp(x * inverse, -FP8_MAX, FP8_MAX).to(tl.float8e4nv), mask=real)
        tl.store(scales_ptr + group, scale, mask=real)
    else:
        tl.store(latent_ptr + dim, x.to(tl.bfloat16), mask=real)
    rope = tl.arange(0, ROPE)
    cos, sin, partner = rope_angles(cos_sin_ptr, position, rope, ROPE, NEOX)
    turned, other = tl.load(raw_ptr + LATENT + rope).to(tl.float32), tl.load(raw_ptr + LATENT + partner).to(tl.float32)
    tl.store(k_rope_ptr + rope, rotated(turned, other, cos, sin).to(tl.bfloat16), mask=real)


@triton.jit
def write_index_key(
    key_ptr, weight_ptr, bias_ptr, eps, cos_sin_ptr, position, slot, index_ptr, index_scales_ptr,
    ROPE: tl.constexpr, NEOX: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """The index key of one row normed, rotated by RoPE and, unless FUSED, Hadamard, quantised and written to its slot."""
    page, place = slot // PAGE, slot % PAGE
    out_ptr = index_ptr + page * INDEX_PAGE_BYTES + place * GROUP
    scale_ptr = index_scales_ptr + page * (INDEX_PAGE_BYTES // 4) + PAGE * GROUP // 4 + place
    fours = tl.load(key_ptr + tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]).to(tl.float32)
    even, odd = tl.split(tl.reshape(fours, (LANES, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    total = x0 + x1 + x2 + x3
    mean = (sum_of_far_lanes(total) if FUSED else sum_of_lanes(total)) * (1.0 / GROUP)
    squares = add_squares_of_four(tl.zeros((LANES,), tl.float32), fours - mean)
    rstd = tl.rsqrt(tl.fma(sum_of_far_lanes(squares) if FUSED else sum_of_lanes(squares), 1.0 / GROUP, eps))
    value = tl.arange(0, GROUP)[None, :]
    cos, sin, partner = rope_angles(cos_sin_ptr, position, value, ROPE, NEOX)
    x = normed_key(key_ptr, weight_ptr, bias_ptr, value, mean, rstd, FUSED)
    other = normed_key(key_ptr, weight_ptr, bias_ptr, partner, mean, rstd, FUSED)
    if FUSED:
        x = rounded(tl.where(value < ROPE, rotated_neighbours(x, other, cos, sin, value), x))
    else:
        x = hadamard(tl.where(value < ROPE, rotated(x, other, cos, sin), x), 1)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4), FP8_MAX)
    x = x * tl.div_rn(1.0, scale)[:, None]
    tl.store(out_ptr + value, tl.maximum(tl.minimum(x, FP8_MAX), -FP8_MAX).to(tl.float8e4nv))
    tl.store(scale_ptr + tl.arange(0, 1), scale)


@triton.jit(do_not_specialize=["row_stride", "group_stride"])
def quantise_kernel(
    x_ptr,  # bfloat16 [rows, WIDTH], contiguous
    out_ptr,  # FP8 [rows, WIDTH], contiguous
    scales_ptr,  # float32 [rows, WIDTH / GROUP], strides below
    row_stride,
    group_stride,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,  # that a program takes
    POWERS: tl.constexpr,
    BEFORE_OURS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program (row, block) quantises a block of a row's groups."""
    let_next_begin(BEFORE_OURS, COMPILED)
    wait_for_kernel_ahead(COMPILED)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    dim, real = group * GROUP + tl.arange(0, GROUP)[None, :], group < WIDTH // GROUP
    x = tl.load(x_ptr + row * WIDTH + dim, mask=real, other=0.0).to(tl.float32)
    values, scale = quantised(x, POWERS, COMPILED)
    tl.store(out_ptr + row * WIDTH + dim, values, mask=real)
    tl.store(scales_ptr + row * row_stride + group * group_stride, scale, mask=real)


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr", "slots_stride", "q_scales_row_stride", "q_scales_group_stride"])
def norm_rope_store_kernel(
    qkv_ptr,  # bfloat16 [rows, Q_RANK + LATENT + ROPE], QKV_STRIDE apart
    key_ptr,  # bfloat16 [rows, GROUP], KEY_STRIDE apart: index keys before their norm
    q_weight_ptr,  # bfloat16 [Q_RANK]
    latent_weight_ptr,  # bfloat16 [LATENT]
    key_weight_ptr,  # float32 [GROUP]
    key_bias_ptr,  # float32 [GROUP]
    cos_sin_ptr,  # float32 [positions, ROPE], cosines first
    index_cos_sin_ptr,  # float32 [positions, ROPE]
    positions_ptr,  # int64 [rows]
    slots_ptr,  # int64 [rows], slots_stride apart
    slots_stride,
    q_ptr,  # FP8 or bfloat16 [rows, Q_RANK], contiguous
    q_scales_ptr,  # float32 [rows, groups], strides below; written where Q_FP8
    q_scales_row_stride,
    q_scales_group_stride,
    latent_ptr,  # FP8 or bfloat16 [slots, LATENT], LATENT_STRIDE apart
    latent_scales_ptr,  # float32 [slots, LATENT / GROUP], SCALES_STRIDE apart; written where KV_FP8
    k_rope_ptr,  # bfloat16 [slots, ROPE], K_ROPE_STRIDE apart
    index_ptr,  # FP8 [pages, INDEX_PAGE_BYTES]: keys of a page, then their scales
    index_scales_ptr,  # the same as float32
    q_eps,
    latent_eps,
    key_eps,
    Q_RANK: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    QKV_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    K_ROPE_STRIDE: tl.constexpr,
    Q_GROUPS: tl.constexpr,  # power of two, at least Q_RANK / GROUP
    Q_FP8: tl.constexpr,
    Q_POWERS: tl.constexpr,  # whether scales of the query's latent are powers of two
    KV_FP8: tl.constexpr,
    NEOX: tl.constexpr,
    INDEX_NEOX: tl.constexpr,
    INDEX_FUSED: tl.constexpr,
    INDEXED: tl.constexpr,  # whether there is an index key
    COMPILED: tl.constexpr,
    RANKS: tl.constexpr,  # that divide slots among them, as `local_slots` says; index keys are every rank's
    RANK: tl.constexpr,
    BEFORE_OURS: tl.constexpr,
):
    """Program (row, 0) norms the query's latent, (row, 1) writes the row's KV, (row, 2) its index key."""
    let_next_begin(BEFORE_OURS, COMPILED)
    wait_for_kernel_ahead(COMPILED)
    row, role = tl.program_id(0).to(tl.int64), tl.program_id(1)
    qkv = qkv_ptr + row * QKV_STRIDE
    if role == 0:
        norm_query(
            qkv, q_weight_ptr, q_eps, q_ptr + row * Q_RANK, q_scales_ptr + row * q_scales_row_stride, q_scales_group_stride,
            Q_RANK, Q_GROUPS, Q_FP8, Q_POWERS, COMPILED,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + row * slots_stride)
        position = tl.load(positions_ptr + row)
        if role == 1:
            # Slot 0 is padding's: SGLang's write of KV skips it, its write of index keys does not.
            real = slot != 0
            if RANKS > 1:
                real = real & (slot % RANKS == RANK)
                slot = slot // RANKS
            latent, scales = latent_ptr + slot * LATENT_STRIDE, latent_scales_ptr + slot * SCALES_STRIDE
            k_rope = k_rope_ptr + slot * K_ROPE_STRIDE
            write_kv(
                qkv + Q_RANK, latent_weight_ptr, latent_eps, cos_sin_ptr, position, latent, scales, k_rope, real,
                LATENT, ROPE, KV_FP8, NEOX,
            )  # fmt: skip
        elif INDEXED:
            write_index_key(
                key_ptr + row * KEY_STRIDE, key_weight_ptr, key_bias_ptr, key_eps, index_cos_sin_ptr, position, slot, index_ptr,
                index_scales_ptr, ROPE, INDEX_NEOX, INDEX_FUSED,
            )  # fmt: skip


@triton.jit
def quantise_index_query(
    query_ptr, gate_ptr, cos_sin_ptr, position, out_ptr, weight_ptr,
    HEADS: tl.constexpr, ROPE: tl.constexpr, NEOX: tl.constexpr, FUSED: tl.constexpr, GATE_SCALE: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
):  # fmt: skip
    """Some heads of an index query rotated by RoPE and, unless FUSED, Hadamard, and quantised; their gates times scale."""
    head, value = tl.arange(0, HEADS), tl.arange(0, GROUP)[None, :]
    cos, sin, partner = rope_angles(cos_sin_ptr, position, value, ROPE, NEOX)
    x = tl.load(query_ptr + head[:, None] * GROUP + value).to(tl.float32)
    other = tl.load(query_ptr + head[:, None] * GROUP + partner).to(tl.float32)
    gate = tl.load(gate_ptr + head).to(tl.float32)
    if FUSED:
        x = tl.where(value < ROPE, rotated_neighbours(x, other, cos, sin, value), x)
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4), FP8_MAX)
        x = x * tl.div_rn(1.0, scale)[:, None]
        gate = gate * (GATE_SCALE * SOFTMAX_SCALE) * scale
    else:
        x = hadamard(tl.where(value < ROPE, rotated(x, other, cos, sin), x), HEADS)
        largest = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4)
        # SGLang rounds a logarithm up. No bfloat16 over 448 is so close above a power of two that its logarithm would be less.
        scale, inverse = next_power_of_two(largest * (1.0 / FP8_MAX))
        x = x * inverse[:, None]
        gate = gate * GATE_SCALE * scale * SOFTMAX_SCALE
    x = tl.minimum(tl.maximum(x, -FP8_MAX), FP8_MAX)
    tl.store(out_ptr + head[:, None] * GROUP + value, x.to(tl.float8e4nv))
    tl.store(weight_ptr + head, gate)


@triton.jit
def rotate_query(
    q_rope_ptr, head_stride, cos_sin_ptr, position, out_ptr, heads,
    HEADS: tl.constexpr, ROPE: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """RoPE of some heads of MLA's query."""
    head, rope = tl.arange(0, HEADS)[:, None], tl.arange(0, ROPE)[None, :]
    real = head < heads
    cos, sin, partner = rope_angles(cos_sin_ptr, position, rope, ROPE, NEOX)
    x = tl.load(q_rope_ptr + head * head_stride + rope, mask=real, other=0.0).to(tl.float32)
    other = tl.load(q_rope_ptr + head * head_stride + partner, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + head * ROPE + rope, rotated(x, other, cos, sin).to(tl.bfloat16), mask=real)


@triton.jit(do_not_specialize=["positions_ptr"])
def rope_quantise_kernel(
    query_ptr,  # bfloat16 [rows, INDEX_HEADS, GROUP], QUERY_STRIDE between rows, heads dense: index queries
    gates_ptr,  # float32, or bfloat16 where INDEX_FUSED, [rows, INDEX_HEADS], GATES_STRIDE apart: what weights_proj gives
    q_rope_ptr,  # bfloat16 [rows, heads, ROPE], strides below: the part of MLA's query that is rotated
    cos_sin_ptr,  # float32 [positions, ROPE]
    index_cos_sin_ptr,  # float32 [positions, ROPE]
    positions_ptr,  # int64 [rows]
    quantised_ptr,  # FP8 [rows, INDEX_HEADS, GROUP], contiguous
    weights_ptr,  # float32 [rows, INDEX_HEADS], contiguous: gate * heads**-0.5 * scale * GROUP**-0.5
    q_rope_out_ptr,  # bfloat16 [rows, heads, ROPE], contiguous
    heads,
    INDEX_HEADS: tl.constexpr,
    ROPE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    GATES_STRIDE: tl.constexpr,
    Q_ROPE_ROW_STRIDE: tl.constexpr,
    Q_ROPE_HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,  # that a program takes of either query
    GATE_SCALE: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    NEOX: tl.constexpr,
    INDEX_NEOX: tl.constexpr,
    INDEX_FUSED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program (row, block) takes a block of index heads, and those behind the last one a block of MLA's heads."""
    wait_for_kernel_ahead(COMPILED)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + row)
    index_blocks: tl.constexpr = INDEX_HEADS // HEADS
    if block < index_blocks:
        first = block * HEADS
        place = row * INDEX_HEADS + first
        quantise_index_query(
            query_ptr + row * QUERY_STRIDE + first * GROUP, gates_ptr + row * GATES_STRIDE + first, index_cos_sin_ptr, position,
            quantised_ptr + place * GROUP, weights_ptr + place, HEADS, ROPE, INDEX_NEOX, INDEX_FUSED, GATE_SCALE, SOFTMAX_SCALE,
        )  # fmt: skip
    else:
        first = (block - index_blocks) * HEADS
        rotate_query(
            q_rope_ptr + row * Q_ROPE_ROW_STRIDE + first * Q_ROPE_HEAD_STRIDE, Q_ROPE_HEAD_STRIDE, cos_sin_ptr, position,
            q_rope_out_ptr + (row * heads + first) * ROPE, heads - first, HEADS, ROPE, NEOX,
        )  # fmt: skip


@triton.jit(do_not_specialize=["positions_ptr"])
def rope_query_kernel(
    q_rope_ptr,  # bfloat16 [rows, heads, ROPE], strides below
    cos_sin_ptr,  # float32 [positions, ROPE]
    positions_ptr,  # int64 [rows]
    out_ptr,  # bfloat16 [rows, heads, ROPE], contiguous
    heads,
    ROPE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,  # that a program takes
    NEOX: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program (row, block) rotates a block of MLA's heads."""
    wait_for_kernel_ahead(COMPILED)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    rotate_query(
        q_rope_ptr + row * ROW_STRIDE + first * HEAD_STRIDE, HEAD_STRIDE, cos_sin_ptr, tl.load(positions_ptr + row),
        out_ptr + (row * heads + first) * ROPE, heads - first, HEADS, ROPE, NEOX,
    )  # fmt: skip
