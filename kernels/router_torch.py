"""The torch twin of the router: logits in double precision, and choices by sorting."""

from __future__ import annotations

import torch

from nsa_backend.kernels.router import Choice, Routed


def route_torch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    choice: Choice,
    *,
    factor: float = 1.0,
    of_shared: float = 1.0,
) -> Routed:
    """What `route` computes."""
    logits = (hidden.double() @ weight.double().T).float()
    shares, chosen = choose_torch(logits, bias, choice, factor=factor, of_shared=of_shared)
    return Routed(logits, shares, chosen)


def choose_torch(
    logits: torch.Tensor, bias: torch.Tensor, choice: Choice, *, factor: float = 1.0, of_shared: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(shares, chosen) of logits, float32 [rows, experts]."""
    rows, experts = logits.shape
    scores = logits.double().sigmoid()
    keys = scores.float() + bias
    keys = keys.where(~keys.isnan(), -1e30)
    by_group = keys.view(rows, choice.groups, -1)
    of_groups = by_group.topk(2, dim=2).values.sum(dim=2)
    kept = of_groups.sort(dim=1, descending=True, stable=True).indices[:, : choice.kept]
    left = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, kept, value=True)
    keys = by_group.where(left[:, :, None], -torch.inf).view(rows, experts)
    chosen = keys.sort(dim=1, descending=True, stable=True).indices[:, : choice.chosen]
    shares = scores.gather(1, chosen)
    shares = (shares / shares.sum(dim=1, keepdim=True) * factor).float()
    if choice.shared:
        shares = torch.cat([shares, shares.new_full((rows, 1), of_shared)], dim=1)
        chosen = torch.cat([chosen, chosen.new_full((rows, 1), experts)], dim=1)
    return shares, chosen.int()
