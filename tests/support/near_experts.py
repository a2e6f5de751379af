"""What experts give where sums round otherwise than in what they are compared with."""

from __future__ import annotations

import torch

SPANS = ((2**-4, 0.0), (2**-6, 1e-4), (2**-9, 0.03))
"""Of the largest value, and which part of all may be further off."""


def expect_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Nearly equal: where a sum rounds otherwise an activation may fall to the next value in FP8, which few outputs tell."""
    found, wanted = found.float(), wanted.float()
    assert not wanted.isnan().any()
    apart, largest = (found - wanted).abs(), float(wanted.abs().max())
    for span, most in SPANS:
        beyond = apart > 4 * span * wanted.abs() + span * largest
        assert float(beyond.float().mean()) <= most, (span, float(apart.max()), largest)
