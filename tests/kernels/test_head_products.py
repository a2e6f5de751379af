"""Products of few rows with a weight of each head's own: what is turned and quantised to the bit, sums to a rounding."""

from __future__ import annotations

import pytest
import torch
from emulated import around, making_values, readying_queries

from nsa_backend.kernels import head_products
from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.head_products import LATENT, head_queries, head_values
from nsa_backend.kernels.layer_front_torch import rope_query_torch
from nsa_backend.kernels.layer_front_weights import FrontWeights, Scales
from nsa_backend.kernels.projection_inputs import quantise

pytestmark = pytest.mark.usefixtures("poisoned")

POSITIONS, ROPE = 64, 64
QUERIES = [(16, 128, False), (8, 192, False), (3, 128, True)]
"""Heads of a rank of DeepSeek-V3.2, of GLM-5, and some; values of a head that are not turned; whether RoPE turns halves."""
VALUES = [(16, 128, Scales.EXACT), (8, 256, Scales.EXACT), (3, 128, Scales.POWERS_OF_TWO)]
"""The same heads, and values of each."""


def front_weights(neox: bool, device: str = "cpu") -> FrontWeights:
    angles = torch.rand(POSITIONS, ROPE // 2, device=device) * 6.28
    norm = torch.ones(256, device=device).bfloat16()
    return FrontWeights(norm, norm, None, None, torch.cat((angles.cos(), angles.sin()), dim=-1), None, 1e-6, 1e-6, 0.0, neox)


def padded(rows: int, *shape: int, device: str) -> torch.Tensor:
    """bfloat16 of so many rows, with poison behind them."""
    x = torch.full((rows + 8, *shape), torch.nan, device=device).bfloat16()
    x[:rows] = torch.randn(rows, *shape, device=device).bfloat16()
    return x[:rows]


@pytest.mark.parametrize(("heads", "inner", "neox"), QUERIES)
@pytest.mark.parametrize("rows", [1, 4, 9, 32])
def test_queries(rows, heads, inner, neox, device):
    torch.manual_seed(rows + heads)
    weight = torch.randn(heads, LATENT, inner, device=device).bfloat16().transpose(1, 2)
    query = padded(rows, heads, inner + ROPE, device=device)
    q_nope, q_rope = query[..., :inner], query[..., inner:]
    weights, positions = front_weights(neox, device), torch.randint(POSITIONS, (rows,), device=device)
    launch = readying_queries(inner, rows, neox=neox) if device == "cpu" else None
    found, turned = head_queries(q_nope, q_rope, weight, weights, positions, launch=launch)
    wanted = torch.einsum("rhi,hil->rhl", q_nope.double(), weight.double())
    assert (found.double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()
    assert (found != wanted.bfloat16()).float().mean() < 0.01
    assert torch.equal(turned, rope_query_torch(q_rope, weights, positions))


@pytest.mark.parametrize(("heads", "width", "scales"), VALUES)
@pytest.mark.parametrize("rows", [1, 4, 9, 32])
def test_values(rows, heads, width, scales, device):
    """The quantisation of sums that are exact, as integers are: to the bit."""
    torch.manual_seed(rows + heads)
    weight = torch.randint(-3, 4, (heads, width, LATENT), device=device).bfloat16().transpose(1, 2)
    attended = padded(rows, heads, LATENT, device=device)
    attended.copy_(torch.randint(-3, 4, attended.shape))
    attended[0, 0] = 0  # a group of zeros
    launch = making_values(width, rows, scales) if device == "cpu" else None
    found = head_values(attended, weight, scales, before_ours=rows == 4, launch=launch)
    exact = torch.einsum("rhl,hlv->rhv", attended.double(), weight.double()).bfloat16()
    for ours, wanted in zip(found, quantise(exact.flatten(1), scales), strict=True):
        assert torch.equal(ours.float(), wanted.float())
    assert found[1].stride(0) == 1 or rows < 2


@pytest.mark.parametrize("rows", [1, 9, 32])
def test_a_block_has_the_shared_memory_that_it_reads(rows):
    emulated = around(head_products.VALUES, head_products.value_constants(128, rows, Scales.EXACT))
    assert emulated.shared_bytes() == head_products.value_shared_bytes(rows)


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize(("inner", "width"), [(128, 128), (192, 256)])
def test_they_compile_for_hopper_with_all_in_registers(rows, inner, width):
    queries = head_products.QUERIES, head_products.query_constants(inner, rows, neox=False)
    for source, macros in (queries, (head_products.VALUES, head_products.value_constants(width, rows, Scales.EXACT))):
        cubin, said = compiled(source, macros)
        assert cubin
        assert "0 bytes spill stores, 0 bytes spill loads" in said


def test_what_they_would_misread():
    weights, positions, weight = front_weights(False), torch.zeros(2, dtype=torch.int64), torch.zeros(4, LATENT, 128).bfloat16()
    q_nope, q_rope = torch.zeros(2, 4, 128).bfloat16(), torch.zeros(2, 4, ROPE).bfloat16()
    for wrong in (q_nope.float(), q_nope[:0], torch.zeros(33, 4, 128).bfloat16(), torch.zeros(2, 4, 132).bfloat16()[..., :128]):
        with pytest.raises(ValueError, match="q_nope must be"):
            head_queries(wrong, q_rope, weight.transpose(1, 2), weights, positions)
    with pytest.raises(ValueError, match="columns are dense"):
        head_queries(q_nope, q_rope, weight.transpose(1, 2).contiguous(), weights, positions)
    with pytest.raises(ValueError, match=r"17 heads .*others were not timed"):
        head_values(
            torch.zeros(2, 17, LATENT).bfloat16(), torch.zeros(17, 128, LATENT).bfloat16().transpose(1, 2), Scales.EXACT
        )
    with pytest.raises(ValueError, match="attended must be"):
        head_values(q_nope, weight.transpose(1, 2).contiguous().transpose(1, 2), Scales.EXACT)
