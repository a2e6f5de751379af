"""The torch twin of what is before the first product of experts."""

from __future__ import annotations

import torch

from nsa_backend.kernels.expert_order import Order
from nsa_backend.kernels.layer_front_torch import quantise
from nsa_backend.kernels.layer_front_weights import Scales


def order_torch(
    x: torch.Tensor, chosen: torch.Tensor, block: int, experts: int, counters: int = 1, *, others: bool = True
) -> Order:
    """What `order` gives, without room behind the last block."""
    flat = chosen.flatten()
    counts = torch.stack([(flat == expert).sum() * (others or expert >= 0) for expert in range(-1, experts)])
    blocks = (counts + block - 1) // block
    rows = torch.full((int(blocks.sum()) * block,), len(flat), dtype=torch.int32, device=x.device)
    first = (blocks.cumsum(0) - blocks) * block
    for expert in range(-1 if others else 0, experts):
        mine = (flat == expert).nonzero().flatten().int()
        start = int(first[expert + 1])
        rows[start : start + len(mine)] = mine
    of_blocks = torch.arange(-1, experts, dtype=torch.int32, device=x.device).repeat_interleave(blocks)
    padded = torch.tensor([len(rows)], dtype=torch.int32, device=x.device)
    zeros = torch.zeros(1 + len(of_blocks) * counters, dtype=torch.int32, device=x.device)
    return Order(*quantise(x.float(), Scales.EXACT), rows, of_blocks, padded, zeros)
