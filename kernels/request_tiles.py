"""A device function that finds the requests of ragged elements: rows among new tokens, or slots among all tokens."""

from __future__ import annotations

import triton
import triton.language as tl


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
