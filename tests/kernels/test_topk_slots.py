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
    for transform in (topk_slots, topk_slots_torch):
        got = transform(*args, page)
        assert got.dtype == torch.int32
        np.testing.assert_array_equal(got.cpu().numpy(), np.array(want, dtype=np.int32).reshape(rows, topk))


def test_refuses_rows_without_a_request(device):
    table = torch.zeros(1, 8, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="another request's tokens"):
        topk_slots(torch.zeros(2, 4, dtype=torch.int32, device=device), table, table.new_zeros(1), 1)


def test_refuses_a_transposed_table(device):
    table = torch.zeros(8, 8, dtype=torch.int32, device=device).t()
    with pytest.raises(ValueError, match="wrong columns"):
        topk_slots(torch.zeros(2, 4, dtype=torch.int32, device=device), table, table.new_zeros(2), 1)


@given(rows=st.integers(2, 9), stride=st.integers(2, 5), dtype=st.sampled_from([torch.int32, torch.int64]))
@tried()
def test_refuses_strided_requests_of_rows(device, rows, stride, dtype):
    """Read as if they were dense, every row but the first would get another one's request."""
    owner = torch.arange(rows * stride, dtype=dtype, device=device)[::stride]
    table = torch.zeros(rows * stride, 8, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=rf"token_to_batch_idx must be contiguous .* strides \({stride},\).*another request's"):
        topk_slots(torch.zeros(rows, 4, dtype=torch.int32, device=device), table, owner, 1)


@given(
    name=st.sampled_from(["topk_indices", "token_to_batch_idx"]),
    dtype=st.sampled_from([torch.int16, torch.uint8, torch.float32, torch.bool]),
)
@tried()
def test_refuses_dtypes_whose_bits_it_would_misread(device, name, dtype):
    call = {
        "topk_indices": torch.zeros(2, 4, dtype=torch.int32, device=device),
        "page_table": torch.zeros(2, 8, dtype=torch.int32, device=device),
        "token_to_batch_idx": torch.zeros(2, dtype=torch.int32, device=device),
        "page_size": 1,
    }
    call[name] = call[name].to(dtype)
    with pytest.raises(ValueError, match=rf"{name} must be .*got {dtype}"):
        topk_slots(**call)


@pytest.mark.parametrize("name", ["page_table", "token_to_batch_idx"])
def test_refuses_another_device(device, name):
    call = {
        "topk_indices": torch.zeros(2, 4, dtype=torch.int32, device=device),
        "page_table": torch.zeros(2, 8, dtype=torch.int32, device=device),
        "token_to_batch_idx": torch.zeros(2, dtype=torch.int32, device=device),
        "page_size": 1,
    }
    call[name] = call[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} is on meta and topk_indices on {device}"):
        topk_slots(**call)


def test_takes_requests_of_a_chunk_as_sglang_counts_them(device):
    """`batch_idx_list` of a prefill chunk is int64."""
    table = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    positions = torch.tensor([[2, -1], [0, 1]], dtype=torch.int32, device=device)
    assert topk_slots(positions, table, torch.tensor([1, 0], device=device), 1).tolist() == [[5, -1], [0, 1]]
