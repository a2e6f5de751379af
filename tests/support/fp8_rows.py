"""Rows of FP8 values with scales, as two ways of one computation give them."""

from __future__ import annotations

import torch

NAN = 0x7F
"""In FP8."""


def near(
    values: torch.Tensor, scales: torch.Tensor, wanted: torch.Tensor, wanted_scales: torch.Tensor, *, of_sums: bool = False
) -> bool:
    """Values within a step of FP8 in few places, as exp and a division may round otherwise; scales to their last bits.

    Those `of_sums` of FP8 products on a GPU in some more places: its tensor cores keep some 14 bits of them, so bfloat16 rounds
    otherwise.
    """
    last_bits, few = (2**-6, 0.03) if of_sums and values.is_cuda else (2**-7, 0.01)
    torch.testing.assert_close(scales, wanted_scales, rtol=last_bits, atol=0)
    found, meant = values.float() * scales.repeat_interleave(128, 1), wanted.float() * wanted_scales.repeat_interleave(128, 1)
    torch.testing.assert_close(found, meant, rtol=2**-3, atol=float(wanted_scales.max()) if len(wanted) else 0)
    return bool(((found - meant).abs() > 2**-6 * meant.abs()).float().mean() <= few) if len(wanted) else True
