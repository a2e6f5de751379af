"""The torch twin of what is between both products of experts."""

from __future__ import annotations

import torch

from nsa_backend.kernels.layer_front_torch import quantise
from nsa_backend.kernels.layer_front_weights import Scales


def activate_torch(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(FP8 [rows, width], float32 [rows, width / GROUP]) of bfloat16 [rows, 2 * width], gate before up."""
    gate, up = both.float().chunk(2, dim=1)
    return quantise((gate / (1.0 + torch.exp(-gate)) * up).bfloat16().float(), Scales.EXACT)
