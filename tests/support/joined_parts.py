"""Parts of attention on ranks that divide the KV of a request, joined as SGLang joins them, in float64."""

from __future__ import annotations

import torch


def joined(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Outputs of ranks, [rows, heads, latent], weighed by their log-sum-exps in base 2, [rows, heads]."""
    outs, lses = (torch.stack(side).double() for side in zip(*parts, strict=True))
    weights = torch.exp2(lses - lses.max(0).values.nan_to_num(neginf=0))
    whole = (outs * weights[..., None]).sum(0) / weights.sum(0).clamp(min=1e-300)[..., None]
    return whole.to(parts[0][0].dtype)
