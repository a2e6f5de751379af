"""Tensors that reach past 2**31 elements, of whose memory only what is touched exists."""

from __future__ import annotations

import math
import mmap

import torch

NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python's mmap has no name for here: without it a machine may refuse more than it has."""


def far_tensor(device: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """[*shape] of `dtype`; on the CPU zeros, on a GPU anything."""
    if device != "cpu":
        return torch.empty(*shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)
