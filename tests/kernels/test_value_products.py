"""Values of all heads in one launch against their twin, with poison in what is allocated and behind the rows."""

from __future__ import annotations

import pytest
import torch

from nsa_backend.kernels import value_products as value_kernel
from nsa_backend.kernels.layer_front_torch import value_products_torch
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.kernels.projection_inputs import quantise
from nsa_backend.kernels.value_products import MOST_ROWS, value_counters, value_products

pytestmark = pytest.mark.usefixtures("poisoned")

LATENT = 512


def inputs(rows: int, heads: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers, whose sums are exact in any order; what is behind the rows and between two heads' latents is NaN."""
    attended = torch.full((rows + 3, heads, LATENT + 64), float("nan"), dtype=torch.bfloat16, device=device)[:rows, :, :LATENT]
    attended.copy_(torch.randint(-8, 9, attended.shape, device=device))
    weight = torch.randint(-8, 9, (heads, width, LATENT), device=device).bfloat16()
    return attended, weight.transpose(1, 2)


def expected(attended: torch.Tensor, weight: torch.Tensor, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin's; on a GPU quantised as SGLang does there, by a division that is not exact."""
    if not attended.is_cuda:
        return value_products_torch(attended, weight, scales)
    values = torch.einsum("rhl,hlv->rhv", attended.double(), weight.double()).bfloat16()
    return quantise(values.flatten(1), scales)


def check(rows: int, heads: int, width: int, scales: Scales, device: str) -> None:
    torch.manual_seed(rows)
    attended, weight = inputs(rows, heads, width, device)
    attended[:1] *= 0
    arrived = value_counters(weight)
    for _ in range(2):
        found = value_products(attended, weight, scales, arrived)
        assert not arrived.any()
        for ours, theirs in zip(found, expected(attended, weight, scales), strict=True):
            assert torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 2, 128), (3, 3, 256), (17, 3, 128), (70, 2, 128), (0, 2, 128)])
@pytest.mark.parametrize(("scales", "programs"), [(Scales.EXACT, value_kernel.PROGRAMS), (Scales.POWERS_OF_TWO, 0)])
def test_values_of_all_heads(device, monkeypatch, rows, heads, width, scales, programs):
    """With the sums divided, and by one program each."""
    monkeypatch.setattr(value_kernel, "PROGRAMS", programs)
    check(rows, heads, width, scales, device)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 64, 128])
@pytest.mark.parametrize(("heads", "width"), [(16, 128), (8, 256), (128, 128)])
@pytest.mark.parametrize("scales", list(Scales))
def test_values_of_a_layer(rows, heads, width, scales):
    check(rows, heads, width, scales, "cuda")


@pytest.mark.parametrize("name", ["attended", "weight", "arrived"])
@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x[..., :-1]])
def test_refuses_what_it_would_misread(name, change):
    attended, weight = inputs(2, 2, GROUP, "cpu")
    given = {"attended": attended, "weight": weight, "scales": Scales.EXACT, "arrived": value_counters(weight)}
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=f"{name} must be"):
        value_products(**given)


def test_more_rows_are_refused():
    attended, weight = inputs(MOST_ROWS + 1, 1, GROUP, "cpu")
    with pytest.raises(ValueError, match=f"attended must be .*at most {MOST_ROWS}"):
        value_products(attended, weight, Scales.EXACT, value_counters(weight))
