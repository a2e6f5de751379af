"""The kernel of rows together: on a GPU as it is, and without one through a host compiler and an emulated block."""

from __future__ import annotations

import math

import pytest
import torch
from emulated import Emulated, attend_emulator
from hypothesis import given
from hypothesis import strategies as st
from joined_parts import joined
from properties import tried
from sparse_rows import OVERLAPS, assert_near, over_slots, quantised, selections

from nsa_backend.kernels import sparse_verify as verify
from nsa_backend.kernels.local_slots import local_slots_torch
from nsa_backend.kernels.sparse_decode_torch import sparse_decode_torch

SMS, CELLS = 12, 16384


def verified(inputs, rows_per_request: int, seed: int = 0, *, parts: int | None = None, spare: int = 0) -> torch.Tensor:
    """A call into memory that holds other calls' rests."""
    q_nope, _, kv, slots, _ = inputs
    (rows, heads, _), topk, device = q_nope.shape, slots.shape[1], q_nope.device
    memory = verify.VerifyMemory.allocate(
        rows + spare * rows_per_request, rows_per_request, heads, topk, verify.MOST_PARTS * 100, device
    )
    memory.lists.fill_(2**30 - 1)
    memory.parts.fill_(float("nan"))
    memory.lse.fill_(float("nan"))
    groups = verify.Groups.of(rows_per_request, heads)
    fp8 = kv.dtype == torch.float8_e4m3fn
    launch = None if q_nope.is_cuda else Emulated(groups.rows, heads, topk, seed, fp8=fp8).launch
    count = -(-rows // rows_per_request) * groups.of_request
    num_sms = max(SMS, (parts or 1) * count)
    out = verify.sparse_verify(*inputs, 0.1, rows_per_request, memory, num_sms=num_sms, parts=parts, launch=launch)
    assert not memory.met.any()  # the next call counts from zero
    return out


def stored(inputs, fp8: bool):
    """The same inputs, over FlashMLA's FP8 cache or as they are."""
    packed = quantised(inputs[2].cpu(), 512, torch.bfloat16)[0].to(inputs[2].device) if fp8 else inputs[2]
    return *inputs[:2], packed, *inputs[3:]


def once(slots: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """The same choices with -1 where a row names a slot again."""
    slots = slots.clone()
    for row, end in zip(slots, lens.tolist(), strict=True):
        seen: set[int] = set()
        for i, slot in enumerate(row[:end].tolist()):
            row[i] = -1 if slot in seen else slot
            seen.add(slot)
    return slots


@given(
    shape=st.sampled_from([(4, 16), (6, 16), (4, 8), (8, 8)]), requests=st.integers(1, 2),
    parts=st.sampled_from([None, 1, 2, 7]),
    overlap=st.sampled_from(OVERLAPS), holes=st.sampled_from([0.0, 0.3, 1.0]), repeats=st.booleans(), fp8=st.booleans(),
    seed=st.integers(0, 2**16),
)  # fmt: skip
@tried(12)
def test_rows_of_requests_attend_to_what_each_chose(device, shape, requests, parts, overlap, holes, repeats, fp8, seed):
    """Any lengths, entries that are missing anywhere, slots that a row names twice, and NaN wherever nobody chose."""
    rows, heads = shape
    generator = torch.Generator().manual_seed(seed)
    topk = 128
    slots, num_slots = selections(generator, requests, rows, topk, overlap)
    slots = torch.where(torch.rand(slots.shape, generator=generator) < holes, -1, slots)
    if repeats:
        slots = torch.where(torch.rand(slots.shape, generator=generator) < 0.3, slots[:, :1], slots)
    lens = torch.randint(0, topk + 1, (len(slots),), generator=generator)
    lens[torch.rand(len(lens), generator=generator) < 0.4] = topk
    inputs = stored(over_slots(device, slots, lens.tolist(), num_slots, heads, torch.bfloat16, generator, 512, 64), fp8)
    want = sparse_decode_torch(*(t.cpu() for t in inputs[:3]), once(slots, lens), lens, 0.1)
    assert_near(verified(inputs, rows, seed, parts=parts), want, torch.bfloat16)


def test_every_fp8_value_becomes_its_bfloat16(device):
    """Denormal ones and both zeros, times scales of any size: rounded once, as float32 would be."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = values[values.float().isfinite()].repeat(3)[:512]
    scales = torch.tensor([1e-30, 0.00347, 1.0, 3.3e30])
    rope = torch.zeros(64, dtype=torch.bfloat16)
    pieces = [piece.view(torch.uint8) for piece in (values, scales, rope)]
    kv = torch.cat(pieces).view(torch.float8_e4m3fn).expand(2, 1, -1).contiguous().to(device)
    query = torch.zeros(4, 16, 576, dtype=torch.bfloat16, device=device)  # so that all tokens weigh the same
    slots = torch.tensor([[0, 1] + [-1] * 126] * 4, dtype=torch.int32, device=device)
    lens = torch.full((4,), 128, dtype=torch.int32, device=device)
    out = verified((query[..., :512], query[..., 512:], kv, slots, lens), 4, parts=1)
    want = (values.float().unflatten(0, (4, 128)) * scales[:, None]).flatten().bfloat16()
    assert torch.equal(out.cpu(), want.expand_as(out))


@pytest.mark.parametrize("parts", [1, 4])
def test_equal_inputs_give_equal_bits_whatever_thread_comes_first(device, parts):
    """And in whatever memory."""
    generator = torch.Generator().manual_seed(parts)
    slots, num_slots = selections(generator, 1, 4, 128, 0.5)
    inputs = over_slots(device, slots, [128, 127, 128, 40], num_slots, 16, torch.bfloat16, generator, 512, 64)
    first = verified(inputs, 4, 1, parts=parts)
    assert all(torch.equal(first, verified(inputs, 4, seed, parts=parts, spare=seed)) for seed in (2, 3))


def test_all_slots_of_a_request_in_one_part(device):
    """A hash that sends everything to one block leaves the others without a token; theirs weigh nothing."""
    parts = 4
    slots = [s for s in range(20000) if (s * 0x9E3779B1 % 2**32) * parts >> 32 == 1][:512]
    generator = torch.Generator().manual_seed(9)
    chosen = torch.tensor(slots).view(4, 128).int()
    inputs = over_slots(device, chosen, [128] * 4, max(slots) + 1, 16, torch.bfloat16, generator, 512, 64)
    want = sparse_decode_torch(*(t.cpu() for t in inputs), 0.1)
    assert_near(verified(inputs, 4, parts=parts), want, torch.bfloat16)


def test_slots_that_meet_in_one_cell_of_the_hash_table(device):
    """Also where the next cells are those of others, and at the table's end, which goes on at its beginning."""
    cells: dict[int, list[int]] = {}
    for slot in range(30000):
        cells.setdefault((slot * 0x85EBCA6B % 2**32) * CELLS >> 32, []).append(slot)
    crowded = [slot for cell in [*range(CELLS - 30, CELLS), *range(40)] for slot in cells.get(cell, [])]
    assert len(crowded) >= 100
    generator = torch.Generator().manual_seed(3)
    chosen = torch.stack([torch.tensor(crowded)[torch.randperm(len(crowded), generator=generator)[:100]] for _ in range(4)])
    chosen = torch.nn.functional.pad(chosen, (0, 28), value=-1).int()
    inputs = over_slots(device, chosen, [128] * 4, 30000, 16, torch.bfloat16, generator, 512, 64)
    want = sparse_decode_torch(*(t.cpu() for t in inputs), 0.1)
    assert_near(verified(inputs, 4, parts=2), want, torch.bfloat16)


def test_slots_further_apart_than_a_map_has_bits(device):
    """Windows follow the slots: at their edges, far behind the one before, and with rows that have none there."""
    window, apart = 155648, 400000
    near = torch.arange(40)
    chosen = torch.cat([near, near + window - 20, near + apart - 40])
    generator = torch.Generator().manual_seed(4)
    slots = torch.stack([chosen[torch.randperm(len(chosen), generator=generator)] for _ in range(8)])
    slots[2] = torch.where(slots[2] < 40, slots[2], -1)
    slots = torch.nn.functional.pad(slots, (0, 8), value=-1).int()
    kv = torch.empty(apart, 1, 576, dtype=torch.bfloat16)  # a page of memory is taken where a slot is chosen
    kv[chosen] = torch.randn(len(chosen), 1, 576, generator=generator).bfloat16()
    query = torch.randn(8, 8, 576, generator=generator).bfloat16().to(device)
    lens = torch.full((8,), 128, dtype=torch.int32, device=device)
    inputs = query[..., :512], query[..., 512:], kv.to(device), slots.to(device), lens
    want = sparse_decode_torch(*(t.cpu() for t in inputs), 0.1)
    assert_near(verified(inputs, 8, parts=1), want, torch.bfloat16)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rising", [True, False])
def test_scores_that_pass_all_before_them_by_far(device, rising, parts):
    """From one step to the next they grow or fall by more than float32 has powers of two."""
    generator = torch.Generator().manual_seed(5)
    slots = torch.arange(512).view(4, 128).int()
    _, q_rope, kv, slots, lens = over_slots(device, slots, [128] * 4, 512, 16, torch.bfloat16, generator, 512, 64)
    along = torch.linspace(-400, 400, 512) if rising else torch.linspace(400, -400, 512)
    kv[:, 0, 0] = along.to(kv)
    q_nope = torch.zeros(4, 16, 512, dtype=torch.bfloat16, device=device)
    q_nope[..., 0] = 10
    inputs = q_nope, torch.zeros_like(q_rope), kv, slots, lens
    want = sparse_decode_torch(*(t.cpu() for t in inputs), 0.1)
    assert_near(verified(inputs, 4, parts=parts), want, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("ranks", "fp8"), [(2, False), (2, True), pytest.param(8, False, marks=pytest.mark.slow)])
def test_parts_of_ranks_joined_are_attention_over_all_slots(device, ranks, fp8, parts):
    """Each rank tells its own slots from the others', and the log-sum-exp of what it has: -inf where that is nothing."""
    generator = torch.Generator().manual_seed(ranks)
    slots, num_slots = selections(generator, 1, 4, 128, 0.5)
    slots[3] = torch.where(slots[3] % ranks == 1, slots[3], -1)  # a row that lies on one rank
    num_slots += -num_slots % ranks
    q_nope, q_rope, kv, slots, lens = over_slots(
        device, slots, [128, 90, 0, 128], num_slots, 16, torch.bfloat16, generator, 512, 64
    )
    kv, values = quantised(kv.cpu(), 512, torch.bfloat16) if fp8 else (kv, kv.float())
    kv, found = kv.to(device), []
    for rank in range(ranks):
        memory = verify.VerifyMemory.allocate(4, 4, 16, 128, SMS, device)
        memory.lse.fill_(float("nan"))
        lse = torch.full((4, 16), float("nan"), device=device)
        launch = None if kv.is_cuda else Emulated(4, 16, 128, rank, ranks, rank, fp8=fp8).launch
        cache = kv[rank::ranks].contiguous()
        out = verify.sparse_verify(
            q_nope, q_rope, cache, slots, lens, 0.1, 4, memory, num_sms=SMS, ranks=ranks, rank=rank, lse=lse, parts=parts,
            launch=launch,
        )  # fmt: skip
        own, counts = local_slots_torch(torch.where(torch.arange(128) < lens.cpu()[:, None], slots.cpu(), -1), ranks, rank)
        for row, count in enumerate(counts.tolist()):
            keys = values[rank::ranks][own[row, :count].long(), 0].bfloat16().float().cpu()  # as tensor cores have them
            scores = 0.1 * torch.cat([q_nope, q_rope], -1)[row].float().cpu() @ keys.T
            torch.testing.assert_close(lse[row].cpu(), torch.logsumexp(scores, 1) / math.log(2), atol=5e-3, rtol=0)
        assert (out[counts == 0] == 0).all()
        found.append((out.float(), lse))
    want = sparse_decode_torch(*(t.cpu() for t in (q_nope, q_rope, kv, slots, lens)), 0.1)
    assert_near(joined(found).bfloat16(), want, torch.bfloat16)


@pytest.mark.parametrize(("rows", "per_request"), [(7, 4), (9, 6)])
def test_the_last_request_may_have_fewer_rows(device, rows, per_request):
    """As a prompt's rows are taken together, whose number is any."""
    generator = torch.Generator().manual_seed(rows)
    slots, num_slots = selections(generator, 1, rows, 128, 0.75)
    inputs = over_slots(device, slots, [128] * rows, num_slots, 16, torch.bfloat16, generator, 512, 64)
    want = sparse_decode_torch(*(t.cpu() for t in inputs), 0.1)
    assert_near(verified(inputs, per_request), want, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "heads"), [(4, 16), (6, 16), (4, 8), (8, 8), (2, 32)])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("fp8", [False, True])
def test_the_models_rows_at_any_overlap(rows, heads, overlap, fp8):
    """2048 slots a row; rows of one request lie across 2048 tokens, another has hardly any, a third is padding."""
    generator = torch.Generator().manual_seed(rows)
    slots, num_slots = selections(generator, 3, rows, 2048, overlap)
    slots[-rows:] = -1
    lens = [*range(2049 - rows, 2049), *range(rows), *([1] * rows)]
    inputs = stored(over_slots("cuda", slots, lens, num_slots, heads, torch.bfloat16, generator, 512, 64), fp8)
    want = sparse_decode_torch(*(t.cpu() for t in inputs), 0.1)
    for parts in (1, None):
        assert_near(verified(inputs, rows, parts=parts), want, torch.bfloat16)


def test_what_does_not_fit_is_refused(device):
    generator = torch.Generator().manual_seed(0)
    slots, num_slots = selections(generator, 2, 4, 128, 0.5)
    q_nope, q_rope, kv, slots, lens = over_slots(device, slots, [128] * 8, num_slots, 16, torch.bfloat16, generator, 512, 64)
    memory = verify.VerifyMemory.allocate(4, 4, 16, 128, 1, device)
    with pytest.raises(ValueError, match="the kernel would write past it"):
        verify.sparse_verify(q_nope, q_rope, kv, slots, lens, 0.1, 4, memory, num_sms=1)
    with pytest.raises(ValueError, match="at most 16777215 and bfloat16"):
        verify.sparse_verify(q_nope.half(), q_rope.half(), kv.half(), slots, lens, 0.1, 4, memory, num_sms=1)
    with pytest.raises(ValueError, match="written for a latent of 512"):
        verify.sparse_verify(q_nope[..., :448], q_rope, kv[..., 64:], slots, lens, 0.1, 4, memory, num_sms=1)
    with pytest.raises(ValueError, match="the kernel would misread it"):
        verify.sparse_verify(q_nope, q_rope, kv, slots.long(), lens, 0.1, 4, memory, num_sms=1)
    assert "a tile has 64 heads" in verify.problem(128, 512, 64, 2048, 4)
    memory = verify.VerifyMemory.allocate(8, 4, 16, 128, 8, device)
    with pytest.raises(ValueError, match="2 groups in 4 parts wait for each other, and 7 SMs"):
        verify.sparse_verify(q_nope, q_rope, kv, slots, lens, 0.1, 4, memory, num_sms=7, parts=4)
    with pytest.raises(ValueError, match="256 ranks divide slots: it tells those of up to 128"):
        verify.sparse_verify(q_nope, q_rope, kv, slots, lens, 0.1, 4, memory, num_sms=8, ranks=256)
    assert "room for 16384" in verify.problem(8, 512, 64, 4096, 8)
    assert "takes up to 8192" in verify.problem(64, 512, 64, 8193, 1)
    assert verify.problem(16, 512, 64, 2048, 4) is None


def test_rows_are_divided_evenly_among_tiles():
    assert verify.Groups.of(4, 16) == verify.Groups(4, 1)
    assert verify.Groups.of(6, 16) == verify.Groups(3, 2)
    assert verify.Groups.of(9, 8) == verify.Groups(5, 2)
    assert verify.Groups.of(3, 64) == verify.Groups(1, 3)


def test_as_many_parts_as_fill_the_gpu_once():
    assert [verify.parts_of(groups, 132) for groups in (1, 8, 16, 17, 33, 34, 66, 67, 2048)] == [16, 16, 8, 7, 4, 3, 2, 1, 1]


@pytest.mark.parametrize(("max_rows", "per_request"), [(30, 4), (64, 4), (61, 6), (7, 8)])
def test_memory_is_for_every_call_up_to_the_largest(max_rows, per_request):
    """Fewer requests may take more of it: they are divided into more parts."""
    shape = per_request, 16, 128, 24
    memory = verify.VerifyMemory.allocate(max_rows, *shape, "cpu")
    assert all(memory.hold(verify.Need.of(rows, *shape)) for rows in range(1, max_rows + 1))
    assert not memory.hold(verify.Need.of(100 * max_rows, *shape))


def test_it_is_compiled_for_the_device_of_this_rank(monkeypatch):
    """SGLang's ranks call theirs cuda, without a number."""
    compiled = []
    monkeypatch.setattr(verify, "attend_of", lambda source, *shape, fp8: compiled.append((source, *shape, fp8)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    verify.compile_ahead(4, 16, 2048, torch.device("cuda"))
    verify.compile_ahead(4, 16, 2048, torch.device("cuda:1"), fp8=True)
    shape = 4, 16, 2048
    assert set(compiled) == {
        (verify.WHOLE, *shape, 3, 1, 0, False),
        (verify.PARTED, *shape, 3, 1, 0, False),
        (verify.PARTED, *shape, 1, 1, 0, True),
    }


@pytest.mark.parametrize("source", [verify.PARTED, verify.WHOLE], ids=lambda source: source.stem)
def test_the_launch_reserves_what_the_source_takes(source):
    """Its own bytes, and what it may leave out so that panels begin at a multiple of 1024."""
    assert attend_emulator(source, 4, 16, 128, 1, 0).shared_bytes() + 1023 <= verify.SHARED_BYTES <= 232448


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "heads"), [(4, 16), (3, 16), (8, 8), (2, 32)])
@pytest.mark.parametrize(("parts", "fp8"), [(1, False), (2, False), (2, True)])
def test_it_compiles_for_hopper_with_all_in_registers(rows, heads, parts, fp8):
    from nsa_backend.kernels.cuda_source import compiled

    _, said = compiled(verify.source_of(parts, fp8=fp8), verify.constants(rows, heads, 2048, fp8=fp8))
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "serialized" not in said  # products that the compiler would make wait for each other
