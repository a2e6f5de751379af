"""Weights that a launch asks for: each byte of what is wanted once, and none behind it."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from nsa_backend.kernels.weights_ahead import MOST_AHEAD, STEP, ahead_of, ask_for, requests_of, share_of

LANES = 32


@triton.jit
def shares_kernel(found_ptr, size):
    """Program: its share."""
    begin, end = share_of(size, tl.program_id(0), tl.num_programs(0))
    tl.store(found_ptr + tl.program_id(0) * 2, begin)
    tl.store(found_ptr + tl.program_id(0) * 2 + 1, end)


@triton.jit
def requests_kernel(found_ptr, start, end, LANES: tl.constexpr):
    """Requests of one step."""
    at, count = requests_of(start, end, LANES)
    lane = tl.arange(0, LANES)
    tl.store(found_ptr + lane * 2, at)
    tl.store(found_ptr + lane * 2 + 1, count)


@triton.jit
def ask_kernel(weight_ptr, size, LANES: tl.constexpr, COMPILED: tl.constexpr):
    """Ask for a share."""
    ask_for(weight_ptr, size, tl.program_id(0), tl.num_programs(0), LANES, COMPILED)


@pytest.mark.parametrize("size", [0, 16, 48, 4096, 14_680_064, MOST_AHEAD])
@pytest.mark.parametrize("programs", [1, 3, 128, 257])
def test_programs_share_all_bytes(size, programs, device):
    found = torch.full((programs, 2), -1, dtype=torch.int64, device=device)
    shares_kernel[(programs,)](found, size)
    assert found[0, 0] == 0
    assert found[-1, 1] == size
    assert torch.equal(found[1:, 0], found[:-1, 1])
    assert not (found % 16).any()
    assert (found[:, 1] - found[:, 0]).max() <= size // programs + 16


@pytest.mark.parametrize("count", [16, 4096, 4112, STEP.value - 16, STEP.value, 2 * STEP.value])
def test_lanes_ask_for_a_step_at_most(count, device):
    start = 7 * 16
    found = torch.full((LANES, 2), -1, dtype=torch.int64, device=device)
    requests_kernel[(1,)](found, start, start + count, LANES)
    at, counts = found.T.tolist()
    assert at[0] == start
    assert sum(counts) == min(count, STEP.value)
    behind = start + sum(counts)
    for begin, size in zip(at, counts, strict=True):
        assert size >= 0
        assert size % 16 == 0
        assert size == 0 or begin + size <= behind
    assert all(after - begin == STEP.value // LANES for begin, after in itertools.pairwise(at))


def test_a_weight_may_be_asked_for_in_part():
    weight, other = torch.zeros(64, 128, dtype=torch.uint8), torch.zeros(16)
    assert ahead_of(weight, other).size == 64 * 128
    assert ahead_of(weight, other, 1000).size == 992
    assert ahead_of(weight, other, 0).size == 0
    assert ahead_of(None, other) == (other, 0)
    with pytest.raises(ValueError, match="weight must be contiguous, in multiples of 16 bytes"):
        ahead_of(weight[:, :64], other)
    with pytest.raises(ValueError, match="weight must be contiguous, in multiples of 16 bytes"):
        ahead_of(weight.view(-1)[8:24], other)


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 5, 128])
def test_a_gpu_takes_the_requests(programs):
    weight = torch.randint(255, (3 * STEP.value + 48,), dtype=torch.uint8, device="cuda")
    before = weight.clone()
    for size in (0, 16, len(weight)):
        ask_kernel[(programs,)](weight, size, 128, True)
    torch.cuda.synchronize()
    assert torch.equal(weight, before)
