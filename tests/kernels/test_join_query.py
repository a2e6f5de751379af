"""Joined queries: the kernel against its twin, bit for bit, from the strided views that SGLang hands over."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import tried

from nsa_backend.kernels.join_query import join_query, join_query_torch

POISON = 7777.0


def parts(device, rows: int, heads: int, latent: int, rope: int, seed: int):
    """q_nope as a batched matmul leaves it, heads first; q_rope as the tail of a wider query."""
    generator = torch.Generator().manual_seed(seed)
    nope = torch.randn(heads, rows, latent, generator=generator).to(device, torch.bfloat16).transpose(0, 1)
    query = torch.randn(rows, heads, 8 + rope, generator=generator).to(device, torch.bfloat16)
    return nope, query[..., 8:]


@given(
    rows=st.integers(0, 9),
    heads=st.integers(1, 21),
    spare=st.integers(0, 9),
    widths=st.sampled_from([(512, 64), (16, 4), (6, 3)]),
    seed=st.integers(0, 2**32 - 1),
)
@tried(40)
def test_the_first_heads_are_joined_and_the_others_kept(device, rows, heads, spare, widths, seed):
    nope, rope = parts(device, rows, heads, *widths, seed)
    written = []
    for join in (join_query, join_query_torch):
        out = torch.full((rows, heads + spare, sum(widths)), POISON, dtype=torch.bfloat16, device=device)
        assert join(nope, rope, out) is out
        assert torch.all(out[:, heads:] == POISON)
        written.append(out)
    assert torch.equal(*written)
    assert torch.equal(written[0][:, :heads, : widths[0]], nope)
    assert torch.equal(written[0][:, :heads, widths[0] :], rope)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, r, out: (q, r[:1], out), "parts would mix"),
        (lambda q, r, out: (q, r, out[:1]), "write past its end"),
        (lambda q, r, out: (q, r, out[:, :2]), "write past its end"),
        (lambda q, r, out: (q, r, out[..., :19]), "write past its end"),
        (lambda q, r, out: (q, r, out.transpose(0, 1).contiguous().transpose(0, 1)), "write past its end"),
        (lambda q, r, out: (q.float(), r, out), "bits would be misread"),
        (lambda q, r, out: (q, r.float(), out), "bits would be misread"),
        (lambda q, r, out: (q.transpose(1, 2).contiguous().transpose(1, 2), r, out), "values would mix"),
    ],
)
def test_refuses_what_it_would_misread(device, change, message):
    nope, rope = parts(device, 2, 3, 16, 4, 0)
    out = torch.zeros(2, 4, 20, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=message):
        join_query(*change(nope, rope, out))
    assert not out.any()
