"""How kernels round and quantise, to the bit of SGLang's own."""

from __future__ import annotations

import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(128)
"""Values that share a scale, in weights, KV cache and index keys alike."""
FP8_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def rounded(x):
    """Through bfloat16 and back, as where one of SGLang's kernels hands over to the next."""
    return x.to(tl.bfloat16).to(tl.float32)


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
