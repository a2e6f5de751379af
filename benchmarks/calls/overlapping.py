"""What rows of a request choose, where each shares some of it with the row before."""

from __future__ import annotations

import torch


def overlapping(requests: int, rows: int, topk: int, overlap: float, slots: int, generator: torch.Generator) -> torch.Tensor:
    """int32 [requests * rows, topk] of `slots`, each row of a request in an order of its own."""
    fresh = topk - round(overlap * topk)
    device = generator.device
    count = topk + (rows - 1) * fresh  # all different: an implementation counts a slot twice that a row names twice
    drawn = torch.stack([torch.randperm(slots, generator=generator, device=device)[:count] for _ in range(requests)]).int()
    found = torch.stack([drawn[:, j * fresh : j * fresh + topk] for j in range(rows)], dim=1).flatten(0, 1)
    order = torch.rand(found.shape, generator=generator, device=device).argsort(dim=1)
    return found.gather(1, order)
