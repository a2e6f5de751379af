"""Projections of one to four rows without tensor cores, of layers that have our front and where the user asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nsa_backend.adapters.dsa.layer_front.options import ROW_PRODUCTS
from nsa_backend.environment import switched_on
from nsa_backend.kernels.row_products import MOST_ROWS, problem, row_products

if TYPE_CHECKING:
    from sglang.srt.layers.linear import LinearBase


def most_rows(*weights: torch.Tensor) -> int:
    """Rows up to which products with these weights, all of one input, are to be such ones; 0 for none."""
    fit = all(problem(weight.shape[1], len(weight)) is None for weight in weights)
    return MOST_ROWS if switched_on(ROW_PRODUCTS) and fit else 0


class ByRow:
    """In place of what multiplies a layer's block-FP8 weights: few rows that are quantised already, without tensor cores."""

    def __init__(self, own: Callable[..., torch.Tensor]):
        self.own = own
        self.func = getattr(own, "func", own)  # by which SGLang knows DeepGEMM's, also where it is a partial one

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        block_size: list[int],
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """bfloat16 [rows, columns]."""
        if input_scale is None or bias is not None or more or not 0 < len(input) <= MOST_ROWS:
            return self.own(input, weight, block_size, weight_scale, input_scale=input_scale, bias=bias, **more)
        return row_products((input, input_scale), (weight, weight_scale))[0]


def multiply_by_row(linear: LinearBase) -> bool:
    """Have few rows of a layer with block-FP8 weights multiplied so, where that is asked for and its weights fit.

    Returns:
        Whether they are.
    """
    if not most_rows(linear.weight):
        return False
    if not isinstance(linear.quant_method.w8a8_block_fp8_linear, ByRow):
        linear.quant_method.w8a8_block_fp8_linear = ByRow(linear.quant_method.w8a8_block_fp8_linear)
    return True
