"""Weights that are asked for: what counts as one, and that nothing is written. What it saves is a benchmark's to say."""

from __future__ import annotations

import pytest
import torch

from nsa_backend.kernels.weights_ahead import ask_for, lines_of


def test_lines_of_weights_in_any_order():
    assert lines_of(torch.empty(7168, 2048, dtype=torch.float8_e4m3fn)) == 7168 * 2048 // 128
    assert lines_of(torch.empty(16, 512, 128, dtype=torch.bfloat16).transpose(1, 2)) == 16 * 512 * 128 * 2 // 128
    assert lines_of(torch.empty(1, 3, 5).transpose(0, 2)) == 1
    assert lines_of(torch.empty(0, 8)) == 0


def test_weights_that_are_untouched(device):
    """Of several types and sizes, one smaller than a program's lines and one that ends within a line."""
    shapes = [((300, 128), torch.float8_e4m3fn), ((3, 7), torch.float32), ((2000, 256), torch.bfloat16), ((5,), torch.uint8)]
    weights = [torch.ones(shape, device=device).to(dtype) for shape, dtype in shapes]
    for count in range(1, 5):
        ask_for(*weights[:count])
    assert all(weight.float().eq(1).all() for weight in weights)


def test_what_cannot_be_asked_for_says_so():
    with pytest.raises(ValueError, match="weight must be without gaps"):
        ask_for(torch.empty(4, 256)[:, :128])
    with pytest.raises(ValueError, match="one to 4 weights can be asked for at once, not 5"):
        ask_for(*[torch.empty(4)] * 5)
