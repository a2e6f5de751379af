"""Ranks that divide the KV of a request: their own slots, their parts of attention, and what the parts are joined by."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from joined_parts import joined
from properties import tried
from sparse_rows import LATENT, assert_near, case

from nsa_backend.kernels.local_slots import local_slots, local_slots_torch
from nsa_backend.kernels.partial_lse import partial_lse, partial_lse_torch
from nsa_backend.kernels.sparse_decode import Parts, sparse_decode
from nsa_backend.kernels.sparse_decode_torch import sparse_decode_torch

NAN, INF = float("nan"), float("inf")


@given(
    rows=st.integers(0, 6),
    topk=st.sampled_from([1, 33, 1024, 2048]),
    ranks=st.sampled_from([1, 2, 4, 8]),
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
@tried(30)
def test_every_slot_is_one_ranks(device, rows, topk, ranks, holes, seed):
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(0, 2**31 - 1, (rows, topk + 3), generator=generator, dtype=torch.int32)
    slots = torch.where(torch.rand(slots.shape, generator=generator) < holes, -1, slots)[:, :topk].to(device)
    found: list[list[int]] = [[] for _ in range(rows)]
    for rank in range(ranks):
        own, counts = local_slots(slots, ranks, rank)
        for got, want in zip((own, counts), local_slots_torch(slots, ranks, rank), strict=True):
            assert torch.equal(got, want)
            assert got.dtype == torch.int32
        for row, (line, count) in enumerate(zip(own.tolist(), counts.tolist(), strict=True)):
            assert line[count:] == [-1] * (topk - count)
            mine = [slot for slot in slots[row].tolist() if slot >= 0 and slot % ranks == rank]
            assert [slot * ranks + rank for slot in line[:count]] == mine
            found[row] += mine
    assert [sorted(line) for line in found] == [sorted(s for s in line if s >= 0) for line in slots.tolist()]


@pytest.mark.parametrize(("ranks", "rank"), [(3, 0), (0, 0), (2, 2), (4, -1)])
def test_a_rank_that_there_is_not(device, ranks, rank):
    with pytest.raises(ValueError, match=f"rank {rank} of {ranks}: slots are divided among a power of two"):
        local_slots(torch.zeros(1, 4, dtype=torch.int32, device=device), ranks, rank)


@pytest.mark.parametrize("spoilt", [lambda t: t.long(), lambda t: t.repeat(1, 2)[:, ::2]])
def test_slots_that_would_be_misread(device, spoilt):
    with pytest.raises(ValueError, match=r"topk_slots must be int32 with dense rows.*misread"):
        local_slots(spoilt(torch.zeros(2, 4, dtype=torch.int32, device=device)), 2, 0)


@given(rows=st.integers(0, 5), heads=st.sampled_from([1, 3, 16, 128]), natural=st.booleans(), seed=st.integers(0, 2**32 - 1))
@tried(30)
def test_rows_without_a_token_weigh_nothing(device, rows, heads, natural, seed):
    """Heads first as FA3 has them, heads padded as FlashMLA has them; of such a row kernels return what they like."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 3, (rows,), generator=generator, dtype=torch.int32)
    lse = 20 * torch.randn(heads + 2, rows, generator=generator)
    lse[:, counts == 0] = torch.tensor([INF, NAN, -INF])[torch.randint(0, 3, (1,), generator=generator)]
    out = torch.randn(rows, heads + 2, 24, generator=generator)
    out[counts == 0] = NAN
    out, lse, counts = out.to(device), lse.T[:, :heads].to(device), counts.to(device)
    padding = out[:, heads:].clone()
    want_out = out.clone()
    want = partial_lse_torch(want_out[:, :heads], lse, counts, natural=natural)
    got = partial_lse(out[:, :heads], lse, counts, natural=natural)
    assert torch.equal(got, want)
    assert got.is_contiguous()
    assert torch.equal(got == -INF, (counts == 0)[:, None].expand(rows, heads))
    assert torch.equal(out[:, :heads], want_out[:, :heads])
    assert torch.equal(out[:, heads:].nan_to_num(7), padding.nan_to_num(7))


def test_what_would_be_weighed_wrongly_is_refused(device):
    out, lse = torch.zeros(2, 3, 8, device=device), torch.zeros(2, 3, device=device)
    counts = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"lse must be float32 \[2, 3\].*others' sums"):
        partial_lse(out, lse.T, counts, natural=True)
    with pytest.raises(ValueError, match=r"counts must be contiguous torch\.int32"):
        partial_lse(out, lse, counts.long(), natural=True)
    with pytest.raises(ValueError, match="out must be dense in its last dimension"):
        partial_lse(out.transpose(1, 2).contiguous().transpose(1, 2), lse, counts, natural=True)


@given(
    lens=st.lists(st.integers(0, 64), min_size=1, max_size=4), heads=st.sampled_from([3, 20]), ranks=st.sampled_from([2, 4, 8]),
    sms=st.sampled_from([1, 132]), holes=st.booleans(), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
@tried(20)
def test_parts_of_ranks_joined_are_attention_over_all_slots(device, lens, heads, ranks, sms, holes, seed):
    """Whole rows and split ones; rows that lie on one rank alone, and on none; NaN in every slot that nobody chose."""
    q_nope, q_rope, kv, slots, lens = case(device, len(lens), heads, 64, lens, torch.float32, seed, holes=holes)
    want = sparse_decode_torch(q_nope, q_rope, kv, slots, lens, 0.1)
    parts = []
    memory = Parts.allocate(len(lens), heads, LATENT, 64, sms, device)
    for rank in range(ranks):
        memory.out.fill_(NAN)
        memory.lse.fill_(NAN)
        lse = torch.full((len(lens), heads), NAN, device=device)
        cache = kv[rank::ranks].contiguous()
        out = sparse_decode(
            q_nope, q_rope, cache, slots, lens, 0.1, num_sms=sms, parts=memory, ranks=ranks, rank=rank, lse=lse
        )  # fmt: skip
        seen = torch.arange(64, device=device) < lens[:, None]
        own, counts = local_slots(torch.where(seen, slots, -1), ranks, rank)
        assert_near(out, sparse_decode_torch(q_nope, q_rope, cache, own, counts, 0.1), torch.float32)
        assert torch.equal(lse == -INF, (counts == 0)[:, None].expand_as(lse))
        parts.append((out, lse))
    assert_near(joined(parts), want, torch.float32)


def test_the_log_sum_exp_is_of_all_scores_in_base_2(device):
    q_nope, q_rope, kv, slots, lens = case(device, 2, 5, 100, [100, 7], torch.float32, 3)
    for sms in (1, 132):
        lse = torch.empty(2, 5, device=device)
        sparse_decode(q_nope, q_rope, kv, slots, lens, 0.1, num_sms=sms, lse=lse)
        for row, length in enumerate(lens.tolist()):
            keys = kv[slots[row, :length].long(), 0]
            scores = 0.1 * torch.cat([q_nope, q_rope], -1)[row] @ keys.T
            torch.testing.assert_close(lse[row], torch.logsumexp(scores, 1) / math.log(2))
    with pytest.raises(ValueError, match=r"lse must be contiguous torch.float32 \[2, 5\]"):
        sparse_decode(q_nope, q_rope, kv, slots, lens, 0.1, num_sms=1, lse=torch.empty(5, 2, device=device).T)
