"""Every field of a prefill: kernel and torch twin against plain Python, exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from metadata_reference import expected_prefill
from properties import tried

from nsa_backend.kernels import prefill_fields
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.prefill import write_prefill
from nsa_backend.kernels.prefill_torch import write_prefill_torch

WRITERS = {"kernel": write_prefill, "twin": write_prefill_torch}
POISON = -7777


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fields begin as poison, so that an element nobody writes is seen."""
    empty = torch.empty
    monkeypatch.setattr(prefill_fields.torch, "empty", lambda *a, **k: empty(*a, **k).fill_(POISON))


def run_and_compare(device, writer, prefixes, extends, *, index_topk=64, dtype=torch.int64, seed=0, flattened=True) -> None:
    rng = np.random.default_rng(seed)
    tokens = [prefix + new for prefix, new in zip(prefixes, extends, strict=True)]
    pool = rng.integers(0, 2**20, (2 * len(tokens), max(tokens) + 5)).astype(np.int32)
    rows = rng.permutation(2 * len(tokens))[: len(tokens)]
    got = WRITERS[writer](
        BatchInputs(
            seq_lens=torch.tensor(tokens, dtype=dtype, device=device),
            req_pool_indices=torch.tensor(rows, dtype=torch.int64, device=device),
            extend_lens=torch.tensor(extends, dtype=torch.int32, device=device),
        ),
        req_to_token=torch.from_numpy(pool).to(device),
        index_topk=index_topk,
        num_rows=sum(extends),
        longest=max(tokens),
        flattened=sum(tokens) if flattened else 0,
    )
    want = expected_prefill(prefixes, extends, pool[rows], index_topk)
    if not flattened:
        assert got.flattened_slots is None
        del want["flattened_slots"]
    for name, values in want.items():
        np.testing.assert_array_equal(getattr(got, name).cpu().numpy(), np.asarray(list(values)), err_msg=name)


@pytest.mark.parametrize("writer", WRITERS)
@given(
    requests=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 90)), min_size=1, max_size=9),
    index_topk=st.sampled_from([1, 16, 64, 2048]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32 - 1),
    flattened=st.booleans(),
)
@tried(30, suppress_health_check=list(HealthCheck))
def test_random_batches(device, writer, requests, index_topk, dtype, seed, flattened):
    prefixes, extends = zip(*requests, strict=True)
    extends = [*extends[:-1], max(extends[-1], 1)]
    run_and_compare(device, writer, list(prefixes), extends, index_topk=index_topk, dtype=dtype, seed=seed, flattened=flattened)


@pytest.mark.parametrize("writer", WRITERS)
def test_more_requests_than_one_tile(device, writer):
    run_and_compare(device, writer, [r % 5 for r in range(150)], [1 + r % 3 for r in range(150)])


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("rows", [63, 64, 65, 128])
def test_rows_around_a_block(device, writer, rows):
    run_and_compare(device, writer, [7], [rows])


@pytest.mark.parametrize("writer", WRITERS)
def test_long_prefix_opens_many_page_blocks(device, writer):
    run_and_compare(device, writer, [16_500, 3], [2, 5], index_topk=2048)


@given(
    requests=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40)), min_size=1, max_size=9),
    ranks=st.integers(1, 8),
    index_topk=st.sampled_from([1, 16, 64, 2048]),
)
@tried(60, suppress_health_check=list(HealthCheck))
def test_some_rows_of_a_batch(device, requests, ranks, index_topk):
    """Every rank has what all have of its rows; put together, in turn, these are the rows of all."""
    prefixes, extends = (list(column) for column in zip(*requests, strict=True))
    tokens = [prefix + new for prefix, new in requests]
    pool = np.arange(len(tokens) * (max(tokens) + 1), dtype=np.int32).reshape(len(tokens), -1)
    everything = write_prefill_torch(
        BatchInputs(
            seq_lens=torch.tensor(tokens, device=device),
            req_pool_indices=torch.arange(len(tokens), device=device),
            extend_lens=torch.tensor(extends, device=device),
        ),
        req_to_token=torch.from_numpy(pool).to(device),
        index_topk=index_topk, num_rows=sum(extends), longest=max(tokens), flattened=sum(tokens),
    )  # fmt: skip
    whole = expected_prefill(prefixes, extends, pool, index_topk)
    owners = whole["token_to_batch_idx"]
    counts = np.zeros(len(tokens), dtype=int)
    for rank in range(ranks):
        got = everything.of_rows(slice(rank, None, ranks))
        want = dict(whole)
        for name in ("seqlens_expanded", "nsa_cache_seqlens", "token_to_batch_idx", "k_start", "k_end"):
            want[name] = whole[name][rank::ranks]
        mine = np.bincount(np.array(owners[rank::ranks], dtype=int), minlength=len(tokens))
        counts += mine
        want["cu_seqlens_q"] = np.cumsum([0, *mine])
        want["nsa_cu_seqlens_q"] = range(len(owners[rank::ranks]) + 1)
        want["nsa_cu_seqlens_k"] = np.cumsum([0, *want["nsa_cache_seqlens"]])
        for name, values in want.items():
            field = getattr(got, name)
            np.testing.assert_array_equal(field.cpu().numpy(), np.asarray(list(values)), err_msg=name)
            assert field.dtype == torch.int32, name
            assert field.is_contiguous(), name
    assert counts.tolist() == extends


def test_batch_without_a_request(device):
    got = write_prefill(
        BatchInputs(
            seq_lens=torch.empty(0, dtype=torch.int64, device=device),
            req_pool_indices=torch.empty(0, dtype=torch.int64, device=device),
            extend_lens=torch.empty(0, dtype=torch.int32, device=device),
        ),
        req_to_token=torch.zeros(1, 64, dtype=torch.int32, device=device),
        index_topk=64, num_rows=0, longest=0,
    )  # fmt: skip
    assert got.cu_seqlens_q.tolist() == got.cu_seqlens_k.tolist() == got.nsa_cu_seqlens_k.tolist() == [0]
    assert got.seqlens_expanded.shape == (0,)


def test_refuses_what_it_would_read_past(device):
    vectors = {
        name: torch.ones(2, dtype=torch.int64, device=device) for name in ("seq_lens", "extend_lens", "req_pool_indices")
    }
    rest = {"req_to_token": torch.zeros(2, 64, dtype=torch.int32, device=device), "index_topk": 64, "num_rows": 2}
    with pytest.raises(ValueError, match="be read past"):
        write_prefill(BatchInputs(**vectors), **rest, longest=65)
    with pytest.raises(ValueError, match="read past its end"):
        write_prefill(BatchInputs(**vectors | {"extend_lens": vectors["extend_lens"][:1]}), **rest, longest=1)
    with pytest.raises(ValueError, match="contiguous"):
        write_prefill(
            BatchInputs(**vectors | {"seq_lens": torch.ones(4, dtype=torch.int64, device=device)[::2]}), **rest, longest=1
        )
    with pytest.raises(ValueError, match="misread"):
        write_prefill(BatchInputs(**vectors | {"seq_lens": torch.ones(2, device=device)}), **rest, longest=1)
