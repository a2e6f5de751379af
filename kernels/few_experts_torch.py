"""The torch twin of the experts of few tokens: one choice after the other, summed in double precision."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.layer_front_torch import quantise
from nsa_backend.kernels.layer_front_weights import GROUP, Scales

Quantise = Callable[[torch.Tensor, Scales], tuple[torch.Tensor, torch.Tensor]]


def in_torch(x: torch.Tensor, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise(x.float(), scales)


def few_experts_torch(
    x: torch.Tensor,
    experts: ExpertWeights,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    *,
    factor: float = 1.0,
    shared: ExpertWeights | None = None,
    quantise: Quantise = in_torch,
) -> torch.Tensor:
    """What `few_experts` computes, by another order of sums; `quantise` gives (FP8, scales of this form) of bfloat16 rows."""
    out = torch.zeros(x.shape, device=x.device)
    inputs = whole(*quantise(x, Scales.EXACT))
    for token, choices in enumerate(chosen.tolist()):
        for choice, expert in enumerate(choices):
            if expert < 0:
                continue
            one = ExpertWeights(*(tensor[expert] for tensor in experts[:4]))
            out[token] += (given(inputs[token], one, quantise) * shares[token, choice]).bfloat16()
    summed = (out * factor).bfloat16()
    if shared is None:
        return summed
    added = [given(of_token, shared, quantise).bfloat16() for of_token in whole(*quantise(x, shared.scales))]
    return summed + torch.stack(added) if added else summed


def given(x: torch.Tensor, expert: ExpertWeights, quantise: Quantise) -> torch.Tensor:
    """float32 [hidden]: what an expert gives for float64 `x`."""
    gate, up = (blocks(expert.first, expert.first_scales) @ x).bfloat16().float().chunk(2)
    inner = (gate / (1.0 + torch.exp(-gate)) * up).bfloat16()
    return (blocks(expert.second, expert.second_scales) @ whole(*quantise(inner[None], expert.scales))[0]).float()


def whole(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 of FP8 rows with a scale a group."""
    return values.double() * scales.double().repeat_interleave(GROUP, 1)


def blocks(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 of an FP8 weight with a scale a block of GROUP by GROUP."""
    return weight.double() * scales.double().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
