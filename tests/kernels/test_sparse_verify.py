"""Rows of requests together: unions exactly, attention against float32; NaN in all that may not be read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import tried
from sparse_rows import LATENT, OVERLAPS, assert_near, over_slots, quantised, selections

from nsa_backend.kernels.selection_union import (
    PARTS,
    SLOTS_OF_A_WORD,
    SelectionUnion,
    marks_width,
    selection_union_torch,
    write_selection_union,
)
from nsa_backend.kernels.sparse_decode_plan import Tile
from nsa_backend.kernels.sparse_decode_torch import sparse_decode_torch
from nsa_backend.kernels.sparse_verify import VerifyMemory, sparse_verify

SMS = 6


def poisoned(memory):
    """The same memory with other calls' rests in all that a call does not expect as it is."""
    for tensor in (memory.union.slots, memory.union.counts):
        tensor.fill_(2**30)
    memory.union.rows.fill_(255)
    memory.parts.out.fill_(float("nan"))
    memory.parts.lse.fill_(float("nan"))
    return memory


def verify(inputs, rows_per_request, *, sms=SMS, spare=0, **options):
    q_nope, _, kv, slots, _ = inputs
    rows, heads, latent = q_nope.shape
    memory = VerifyMemory.allocate(
        rows // rows_per_request + spare, rows_per_request, heads, latent, slots.shape[1], len(kv), sms, q_nope.device
    )  # fmt: skip
    out = sparse_verify(*inputs, 0.1, rows_per_request, poisoned(memory), num_sms=sms, **options)
    assert not memory.marks.any()
    return out


@given(
    requests=st.integers(1, 3), rows=st.integers(1, 8), topk=st.sampled_from([1, 33, 64]), overlap=st.sampled_from(OVERLAPS),
    holes=st.sampled_from([0.0, 0.3, 1.0]), repeats=st.booleans(), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
@tried(100)
def test_a_union_lists_every_chosen_slot_once_with_its_rows(device, requests, rows, topk, overlap, holes, repeats, seed):
    """Twice into one memory, whose marks the first call must have cleared."""
    generator = torch.Generator().manual_seed(seed)
    union = SelectionUnion.allocate(requests + 1, rows, topk, device)
    marks = None
    for _ in range(2):
        slots, num_slots = selections(generator, requests, rows, topk, overlap)
        slots = torch.where(torch.rand(slots.shape, generator=generator) < holes, -1, slots)
        if repeats:
            slots = torch.where(torch.rand(slots.shape, generator=generator) < 0.3, slots[:, :1], slots)
        lens = torch.randint(0, topk + 1, (len(slots),), generator=generator, dtype=torch.int32)
        marks = torch.zeros(requests, marks_width(num_slots), dtype=torch.int32, device=device) if marks is None else marks
        for tensor in (union.slots, union.counts):
            tensor.fill_(-7)
        write_selection_union(slots.to(device), lens.to(device), rows, marks=marks, union=union)
        assert not marks.any()
        assert (union.counts[requests:] == -7).all()
        for request, want in enumerate(selection_union_torch(slots, lens, rows)):
            found = {}
            for part, count in enumerate(union.counts[request].tolist()):
                listed = union.slots[request, part, :count].tolist()
                assert [slot // SLOTS_OF_A_WORD % PARTS for slot in listed] == [part] * count
                assert (union.slots[request, part, count:] == -7).all()
                found |= dict(zip(listed, union.rows[request, part, :count].tolist(), strict=True))
                if not repeats:  # in the order of rows, then of their entries
                    assert listed == [slot for slot in want if slot // SLOTS_OF_A_WORD % PARTS == part]
            assert found == want
            assert int(union.counts[request].sum()) == len(want)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(("rows", "heads", "sms"), [(4, 16, SMS), (4, 8, 1), (6, 8, 12), (3, 24, SMS)])
def test_rows_of_requests_at_any_overlap(device, overlap, rows, heads, sms):
    """A request whose rows lie across topk, one that has almost nothing yet, and one of padding."""
    topk, generator = 40, torch.Generator().manual_seed(rows)
    slots, num_slots = selections(generator, 3, rows, topk, overlap)
    slots[-rows:] = -1
    lens = [*range(topk - rows + 1, topk + 1), *range(rows), *([topk] * (rows - 1)), 0]
    inputs = over_slots(device, slots, lens, num_slots, heads, torch.float32, generator)
    assert_near(verify(inputs, rows, sms=sms), sparse_decode_torch(*inputs, 0.1), torch.float32)


@given(rows=st.integers(1, 6), overlap=st.sampled_from(OVERLAPS), seed=st.integers(0, 2**32 - 1))
@tried(30)
def test_entries_missing_anywhere(device, rows, overlap, seed):
    generator = torch.Generator().manual_seed(seed)
    slots, num_slots = selections(generator, 2, rows, 40, overlap)
    slots = torch.where(torch.rand(slots.shape, generator=generator) < 0.4, -1, slots)
    lens = torch.randint(0, 41, (2 * rows,), generator=generator).tolist()
    inputs = over_slots(device, slots, lens, num_slots, 5, torch.float32, generator)
    assert_near(verify(inputs, rows, logit_cap=3.0), sparse_decode_torch(*inputs, 0.1, 3.0), torch.float32)


@pytest.mark.parametrize(("rows", "heads"), [(4, 16), (6, 8), (1, 8)])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_models_shape(device, half, rows, heads, fp8):
    """Scales of an FP8 cache's quarters far apart; every byte of a slot that no row names is NaN."""
    generator = torch.Generator().manual_seed(heads)
    slots, num_slots = selections(generator, 2, rows, 128, 0.75)
    inputs = over_slots(device, slots, [128] * rows + [7] * rows, num_slots, heads, half, generator, 512, 64)
    q_nope, q_rope, kv, chosen, lens = inputs
    values = kv
    if fp8:
        kv[..., :256] *= 50
        kv, values = quantised(kv, 512, half)
    out = verify((q_nope, q_rope, kv, chosen, lens), rows)
    assert_near(out, sparse_decode_torch(q_nope, q_rope, values, chosen, lens, 0.1), half)


@pytest.mark.parametrize("tile", [Tile(16, 16, 4, 1), Tile(32, 64, 4, 2), Tile(64, 64, 8, 2)])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_other_tiles_compute_the_same_and_equal_inputs_give_equal_bits(device, tile, splits):
    generator = torch.Generator().manual_seed(splits)
    slots, num_slots = selections(generator, 2, 4, 64, 0.5)
    inputs = over_slots(device, slots, [64] * 8, num_slots, 10, torch.float32, generator)
    out = verify(inputs, 4, sms=32, tile=tile, splits=splits)
    assert_near(out, sparse_decode_torch(*inputs, 0.1), torch.float32)
    assert torch.equal(out, verify(inputs, 4, sms=32, tile=tile, splits=splits, spare=3))


def test_what_has_no_room_or_does_not_fit_is_refused(device):
    generator = torch.Generator().manual_seed(0)
    slots, num_slots = selections(generator, 2, 4, 32, 0.5)
    inputs = list(over_slots(device, slots, [32] * 8, num_slots, 4, torch.float32, generator))
    for room in ((1, 4, 32, num_slots), (2, 2, 32, num_slots), (2, 4, 16, num_slots), (2, 4, 32, num_slots // 2)):
        requests, rows, topk, slots_there = room
        memory = VerifyMemory.allocate(requests, rows, 4, LATENT, topk, slots_there, SMS, device)
        with pytest.raises(ValueError, match="the kernel would write past it"):
            sparse_verify(*inputs, 0.1, 4, memory, num_sms=SMS)
    memory = VerifyMemory.allocate(2, 4, 4, LATENT, 32, num_slots, 1, device)
    with pytest.raises(ValueError, match="parts: the kernel would write past it"):
        sparse_verify(*inputs, 0.1, 4, memory, num_sms=SMS)
    with pytest.raises(ValueError, match="the kernel would misread it"):
        sparse_verify(*inputs[:3], inputs[3].long(), inputs[4], 0.1, 4, memory, num_sms=1)
    union = SelectionUnion.allocate(2, 3, 32, device)
    for rows in (0, 3, 9):
        with pytest.raises(ValueError, match="rows would mix"):
            write_selection_union(inputs[3], inputs[4], rows, marks=memory.marks, union=union)
    with pytest.raises(ValueError, match="union must be of 2 requests of 4 rows"):
        write_selection_union(inputs[3], inputs[4], 4, marks=memory.marks, union=union)
    with pytest.raises(ValueError, match="marks must be of 2 requests of 4 rows"):
        write_selection_union(inputs[3], inputs[4], 4, marks=memory.marks[:1], union=memory.union)
