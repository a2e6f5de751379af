"""The torch twin of both products of experts."""

from __future__ import annotations

import torch

from nsa_backend.kernels.down_rows_torch import down_rows_torch
from nsa_backend.kernels.expert_order import Order
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.gate_up_rows_torch import gate_up_rows_torch
from nsa_backend.kernels.layer_front_weights import GROUP


def whole_experts_torch(order: Order, rows: int, weights: ExpertWeights, shares: torch.Tensor) -> torch.Tensor:
    """What `whole_experts` writes: bfloat16 [tokens, choices, hidden], NaN where no row is of a choice."""
    blocks = order.sorted_ids, order.expert_ids, order.padded
    first, second = (weights.first, weights.first_scales), (weights.second, weights.second_scales)
    there, values, scales = gate_up_rows_torch(order.values, order.scales, *first, shares.shape[1], *blocks, rows)
    inner = values.new_empty(int(order.padded), weights.width)
    inner_scales = scales.new_empty(int(order.padded), weights.width // GROUP)
    inner.view(torch.uint8)[there], inner_scales[there] = values.view(torch.uint8), scales
    return down_rows_torch(inner, inner_scales, *second, shares, *blocks, rows)
