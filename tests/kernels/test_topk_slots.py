"""Positions to slots: the kernel against its twin and against a loop, with poison where nothing may be read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import tried

from nsa_backend.kernels.topk_slots import topk_slots, topk_slots_torch

POISON = -7777


@given(
    requests=st.integers(1, 9),
    rows=st.integers(0, 40),
    topk=st.sampled_from([1, 16, 64, 2048]),
    page=st.sampled_from([1, 64]),
    seed=st.integers(0, 2**32 - 1),
)
@tried(30)
def test_slots_of_random_rows(device, requests, rows, topk, page, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 300, requests)
    table = np.full((requests, -(-320 // page)), POISON, dtype=np.int32)
    for request, length in enumerate(lengths):
        table[request, : -(-length // page)] = rng.integers(0, 2**20, -(-length // page))
    owner = rng.integers(0, requests, rows).astype(np.int32)
    positions = np.stack([rng.integers(-1, lengths[o], topk) for o in owner]) if rows else np.zeros((0, topk))
    positions = positions.astype(np.int32)
    slots = (table[..., None] * page + np.arange(page)).reshape(requests, -1)
    want = [[slots[o, p] if p >= 0 else -1 for p in line] for o, line in zip(owner, positions, strict=True)]
    args = [torch.from_numpy(a).to(device) for a in (positions, table, owner)]
    room = torch.full((rows, topk), POISON, dtype=torch.int32, device=device)
    in_place = topk_slots(*args, page, room)
    assert in_place is room
    for got in (topk_slots(*args, page), in_place, topk_slots_torch(*args, page)):
        assert got.dtype == torch.int32
        np.testing.assert_array_equal(got.cpu().numpy(), np.array(want, dtype=np.int32).reshape(rows, topk))


def to(dtype: torch.dtype):
    return lambda t: t.to(dtype)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("token_to_batch_idx", lambda t: t[:1], "another request's tokens"),
        # Read as if they were dense, every row but the first would get another one's request.
        *(
            (
                "token_to_batch_idx",
                lambda t, n=n: t.repeat_interleave(n)[::n],
                rf"contiguous .* strides \({n},\).*another request's",
            )
            for n in (2, 5)
        ),
        ("page_table", lambda t: t.repeat(1, 2)[:, ::2], "wrong columns"),
        ("page_table", to(torch.int64), "wrong columns"),
        *(
            (name, to(dtype), f"{name} must be .*got {dtype}")
            for name in ("topk_indices", "token_to_batch_idx")
            for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool)
        ),
        *(
            (name, lambda t: t.to("meta"), f"{name} is on meta and topk_indices on")
            for name in ("page_table", "token_to_batch_idx")
        ),
    ],
)
def test_what_would_be_misread_is_refused(device, name, change, message):
    call = {
        "topk_indices": torch.zeros(2, 4, dtype=torch.int32, device=device),
        "page_table": torch.zeros(2, 8, dtype=torch.int32, device=device),
        "token_to_batch_idx": torch.zeros(2, dtype=torch.int64, device=device),
    }
    with pytest.raises(ValueError, match=message):
        topk_slots(**call | {name: change(call[name])}, page_size=1)


def test_takes_requests_of_a_chunk_as_sglang_counts_them(device):
    """`batch_idx_list` of a prefill chunk is int64."""
    table = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    positions = torch.tensor([[2, -1], [0, 1]], dtype=torch.int32, device=device)
    assert topk_slots(positions, table, torch.tensor([1, 0], device=device), 1).tolist() == [[5, -1], [0, 1]]
