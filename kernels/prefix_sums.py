"""Prefix sums: an exclusive one in torch, and device functions that find where values lie among inclusive ones in registers.

The sums go from thread to thread by shuffles, or through shared memory where a program has several warps. A search among sums
that were stored would wait for the L2 cache in most of its steps.
"""

from __future__ import annotations

import torch
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


@triton.jit
def requests_passed(
    lens_ptr,  # int32 | int64 [num_requests], elements of each request
    element,  # int32 [BLOCK]
    start,  # first request of the tile
    carry,  # elements of all requests before it
    num_requests,
    REQUEST_BLOCK: tl.constexpr,
):
    """A tile of requests: their numbers, which are real, their lengths, and for each element those that end up to it."""
    r = start + tl.arange(0, REQUEST_BLOCK)
    real = r < num_requests
    length = tl.load(lens_ptr + r, mask=real, other=0).to(tl.int32)
    passed = real[None, :] & ((carry + tl.cumsum(length, 0))[None, :] <= element[:, None])
    return r, real, length, passed


def exclusive_sum(values: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1] of integers [n]: what lies before each of them, and the sum of all."""
    return torch.nn.functional.pad(values.cumsum(0, dtype=torch.int32), (1, 0))
