"""Weights of a kernel that comes later, asked for into the L2 cache by a launch during which memory has little to do.

A library's product begins once all ahead of it has ended, and then waits for its first weights. Launches between two products
read little, for as long as L2 would take to fill.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.checks import require

MOST_AHEAD = 20 << 20
"""Bytes that a launch asks for unless told: about as many as memory brings while it runs."""
STEP: tl.constexpr = tl.constexpr(128 * 1024)
"""Bytes that a program asks for at once."""
UNIT: tl.constexpr = tl.constexpr(16)
"""Bytes that a request is a multiple of."""


class Ahead(NamedTuple):
    """As launches take a weight that they ask for."""

    weight: torch.Tensor
    size: int  # bytes from its begin on; 0 asks for none of it


def ahead_of(weight: torch.Tensor | None, instead: torch.Tensor, most: int = MOST_AHEAD) -> Ahead:
    """Up to `most` bytes of a weight; none of `instead`, which has an address, where there is no weight.

    Raises:
        ValueError: its bytes do not lie one behind the other, from a multiple of 16 on.
    """
    if weight is None:
        return Ahead(instead, 0)
    count = weight.numel() * weight.element_size()
    fits = weight.is_contiguous() and not weight.data_ptr() % UNIT.value and not count % UNIT.value
    require(fits, "weight", weight, "contiguous, in multiples of 16 bytes", "others' memory would be asked for")
    return Ahead(weight, min(count, most // UNIT.value * UNIT.value))


@triton.jit
def share_of(size, program, programs):
    """(begin, end) of what one of so many programs asks for; nothing where begin is not below end."""
    each = tl.cdiv(tl.cdiv(size, programs), UNIT) * UNIT
    return tl.minimum(program * each, size), tl.minimum((program + 1) * each, size)


@triton.jit
def requests_of(start, end, LANES: tl.constexpr):
    """(begin, bytes) of each lane's request of a step that begins with `start`; no bytes behind `end`."""
    each: tl.constexpr = STEP // LANES
    at = start + tl.arange(0, LANES) * each
    return at, tl.minimum(tl.maximum(end - at, 0), each)


@triton.jit
def ask_for(weight_ptr, size, program, programs, LANES: tl.constexpr, COMPILED: tl.constexpr):
    """Ask for this program's share of the first `size` bytes of a weight; nothing waits for them. A thread has a lane."""
    begin, end = share_of(size, program, programs)
    if COMPILED:
        for start in range(begin, end, STEP):
            at, count = requests_of(start, end, LANES)
            tl.inline_asm_elementwise(
                "{ .reg .pred some; setp.gt.s32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
                "=r,l,r", [weight_ptr.to(tl.int64) + at, count], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
