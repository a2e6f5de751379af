"""The torch twin of the first product of experts of many tokens, with their activation."""

from __future__ import annotations

import torch

from nsa_backend.kernels.expert_activation_torch import activate_torch
from nsa_backend.kernels.layer_front_weights import GROUP


def gate_up_rows_torch(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    first: torch.Tensor,
    first_scales: torch.Tensor,
    of_token: int,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded: torch.Tensor,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that `gate_up_rows` writes, int64 [count], and what it writes there: FP8 [count, width] and its scales."""
    there, both = [], []
    for row in range(int(padded)):
        choice, expert = int(sorted_ids[row]), int(expert_ids[row // block])
        if choice >= len(x) * of_token or expert < 0:
            continue
        token = choice // of_token
        sums = torch.zeros(first.shape[1], device=x.device)
        for group in range(x_scales.shape[1]):
            at = slice(group * GROUP, (group + 1) * GROUP)
            product = first[expert, :, at].float() @ x[token, at].float()
            sums += product * (x_scales[token, group] * first_scales[expert, :, group]).repeat_interleave(GROUP)
        there.append(row)
        both.append(sums.bfloat16())
    rows = torch.tensor(there, dtype=torch.int64, device=x.device)
    return rows, *activate_torch(torch.stack(both) if both else x.new_empty(0, first.shape[1], dtype=torch.bfloat16))
