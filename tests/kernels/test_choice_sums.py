"""Sums of a token's choices and its shared expert, against torch: poisoned memory, any number of choices, no tokens."""

from __future__ import annotations

import pytest
import torch

from nsa_backend.kernels.choice_sums import choice_sums

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("tokens", "choices", "hidden"), [(1, 8, 1024), (5, 9, 1536), (3, 2, 96), (0, 8, 128)])
@pytest.mark.parametrize("shared", [False, True])
def test_bits_are_those_of_a_sum_and_an_addition(device, tokens, choices, hidden, shared):
    generator = torch.Generator().manual_seed(tokens)
    given = torch.randn(tokens, choices, hidden, generator=generator).bfloat16().to(device)
    of_shared = torch.randn(tokens, hidden, generator=generator).bfloat16().to(device) if shared else None
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
    sums = torch.zeros(tokens, hidden, device=device)
    for choice in range(choices):
        sums += given[:, choice].float()
    wanted = (sums * 2.5).bfloat16()
    assert choice_sums(given, 2.5, of_shared, out) is out
    assert torch.equal(out, wanted if of_shared is None else wanted + of_shared)


@pytest.mark.parametrize("shared", [False, True])
def test_what_nobody_gave_is_not_read(device, shared):
    """Of choices of other GPUs' experts, all of a token's among them."""
    given = torch.ones(3, 2, 96, device=device).bfloat16()
    of_shared = torch.full((3, 96), 4.0, device=device).bfloat16() if shared else None
    chosen = torch.tensor([[-1, 0], [5, 7], [-1, -1]], dtype=torch.int32, device=device)
    given[chosen < 0] = float("nan")
    out = torch.empty(3, 96, dtype=torch.bfloat16, device=device)
    choice_sums(given, 2.0, of_shared, out, chosen)
    assert (out - 4.0 * shared)[:, 0].tolist() == [2.0, 4.0, 0.0]
    assert torch.equal(out, out[:, :1].expand_as(out))


def test_the_shared_one_may_be_written_over(device):
    given, shared = torch.ones(2, 3, 64, device=device).bfloat16(), torch.ones(2, 64, device=device).bfloat16()
    choice_sums(given, 1.0, shared, shared)
    assert torch.equal(shared, torch.full_like(shared, 4.0))


def test_what_cannot_be_served_says_so(device):
    given, out = torch.ones(2, 3, 64, device=device).bfloat16(), torch.ones(2, 64, device=device).bfloat16()
    with pytest.raises(ValueError, match=r"given must be contiguous torch.bfloat16 \[2, 3, 64\]"):
        choice_sums(given.float(), 1.0, None, out)
    with pytest.raises(ValueError, match=r"shared must be contiguous torch.bfloat16 \[2, 64\]"):
        choice_sums(given, 1.0, out[:, :32], out)
    with pytest.raises(ValueError, match=r"chosen must be contiguous torch.int32 \[2, 3\]"):
        choice_sums(given, 1.0, None, out, torch.zeros(2, 3, device=device))
