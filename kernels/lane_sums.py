"""Sums of products that a thread adds up before it keeps them: a register for each value would leave room for few programs."""

from __future__ import annotations

import triton
import triton.language as tl

LANE = tl.constexpr(16)
"""FP8 values that a thread loads at once."""
LANE_OF_BFLOAT16 = tl.constexpr(8)


@triton.jit
def sum_of_lanes(products, LANE: tl.constexpr):
    """float32 [..., step] of two or three dimensions, added up over every LANE values of the last one."""
    shape: tl.constexpr = products.shape
    if len(shape) == 3:
        return tl.sum(tl.reshape(products, (shape[0], shape[1], shape[2] // LANE, LANE)), axis=3)
    else:
        return tl.sum(tl.reshape(products, (shape[0], shape[1] // LANE, LANE)), axis=2)
