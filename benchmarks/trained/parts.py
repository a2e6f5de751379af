"""What every layer is made of: a linear map, RMSNorm, two ways of pairing features for RoPE."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_backend.benchmarks.faithful_models import ROPE_THETA
from nsa_backend.benchmarks.trained.shape import EPS


class Linear(nn.Module):
    """x W^T with a float32 W, in the dtype of x."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """In float32, rounded once at the end."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * self.weight).to(x.dtype)


def rope_table(length: int, size: int, device: torch.device | str) -> Tensor:
    """float32 [2, length, size / 2]: cosines and sines of every position."""
    frequencies = ROPE_THETA ** (-torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def rotate_pairs(x: Tensor, rope: Tensor) -> Tensor:
    """RoPE on features (0, 1), (2, 3), ...: the attention's, since config.json says nothing of `rope_interleave`."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rope.unbind(0)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2).to(x.dtype)


def rotate_halves(x: Tensor, rope: Tensor) -> Tensor:
    """RoPE on features (0, n / 2), (1, n / 2 + 1), ...: the indexer's, where `indexer_rope_interleave` is not set."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rope.unbind(0)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
