"""What enters a captured sampled round, against the torch twin on poisoned memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import tried

from nsa_backend.kernels.batch_inputs import PADDING_LENGTH, PADDING_SLOT
from nsa_backend.kernels.round_sampling import (
    KEEP_ALL_TOP_P,
    PADDING_TEMPERATURE,
    PADDING_TOP_K,
    SamplingParameters,
    fill_sampled_round_inputs,
    fill_sampled_round_inputs_torch,
)

POISON = -77
BEHIND = 3
"""Rows behind the captured ones, which belong to somebody else."""


def poisoned(rows: int, device: str) -> dict[str, torch.Tensor]:
    """Tensors of a captured round, with `BEHIND` rows behind each."""
    rows += BEHIND
    return {
        "slots": torch.full((rows,), POISON, dtype=torch.int64, device=device),
        "lens": torch.full((rows,), POISON, dtype=torch.int64, device=device),
        "temperatures": torch.full((rows, 1), POISON, dtype=torch.float32, device=device),
        "top_ps": torch.full((rows,), POISON, dtype=torch.float32, device=device),
        "top_ks": torch.full((rows,), POISON, dtype=torch.int32, device=device),
    }


def a_batch(requests: int, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor, SamplingParameters]:
    rng = torch.Generator().manual_seed(seed)
    slots = torch.randint(1, 4096, (requests,), generator=rng)
    lens = torch.randint(1, 200_000, (requests,), generator=rng)
    temperatures = torch.rand(requests, 1, generator=rng) + 0.01
    top_ps = torch.rand(requests, generator=rng)
    top_ps[torch.rand(requests, generator=rng) < 0.3] = 1.0
    top_ks = torch.randint(1, PADDING_TOP_K, (requests,), generator=rng, dtype=torch.int32)
    return slots.to(device), lens.to(device), SamplingParameters(*(t.to(device) for t in (temperatures, top_ps, top_ks)))


@given(requests=st.integers(1, 300), padding=st.integers(0, 300), seed=st.integers(0, 2**16))
@tried(25)
def test_a_batch_and_its_padding(device, requests, padding, seed):
    batch, rows = a_batch(requests, seed, device), requests + padding
    ours, twin = (poisoned(rows, device) for _ in range(2))
    for fill, into in ((fill_sampled_round_inputs, ours), (fill_sampled_round_inputs_torch, twin)):
        slots, lens, *sampling = (tensor[:rows] for tensor in into.values())
        fill(*batch, slots, lens, SamplingParameters(*sampling))
    paddings = (PADDING_SLOT, PADDING_LENGTH, PADDING_TEMPERATURE, KEEP_ALL_TOP_P, PADDING_TOP_K)
    for (name, filled), padding_value in zip(ours.items(), paddings, strict=True):
        assert torch.equal(filled, twin[name]), name
        assert (filled[requests:rows] == padding_value).all(), name
        assert (filled[rows:] == POISON).all(), name
    asked = vars(batch[2]) | {"top_ps": torch.where(batch[2].top_ps == 1, KEEP_ALL_TOP_P, batch[2].top_ps)}
    for filled, values in zip(ours.values(), (*batch[:2], *asked.values()), strict=True):
        assert torch.equal(filled[:requests], values)


def test_a_batch_that_does_not_fit(device):
    slots, lens, sampling = a_batch(3, 0, device)
    two = torch.ones(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="3 requests does not fit a round captured for 2: rows would be lost"):
        fill_sampled_round_inputs(slots, lens, sampling, two, two, SamplingParameters.allocate(2, device))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "temperatures",
            lambda t: t[:, 0],
            r"temperatures must be contiguous torch.float32 \[3, 1\], got torch.float32 \(3,\)",
        ),
        ("top_ps", lambda t: t.double(), r"top_ps must be contiguous torch.float32 \[3\], got torch.float64"),
        ("top_ks", lambda t: t.long(), r"top_ks must be contiguous torch.int32 \[3\], got torch.int64"),
        ("top_ps", lambda t: t[:2], r"top_ps must be contiguous torch.float32 \[3\], got torch.float32 \(2,\)"),
    ],
)
def test_parameters_of_another_form(device, name, change, message):
    slots, lens, sampling = a_batch(3, 0, device)
    static = (torch.ones_like(slots), torch.ones_like(lens))
    changed = dataclasses.replace(sampling, **{name: change(getattr(sampling, name))})
    with pytest.raises(ValueError, match=message):
        fill_sampled_round_inputs(slots, lens, changed, *static, SamplingParameters.allocate(3, device))
    changed = dataclasses.replace(SamplingParameters.allocate(3, device), **{name: change(getattr(sampling, name))})
    with pytest.raises(ValueError, match="static_" + message):
        fill_sampled_round_inputs(slots, lens, sampling, *static, changed)
