"""Device function that finds where values lie among inclusive prefix sums that a program has in registers.

The sums go from thread to thread by shuffles, or through shared memory where a program has several warps. A search among sums
that were stored would wait for the L2 cache in most of its steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_END = tl.constexpr(2**31 - 1)
"""The sum of what does not exist, behind all others: no value reaches it."""


@triton.jit
def count_ends_up_to(
    ends,  # int32 [BLOCK], not decreasing; BLOCK is a power of two
    value,  # int32 [N], less than NO_END
    BLOCK: tl.constexpr,
):
    """For each value, how many ends are <= value, and the last of them (0 where there is none)."""
    count = tl.zeros_like(value)
    last = tl.zeros_like(value)
    width = BLOCK
    while width > 0:
        # Strides BLOCK / 2, ..., 2, 1 find all but the last end; one more step of 1 asks for that.
        stride = tl.maximum(width // 2, 1)
        end = tl.gather(ends, count + stride - 1, 0)
        passed = end <= value
        count += tl.where(passed, stride, 0)
        last = tl.where(passed, end, last)
        width = width // 2
    return count, last
