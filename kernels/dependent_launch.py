"""Launches that begin before the kernel ahead of them on the stream has ended: CUDA's programmatic dependent launch.

A kernel that is launched so waits, before it reads or writes what others do, until the one ahead has ended and its writes are
seen; until then its programs take their places. A kernel lets the next one begin early where that one is ours and waits too:
SGLang's own may read, before they wait, what the kernel ahead of ours still writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def early(on_gpu: bool) -> dict[str, bool]:
    """Options of a launch that may begin early; the interpreter takes none."""
    return {"launch_pdl": True} if on_gpu else {}


@triton.jit
def let_next_begin(ALLOWED: tl.constexpr, COMPILED: tl.constexpr):
    """Let the next kernel on the stream begin once all programs of this one are here; only where it waits."""
    if COMPILED and ALLOWED:
        gdc_launch_dependents()


@triton.jit
def wait_for_kernel_ahead(COMPILED: tl.constexpr):
    """Wait until the kernel ahead on the stream has ended."""
    if COMPILED:
        gdc_wait()
