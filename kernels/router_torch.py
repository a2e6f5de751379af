"""The torch twin of the router in one launch: logits in double precision, and sorts that keep the order of what is equal."""

from __future__ import annotations

import torch

from nsa_backend.kernels.router import Choice, Routed


def route_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, choice: Choice) -> Routed:
    """What `route` computes, by another order of sums and with an exact sigmoid."""
    logits = (x.double() @ weight.double().T).float()
    return Routed(*choose_torch(logits, bias, choice), logits)


def choose_torch(logits: torch.Tensor, bias: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """(shares, experts) by float32 logits [rows, experts]."""
    rows, experts = logits.shape
    scores = logits.sigmoid()
    biased = scores + bias
    if choice.groups > 1:
        of_groups = biased.view(rows, choice.groups, -1)
        kept = best(of_groups.topk(2).values.sum(2), choice.kept)
        dropped = torch.ones(rows, choice.groups, dtype=torch.bool, device=logits.device).scatter_(1, kept, False)
        biased = of_groups.masked_fill(dropped[:, :, None], float("-inf")).view(rows, experts)
    chosen = best(biased, choice.routed)
    shares = scores.gather(1, chosen)
    shares = shares / (shares.sum(1, keepdim=True) + 1e-20) * choice.factor
    always = torch.full((rows, choice.shared), experts, device=logits.device)
    shares = torch.cat([shares, torch.full_like(always, choice.shared_share, dtype=torch.float32)], 1)
    return shares, torch.cat([chosen, always], 1).int()


def best(values: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [rows, count]: where the largest values are, the largest first, of equal ones the first."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]
