"""A layer's input in FP8, as the norm before it has quantised it, until the layer's front asks for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nsa_backend.kernels.layer_front import quantise
from nsa_backend.kernels.layer_front_weights import Scales


@dataclass
class KeptInput:
    """Of the last norm."""

    x: torch.Tensor | None = None  # the norm
    scales: Scales | None = None
    quantised: tuple[torch.Tensor, torch.Tensor] | None = None

    def keep(self, x: torch.Tensor, scales: Scales, quantised: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Until it is taken or forgotten."""
        self.x, self.scales, self.quantised = x, scales, quantised

    def forget(self) -> None:
        """Before the next norm, which may write where the last one is."""
        self.x = self.scales = self.quantised = None

    def take(self, x: torch.Tensor, scales: Scales) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What is kept of this very tensor in that form, once."""
        found = self.quantised if self.x is x and self.scales is scales else None
        self.forget()
        return found


KEPT = KeptInput()


def quantised_input(hidden: torch.Tensor, scales: Scales, *, before_ours: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantise`, where the norm has not done it."""
    return KEPT.take(hidden, scales) or quantise(hidden, scales, before_ours=before_ours)
