"""Rows and weights in block FP8, and gates beside them, as the launches that multiply them take both."""

from __future__ import annotations

import torch

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import require
from nsa_backend.kernels.layer_front_weights import GROUP

Product = tuple[torch.Tensor, torch.Tensor]
"""float8_e4m3fn [columns, inner], and float32 scales [ceil(columns / GROUP), inner / GROUP] of its blocks."""

MISREAD = "the kernel would misread it"


def check(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    products: dict[str, Product],
    gates: tuple[torch.Tensor, torch.Tensor] | None,
    most_rows: int,
    multiple: int,
) -> None:
    """Refuse what a kernel would misread: of up to `most_rows` rows, and of weights whose columns are such a multiple.

    Raises:
        ValueError: says which tensor has another shape, dtype or layout.
    """
    rows, inner = x.shape
    for name, (weight, scales) in products.items():
        columns = weight.shape[0]
        fits = weight.dtype == torch.float8_e4m3fn and weight.is_contiguous() and weight.shape == (columns, inner)
        form = f"contiguous torch.float8_e4m3fn [a multiple of {multiple}, {inner}]"
        require(fits and not columns % multiple, name, weight, form, MISREAD)
        of_weight = blocks(columns, GROUP), inner // GROUP
        fits = scales.dtype == torch.float32 and scales.shape == of_weight and scales.is_contiguous()
        require(fits, f"scales of {name}", scales, f"contiguous torch.float32 {list(of_weight)}", MISREAD)
    fits = x.dtype == torch.float8_e4m3fn and x.is_contiguous() and 0 < rows <= most_rows
    require(fits, "x", x, f"contiguous torch.float8_e4m3fn [1 to {most_rows}, {inner}]", MISREAD)
    fits = x_scales.dtype == torch.float32 and x_scales.shape == (rows, inner // GROUP)
    require(fits, "x_scales", x_scales, f"torch.float32 {[rows, inner // GROUP]}", MISREAD)
    if gates is None:
        return
    for name, tensor, count in (("hidden", gates[0], rows), ("weight of the gates", gates[1], len(gates[1]))):
        fits = tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.shape == (count, inner)
        require(fits, name, tensor, f"contiguous torch.bfloat16 {[count, inner]}", MISREAD)
