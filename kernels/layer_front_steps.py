"""What the kernels in front of a layer compute with: sums, RoPE and the Hadamard rotation, each to the bit of SGLang's own.

Each value is rounded where SGLang's own sequence of kernels rounds it, sums are taken in its order, and a product is fused with
a sum where its compiled code does so: every such product is written as `tl.fma`, and none is left for a compiler to fuse. Sums
go as in FlashInfer's norms for Hopper (0.6.15 and 0.7.2): 32 lanes take their own values from left to right, then neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(128)
"""Values that share a scale, in weights, KV cache and index keys alike."""
LANES: tl.constexpr = tl.constexpr(32)
FP8_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def rounded(x):
    """Through bfloat16 and back, as where one of SGLang's kernels hands over to the next."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def sum_of_lanes(x):
    """Scalar sum of float32 [32]: neighbours first, pair by pair."""
    for step in tl.static_range(5):
        x = tl.sum(tl.reshape(x, (16 >> step, 2)), axis=1)
    return tl.sum(x, axis=0)


@triton.jit
def sum_of_far_lanes(x):
    """Scalar sum of float32 [32]: those 16 apart first, then 8, as SGLang's fused kernels add."""
    for step in tl.static_range(5):
        x = tl.sum(tl.reshape(x, (2, 16 >> step)), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def add_squares_of_four(total, x):
    """float32 [32]: `total` and the squares of x, [32, 4], added from left to right, each with one rounding."""
    even, odd = tl.split(tl.reshape(x, (LANES, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    total = tl.fma(x1, x1, tl.fma(x0, x0, total))
    return tl.fma(x3, x3, tl.fma(x2, x2, total))


@triton.jit
def reciprocal_rms(x_ptr, eps, WIDTH: tl.constexpr):
    """1 / sqrt(mean square + eps) of a row, bfloat16 [WIDTH]; a lane has eight values in a row of every 256."""
    lane, four = tl.arange(0, LANES)[:, None] * 8, tl.arange(0, 4)[None, :]
    total = tl.zeros((LANES,), tl.float32)
    for start in tl.static_range(0, WIDTH, 8 * LANES):
        total = add_squares_of_four(total, tl.load(x_ptr + start + lane + four).to(tl.float32))
        total = add_squares_of_four(total, tl.load(x_ptr + start + lane + 4 + four).to(tl.float32))
    return tl.rsqrt(tl.div_rn(sum_of_lanes(total), WIDTH * 1.0) + eps)


@triton.jit
def rope_angles(cos_sin_ptr, position, dim, ROPE: tl.constexpr, NEOX: tl.constexpr):
    """cos, sin with the sign of its term, and the partner's dim, of every `dim` below ROPE; others get any angle and itself."""
    inside = dim < ROPE
    first = (dim < ROPE // 2) if NEOX else (dim % 2 == 0)
    angle = (dim % (ROPE // 2)) if NEOX else (dim // 2)
    partner = (dim ^ (ROPE // 2)) if NEOX else (dim ^ 1)
    row = cos_sin_ptr + position * ROPE
    cos = tl.load(row + angle, mask=inside, other=1.0)
    sin = tl.load(row + ROPE // 2 + angle, mask=inside, other=0.0)
    return cos, tl.where(first, -sin, sin), tl.where(inside, partner, dim)


@triton.jit
def rotated(x, other, cos, sin):
    """RoPE of `x`, whose partners are `other`, rounded."""
    return rounded(tl.fma(cos, x, sin * other))


@triton.jit
def rotated_neighbours(x, other, cos, sin, dim):
    """RoPE of `x` at `dim`, whose partners are `other`, in float32: the sine's product is the fused one of a second value."""
    first = dim % 2 == 0
    return tl.fma(tl.where(first, cos, sin), tl.where(first, x, other), tl.where(first, sin * other, cos * x))


@triton.jit
def butterfly(x, ROWS: tl.constexpr, NEAR: tl.constexpr):
    """float32 [ROWS, 128]: the sum and the difference of values that are NEAR apart, in their places."""
    pairs = tl.permute(tl.reshape(x, (ROWS, GROUP // (2 * NEAR), 2, NEAR)), (0, 1, 3, 2))
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), (ROWS, GROUP))


@triton.jit
def hadamard(x, ROWS: tl.constexpr):
    """float32 [ROWS, 128] times the Hadamard matrix over sqrt(128), rounded; neighbours first."""
    for stage in tl.static_range(7):
        x = butterfly(x, ROWS, 1 << stage)
    return rounded(x * 0.08838834764831845)


@triton.jit
def normed_key(key_ptr, weight_ptr, bias_ptr, dim, mean, rstd, FUSED: tl.constexpr):
    """LayerNorm of the values `dim` of an index key, rounded unless RoPE of the same kernel is next."""
    centred = tl.load(key_ptr + dim).to(tl.float32) - mean
    x = tl.fma(centred * rstd, tl.load(weight_ptr + dim), tl.load(bias_ptr + dim))
    return x if FUSED else rounded(x)


@triton.jit
def quantised(x, POWERS: tl.constexpr, COMPILED: tl.constexpr):
    """(FP8, scales [groups, 1]) of float32 `x`, [groups, GROUP], for a block-FP8 product: powers of two where POWERS."""
    scale, inverse = scale_of_groups(x, POWERS, COMPILED)
    return (x * inverse).to(tl.float8e4nv), scale


@triton.jit
def scale_of_groups(x, POWERS: tl.constexpr, COMPILED: tl.constexpr):
    """(scale, what takes its place in the division), each float32 [groups, 1], as `quantised` has them."""
    largest = tl.maximum(tl.max(tl.abs(x), axis=1, keep_dims=True), 1e-10)
    scale = largest * (1.0 / FP8_MAX)
    if POWERS:
        scale, inverse = next_power_of_two(scale)
    elif COMPILED:  # SGLang compiles this quantisation with fast division
        inverse = tl.inline_asm_elementwise(
            "div.approx.ftz.f32 $0, 0f43E00000, $1;", "=f,f", [largest], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = tl.div_rn(FP8_MAX, largest)
    return scale, inverse


@triton.jit
def next_power_of_two(scale):
    """(it, 1 over it) of float32 `scale`, which is itself if it is one."""
    bits = scale.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)  # with its bias of 127
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)
