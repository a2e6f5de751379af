"""What enters and leaves a captured round, against the torch twins on poisoned memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import tried

from nsa_backend.kernels.batch_inputs import PADDING_LENGTH, PADDING_SLOT
from nsa_backend.kernels.round_tensors import (
    fill_round_inputs,
    fill_round_inputs_torch,
    read_slot,
    slot_size,
    store_round_results,
    store_round_results_torch,
)

POISON = -77
DEPTH = 4


def poisoned(*shape: int, dtype: torch.dtype = torch.int64, device: str) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=dtype, device=device)


@given(requests=st.integers(1, 300), padding=st.integers(0, 300), seed=st.integers(0, 2**16))
@tried(25)
def test_a_batch_and_its_padding(device, requests, padding, seed):
    rng = torch.Generator().manual_seed(seed)
    slots = torch.randint(1, 4096, (requests,), generator=rng).to(device)
    lens = torch.randint(1, 200_000, (requests,), generator=rng).to(device)
    ours, twin = (poisoned(2, requests + padding + 3, device=device) for _ in range(2))
    for fill, out in ((fill_round_inputs, ours), (fill_round_inputs_torch, twin)):
        fill(slots, lens, out[0, : requests + padding], out[1, : requests + padding])
    assert torch.equal(ours, twin)
    assert (ours[:, -3:] == POISON).all()
    assert (ours[0, requests:-3] == PADDING_SLOT).all()
    assert (ours[1, requests:-3] == PADDING_LENGTH).all()


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


def test_a_batch_that_does_not_fit(device):
    two, three = (torch.ones(n, dtype=torch.int64, device=device) for n in (2, 3))
    with pytest.raises(ValueError, match="3 requests does not fit a round captured for 2: rows would be lost"):
        fill_round_inputs(three, three, two, two)


def test_lengths_of_another_dtype(device):
    two = torch.ones(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"seq_lens must be contiguous torch.int64 \[2\], got torch.int32"):
        fill_round_inputs(two, two.int(), two, two)


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
