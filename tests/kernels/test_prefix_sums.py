"""The search among prefix sums in registers against numpy's, with ends that repeat, fill the block or do not exist."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from nsa_backend.kernels.prefix_sums import NO_END, count_ends_up_to


@triton.jit
def _search(ends_ptr, value_ptr, count_ptr, last_ptr, BLOCK: tl.constexpr, VALUES: tl.constexpr):
    place = tl.arange(0, VALUES)
    ends = tl.load(ends_ptr + tl.arange(0, BLOCK))
    count, last = count_ends_up_to(ends, tl.load(value_ptr + place), BLOCK=BLOCK)
    tl.store(count_ptr + place, count)
    tl.store(last_ptr + place, last)


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("block", [2, 64, 128])
@pytest.mark.parametrize("missing", [0, 1, "all"])
def test_counts_what_is_not_beyond_a_value(device, block, missing, warps):
    rng = np.random.default_rng(block)
    real = block - (block if missing == "all" else missing)
    ends = np.full(block, NO_END.value, dtype=np.int32)
    ends[:real] = np.cumsum(rng.integers(0, 3, real))  # of three steps one adds nothing: ends repeat
    total = int(ends[real - 1]) if real else 0
    values = np.concatenate([rng.integers(0, total + 2, 26), [0, 1, total - 1, total, total + 1, NO_END.value - 1]]).astype(
        np.int32
    )
    got = torch.full((2, 32), -7777, dtype=torch.int32, device=device)
    _search[(1,)](
        torch.from_numpy(ends).to(device), torch.from_numpy(values).to(device), got[0], got[1],
        BLOCK=block, VALUES=32, num_warps=warps,
    )  # fmt: skip
    want = np.searchsorted(ends, values, side="right")
    np.testing.assert_array_equal(got[0].cpu().numpy(), want)
    np.testing.assert_array_equal(got[1].cpu().numpy(), np.concatenate([[0], ends])[want])
