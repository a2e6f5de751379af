"""The torch twin of the second product of experts of many tokens."""

from __future__ import annotations

import torch

from nsa_backend.kernels.layer_front_weights import GROUP


def down_rows_torch(
    values: torch.Tensor,
    scales: torch.Tensor,
    second: torch.Tensor,
    second_scales: torch.Tensor,
    shares: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """What `down_rows` writes: bfloat16 [tokens, choices, hidden], NaN where no row is of a choice."""
    found = second.new_full((shares.numel(), second.shape[1]), float("nan"), dtype=torch.bfloat16)
    for row in range(int(padded)):
        choice, expert = int(sorted_ids[row]), int(expert_ids[row // block])
        if choice >= shares.numel():
            continue
        sums = torch.zeros(second.shape[1], device=values.device)
        for group in range(scales.shape[1] if expert >= 0 else 0):
            at = slice(group * GROUP, (group + 1) * GROUP)
            product = second[expert, :, at].float() @ values[row, at].float()
            sums += product * (scales[row, group] * second_scales[expert, :, group]).repeat_interleave(GROUP)
        found[choice] = (sums * shares.view(-1)[choice]).bfloat16()
    return found.view(*shares.shape, -1)
