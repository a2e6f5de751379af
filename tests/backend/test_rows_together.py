"""sparse_verify and sparse_prefill as the backend calls them: their kernel on an emulated GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated import Emulated
from joined_parts import joined
from sparse_rows import quantised

from nsa_backend.attention import interface, sparse_decode, sparse_prefill, sparse_verify
from nsa_backend.attention.context_part import ContextPart
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.attention.torch_reference import TorchSparseAttention
from nsa_backend.config import AttentionConfig
from nsa_backend.kernels import sparse_verify as kernel

HEADS, TOPK, SLOTS = 16, 128, 400
CONFIG = AttentionConfig(device_sm=90, num_heads=HEADS, kv_cache_dtype=torch.bfloat16, index_topk=TOPK)


def given(rows: int, rows_per_request: int = 1) -> SparseInputs:
    """Rows of lengths up to 128, of which one has none; NaN in every slot that nobody chose."""
    generator = torch.Generator().manual_seed(rows)
    lens = torch.randint(1, TOPK + 1, (rows,), generator=generator, dtype=torch.int32)
    lens[rows // 2] = 0
    chosen = torch.stack([torch.randperm(SLOTS // 2, generator=generator)[:TOPK] for _ in range(rows)]).int()
    chosen[torch.arange(TOPK) >= lens[:, None]] = -1
    kv = torch.full((SLOTS, 1, 576), float("nan")).bfloat16()
    used = chosen[chosen >= 0].unique().long()
    kv[used] = torch.randn(len(used), 1, 576, generator=generator).bfloat16()
    query = torch.randn(rows, HEADS, 576, generator=generator).bfloat16()
    return SparseInputs(
        q_nope=query[..., :512], q_rope=query[..., 512:], kv_cache=kv, topk_slots=chosen, nsa_cache_seqlens=lens,
        nsa_cu_seqlens_q=torch.arange(rows + 1), nsa_cu_seqlens_k=None, sm_scale=0.07, logit_cap=0.0,
        rows_per_request=rows_per_request,
    )  # fmt: skip


def in_fp8(inputs: SparseInputs) -> tuple[SparseInputs, SparseInputs]:
    """The same over FlashMLA's FP8 cache, and over what that holds."""
    packed, values = quantised(inputs.kv_cache, 512, torch.bfloat16)
    return replace(inputs, kv_cache=packed), replace(inputs, kv_cache=values)


def assert_right(out: torch.Tensor, inputs: SparseInputs) -> None:
    want = TorchSparseAttention().forward(inputs).float()
    assert out.isfinite().all()
    assert (out.float() - want).norm() <= 5e-3 * want.norm()


@pytest.fixture
def kernels(monkeypatch):
    """By rows of a tile, what runs in place of the GPU's."""
    found: dict[int, Emulated] = {}
    monkeypatch.setattr(
        kernel,
        "attend_of",
        lambda source, rows, heads, topk, *rest, fp8: found.setdefault(rows, Emulated(rows, heads, topk, fp8=fp8)),
    )
    monkeypatch.setattr(sparse_verify, "_memories", {})
    monkeypatch.setattr(sparse_prefill, "_memories", {})
    return found


@pytest.mark.parametrize("rows", [3, 20, 37])
def test_a_prompt_goes_in_pieces_of_whole_tiles(kernels, rows):
    """One SM has eight tiles of four rows at most in a launch; of the last tile there may be fewer rows."""
    attention = sparse_prefill.build(replace(CONFIG, prefill=True))
    attention._num_sms = 1
    inputs = given(rows)
    assert_right(attention.forward(inputs), inputs)
    assert kernels[4].grids == {3: [(1, 1)], 20: [(1, 5)], 37: [(1, 8), (1, 2)]}[rows]
    (kept,) = sparse_prefill._memories.values()
    of_drafts = sparse_prefill.build(attention._config)
    of_drafts._num_sms = 1
    of_drafts.forward(inputs)
    (still,) = sparse_prefill._memories.values()
    assert still is kept
    room = torch.full((rows, HEADS, 512), float("nan")).bfloat16()
    assert attention.forward(replace(inputs, out=room)) is room
    assert_right(room, inputs)


def test_a_rank_without_a_row(kernels):
    """As under DP attention, while others prefill."""
    attention = sparse_prefill.build(replace(CONFIG, prefill=True))
    inputs = given(3)
    none = {name: getattr(inputs, name)[:0] for name in ("q_nope", "q_rope", "topk_slots", "nsa_cache_seqlens")}
    assert attention.forward(replace(inputs, **none)).shape == (0, HEADS, 512)


@pytest.mark.parametrize("prefill", [False, True])
def test_an_fp8_cache_is_read_as_it_is(kernels, monkeypatch, prefill):
    monkeypatch.setattr(sparse_verify, "FEWEST_GROUPS", dict.fromkeys(sparse_verify.FEWEST_GROUPS, 2))
    config = replace(CONFIG, num_draft_tokens=4, prefill=prefill, kv_cache_dtype=torch.float8_e4m3fn)
    module = sparse_prefill if prefill else sparse_verify
    assert not module.problems(config)
    attention = module.build(config)
    attention._on_gpu, attention._num_sms = True, 4
    inputs, exact = in_fp8(given(8, rows_per_request=1 if prefill else 4))
    assert_right(attention.forward(inputs), exact)
    assert kernels[4].grids


@pytest.mark.parametrize(("requests", "together"), [(4, True), (3, False)])
def test_few_requests_are_left_to_sparse_decode(kernels, monkeypatch, requests, together):
    """And memory is kept for as many rows as are reserved."""
    monkeypatch.setattr(sparse_verify, "FEWEST_GROUPS", {torch.bfloat16: 4})
    attention = sparse_verify.build(replace(CONFIG, num_draft_tokens=4))
    attention._on_gpu, attention._num_sms = True, 8
    attention.reserve(20)
    alone = []
    monkeypatch.setattr(sparse_verify.SparseDecode, "forward", lambda self, inputs: alone.append(inputs))
    inputs = given(4 * requests, rows_per_request=4)
    out = attention.forward(inputs)
    if together:
        assert_right(out, inputs)
        assert kernels[4].grids == [(2, 4)]
        ((memory,),) = sparse_verify._memories.values()
        assert memory.hold(kernel.Need.of(20, 4, HEADS, TOPK, 8))
    assert bool(alone) != together


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_rows_together_on_ranks_that_divide_their_kv(kernels, monkeypatch, fp8, prefill):
    """Each rank's part, joined as SGLang joins them, is what one rank gives; a rank has a kernel of its own."""
    ranks = 2
    monkeypatch.setattr(sparse_verify, "FEWEST_GROUPS", dict.fromkeys(sparse_verify.FEWEST_GROUPS, 2))
    monkeypatch.setattr(
        kernel, "attend_of", lambda _, rows, heads, topk, device, *rank, fp8: Emulated(rows, heads, topk, 0, *rank, fp8=fp8)
    )
    inputs = exact = given(8, rows_per_request=1 if prefill else 4)
    known, parts = replace(CONFIG, num_draft_tokens=4, prefill=prefill, context_ranks=ranks), []
    if fp8:
        known, (inputs, exact) = replace(known, kv_cache_dtype=torch.float8_e4m3fn), in_fp8(inputs)
    for rank in range(ranks):
        config = replace(known, context_rank=rank)
        attention = (sparse_prefill if prefill else sparse_verify).build(config)
        attention._on_gpu, attention._num_sms = True, 4
        mine = replace(inputs, kv_cache=inputs.kv_cache[rank::ranks].contiguous())
        out, lse = attention.forward_part(mine, ContextPart(ranks, rank).at(inputs.topk_slots, None, 0))
        parts.append((out.float(), lse))
    assert_right(joined(parts), exact)


def test_few_requests_of_divided_kv_are_left_to_sparse_decode(kernels, monkeypatch):
    attention = sparse_verify.build(replace(CONFIG, num_draft_tokens=4, context_ranks=2))
    attention._on_gpu = True
    monkeypatch.setattr(sparse_verify.SparseDecode, "forward_part", lambda self, inputs, part: "alone")
    assert attention.forward_part(given(8, rows_per_request=4), ContextPart(2, 0)) == "alone"


def test_what_pads_to_other_rows_is_left_to_sparse_decode(kernels, monkeypatch):
    attention = sparse_verify.build(replace(CONFIG, num_draft_tokens=4))
    attention._on_gpu = True
    monkeypatch.setattr(sparse_verify.SparseDecode, "forward", lambda self, inputs: "alone")
    assert attention.forward(given(34, rows_per_request=4)) == "alone"


def test_backends_of_a_process_share_memory(kernels):
    """Target and draft steps run one after the other."""
    kinds = [sparse_decode.build(CONFIG), sparse_verify.build(replace(CONFIG, num_draft_tokens=4))]
    assert len({kind._parts.out.data_ptr() for kind in kinds}) == 1
    assert sparse_decode.build(replace(CONFIG, num_heads=8))._parts.out.data_ptr() != kinds[0]._parts.out.data_ptr()


def test_without_nvrtc_neither_is_offered(monkeypatch):
    monkeypatch.setattr(interface, "find_spec", lambda name: None)
    for kv_cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        (reason,) = sparse_verify.problems(replace(CONFIG, kv_cache_dtype=kv_cache_dtype))
        assert "pip install cuda-python" in reason
    (reason,) = sparse_prefill.problems(replace(CONFIG, prefill=True))
    assert "pip install cuda-python" in reason
