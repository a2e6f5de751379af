"""What enters and leaves a captured round, against the torch twins on poisoned memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import tried

from nsa_backend.kernels.batch_inputs import PADDING_LENGTH, PADDING_SLOT
from nsa_backend.kernels.round_tensors import (
    KEEP_ALL_TOP_P,
    PADDING_TEMPERATURE,
    PADDING_TOP_K,
    RoundInputs,
    SamplingParameters,
    fill_round_inputs,
    fill_round_inputs_torch,
    read_slot,
    slot_size,
    store_round_results,
    store_round_results_torch,
)

POISON = -77
BEHIND = 3
"""Rows behind the captured ones, which belong to somebody else."""
DEPTH = 4
PADDING = (PADDING_SLOT, PADDING_LENGTH, PADDING_TEMPERATURE, KEEP_ALL_TOP_P, PADDING_TOP_K)


def poisoned(*shape: int, dtype: torch.dtype = torch.int64, device: str) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype, device=device)


def tensors(inputs: RoundInputs) -> list[torch.Tensor]:
    """By row."""
    sampling = [] if inputs.sampling is None else list(vars(inputs.sampling).values())
    return [inputs.req_pool_indices, inputs.seq_lens, *sampling]


def static_rows(rows: int, device: str, *, sampled: bool) -> tuple[list[torch.Tensor], RoundInputs]:
    """Poisoned tensors of a captured round, with `BEHIND` rows behind each, and the round's part of them."""
    like = tensors(RoundInputs.allocate(rows + BEHIND, device, sampled=sampled))
    whole = [torch.full_like(tensor, POISON) for tensor in like]
    slots, lens, *sampling = (tensor[:rows] for tensor in whole)
    count = torch.full((1,), POISON, dtype=torch.int32, device=device)
    return [*whole, count], RoundInputs(slots, lens, SamplingParameters(*sampling) if sampled else None, count)


def a_batch(requests: int, seed: int, device: str, *, sampled: bool) -> RoundInputs:
    rng = torch.Generator().manual_seed(seed)
    slots = torch.randint(1, 4096, (requests,), generator=rng)
    lens = torch.randint(1, 200_000, (requests,), generator=rng)
    temperatures = torch.rand(requests, 1, generator=rng) + 0.01
    top_ps = torch.rand(requests, generator=rng)
    top_ps[torch.rand(requests, generator=rng) < 0.3] = 1.0
    top_ks = torch.randint(1, PADDING_TOP_K, (requests,), generator=rng, dtype=torch.int32)
    parameters = SamplingParameters(*(tensor.to(device) for tensor in (temperatures, top_ps, top_ks)))
    return RoundInputs(slots.to(device), lens.to(device), parameters if sampled else None)


@pytest.mark.parametrize("sampled", [False, True])
@given(requests=st.integers(0, 300), padding=st.integers(0, 300), seed=st.integers(0, 2**16))
@tried(25)
def test_a_batch_and_its_padding(device, sampled, requests, padding, seed):
    batch, rows = a_batch(requests, seed, device, sampled=sampled), requests + padding
    (ours, static), (twin, of_twin) = (static_rows(rows, device, sampled=sampled) for _ in range(2))
    fill_round_inputs(batch, static)
    fill_round_inputs_torch(batch, of_twin)
    assert all(torch.equal(one, other) for one, other in zip(ours, twin, strict=True))
    assert static.num_requests.tolist() == [requests]
    asked = tensors(batch)
    if sampled:
        asked[3] = torch.where(asked[3] == 1, KEEP_ALL_TOP_P, asked[3])
    for filled, values, padding_value in zip(ours[:-1], asked, PADDING, strict=False):
        assert torch.equal(filled[:requests], values)
        assert (filled[requests:rows] == padding_value).all()
        assert (filled[rows:] == POISON).all()


@pytest.mark.parametrize("sampled", [False, True])
def test_a_batch_that_does_not_fit(device, sampled):
    static = RoundInputs.allocate(2, device, sampled=sampled)
    with pytest.raises(ValueError, match="3 requests does not fit a round captured for 2: rows would be lost"):
        fill_round_inputs(a_batch(3, 0, device, sampled=sampled), static)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("seq_lens", torch.Tensor.int, r"seq_lens must be contiguous torch.int64 \[3\], got torch.int32"),
        ("req_pool_indices", lambda t: t[:2], r"req_pool_indices must be contiguous torch.int64 \[3\], got torch.int64 \(2,\)"),
        (
            "temperatures",
            lambda t: t[:, 0],
            r"temperatures must be contiguous torch.float32 \[3, 1\], got torch.float32 \(3,\)",
        ),
        ("top_ps", torch.Tensor.double, r"top_ps must be contiguous torch.float32 \[3\], got torch.float64"),
        ("top_ks", torch.Tensor.long, r"top_ks must be contiguous torch.int32 \[3\], got torch.int64"),
        ("top_ps", lambda t: t[:2], r"top_ps must be contiguous torch.float32 \[3\], got torch.float32 \(2,\)"),
    ],
)
def test_tensors_of_another_form(device, name, change, message):
    def changed(inputs: RoundInputs) -> RoundInputs:
        if hasattr(inputs, name):
            return dataclasses.replace(inputs, **{name: change(getattr(inputs, name))})
        sampling = dataclasses.replace(inputs.sampling, **{name: change(getattr(inputs.sampling, name))})
        return dataclasses.replace(inputs, sampling=sampling)

    batch, static = a_batch(3, 0, device, sampled=True), RoundInputs.allocate(3, device, sampled=True)
    with pytest.raises(ValueError, match=message):
        fill_round_inputs(changed(batch), static)
    with pytest.raises(ValueError, match="static_" + message):
        fill_round_inputs(batch, changed(static))


@pytest.mark.parametrize("logprobs", [False, True])
@given(rounds=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 9)), min_size=1, max_size=2 * DEPTH + 1))
@tried(15)
def test_every_round_has_a_slot_of_its_own(device, logprobs, rounds):
    """Rounds of changing sizes: each of the last `DEPTH` still stands in its slot, and the slots' ends stay untouched."""
    width = slot_size(80 * 9, 80, logprobs=logprobs) + 5
    ours, twin = (poisoned(DEPTH, width, dtype=torch.int32, device=device) for _ in range(2))
    counters = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
    for number, (requests, tokens) in enumerate(rounds):
        ids = torch.arange(requests * tokens, dtype=torch.int32, device=device) + 1000 * number
        lens = torch.arange(requests, dtype=torch.int32, device=device) - number
        found = -torch.rand(len(ids), device=device) * 10.0**number if logprobs else None
        store_round_results(ids, lens, ours, counters[0], found)
        store_round_results_torch(ids, lens, twin, counters[1], found)
        stored = read_slot(ours[number % DEPTH], len(ids), requests, logprobs=logprobs)
        for one, other in zip(stored, (ids, lens, found), strict=True):
            assert other is one is None or torch.equal(one, other)
        assert torch.equal(ours, twin)
        assert (ours[:, -5:] == POISON).all()
    assert counters[0].item() == counters[1].item() == len(rounds)


def test_a_slot_that_is_too_small(device):
    ids, lens = torch.ones(8, dtype=torch.int32, device=device), torch.ones(2, dtype=torch.int32, device=device)
    ring, launches = torch.zeros(DEPTH, 9, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="results would run into the next slot"):
        store_round_results(ids, lens, ring, launches)
    ring = torch.zeros(DEPTH, 17, dtype=torch.int32, device=device)
    store_round_results(ids, lens, ring, launches)
    with pytest.raises(ValueError, match=r"\[depth, at least 18\], .* results would run into the next slot"):
        store_round_results(ids, lens, ring, launches, torch.zeros(8, device=device))


def test_log_probabilities_of_another_dtype(device):
    ids, lens = torch.ones(8, dtype=torch.int32, device=device), torch.ones(2, dtype=torch.int32, device=device)
    ring, launches = torch.zeros(DEPTH, 18, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"logprobs must be contiguous torch.float32 \[8\], got torch.bfloat16"):
        store_round_results(ids, lens, ring, launches, torch.zeros(8, dtype=torch.bfloat16, device=device))
