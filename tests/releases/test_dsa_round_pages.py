"""What SGLang prepares before a round, around its own function: only rounds that take pages copy anything to the GPU."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.speculative import eagle_utils

from nsa_backend.adapters.dsa.rounds import pages

PAGE, RESERVE = 64, 8
DEVICE = "meta"  # stands for the GPU: a tensor says whether it was copied there
REQUESTS = st.lists(st.tuples(st.integers(1, 700), st.integers(0, 3)), min_size=1, max_size=8)
"""Tokens of each request, and pages that it has beyond those of its tokens."""


@pytest.fixture(scope="module", autouse=True)
def sglang():
    with pytest.MonkeyPatch.context() as patch:
        for module in (allocation_sizing, eagle_utils):
            patch.setattr(module, "get_alloc_reserve_per_decode", lambda: RESERVE)
        patch.setattr(eagle_utils, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=1))
        yield


def sglangs(batch: SimpleNamespace) -> None:
    """Its own function: in a process where rounds were built, the module's is wrapped already."""
    inspect.unwrap(eagle_utils.eagle_prepare_for_decode)(batch)


def a_batch(requests: list[tuple[int, int]], penalties: bool = False) -> SimpleNamespace:
    reqs = []
    for tokens, more in requests:
        allocated = (-(-tokens // PAGE) + more) * PAGE
        reqs.append(SimpleNamespace(kv=ReqKvInfo(kv_committed_len=tokens, kv_allocated_len=allocated), decode_batch_idx=3))
    return SimpleNamespace(
        reqs=reqs,
        device=DEVICE,
        seq_lens_cpu=None,
        sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=penalties)),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=PAGE),
        tree_cache=object(),
        req_to_token_pool=object(),
        req_pool_indices=torch.arange(len(reqs), device=DEVICE),
        maybe_evict_swa=lambda: None,
        cumulate_penalty_output_tokens=lambda: None,
    )


def left(batch: SimpleNamespace, prepare) -> tuple:
    """What a preparation leaves on the host, and the lengths that it gives the allocator: (state, devices, tokens)."""
    given = []

    def allocate(*arguments, reqs, cur_kv_lens, cur_kv_lens_cpu, nxt_kv_lens, nxt_kv_lens_cpu, num_needed_tokens, **_):
        given.append(({cur_kv_lens.device.type, nxt_kv_lens.device.type}, num_needed_tokens, nxt_kv_lens_cpu.tolist()))
        for req, length in zip(reqs, nxt_kv_lens_cpu.tolist(), strict=True):
            req.kv.kv_allocated_len = max(req.kv.kv_allocated_len, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle_utils, "alloc_for_spec_decode", allocate)
        prepare(batch)
    ((devices, tokens, lengths),) = given
    requests = [(req.kv.kv_committed_len, req.kv.kv_allocated_len, req.decode_batch_idx) for req in batch.reqs]
    return (requests, lengths, batch.max_seq_len_host, batch.device), devices, tokens


@given(requests=REQUESTS, penalties=st.booleans())
def test_the_host_keeps_what_sglang_keeps(requests, penalties):
    theirs, devices, tokens = left(a_batch(requests, penalties), sglangs)
    assert devices == {DEVICE}
    ours, devices, again = left(a_batch(requests, penalties), lambda batch: pages.prepare(sglangs, batch))
    assert (ours, again) == (theirs, tokens)
    assert devices == ({DEVICE} if tokens or penalties else {"cpu"})


def test_a_request_of_three_drafts_takes_a_page_every_16_rounds():
    batch, copied = a_batch([(5 * PAGE - RESERVE, 0)]), 0
    for _ in range(160):
        batch.reqs[0].kv.kv_committed_len += 4
        _, devices, _ = left(batch, lambda batch: pages.prepare(sglangs, batch))
        copied += DEVICE in devices
    assert copied == 10


def test_a_failure_leaves_the_batch_its_device():
    batch = a_batch([(64, 2)])

    def fails(batch):
        assert batch.device == "cpu"
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        pages.prepare(fails, batch)
    assert batch.device == DEVICE


def test_sglang_calls_what_is_hooked():
    """By the module's name, at the time of the call; and the allocator reads lengths on the GPU only where pages are needed."""
    from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
    from sglang.srt.speculative import spec_utils

    called = inspect.getsource(spec_utils.spec_prepare_for_decode)
    assert "from sglang.srt.speculative.eagle_utils import eagle_prepare_for_decode" in called
    request = a_batch([(64, 2)]).reqs[0]
    request.kv.kv_allocated_len = 64
    host = torch.tensor([192], dtype=torch.int32)
    alloc_for_spec_decode(
        None, None, reqs=[request], req_pool_indices=None, cur_kv_lens=None, cur_kv_lens_cpu=host,
        nxt_kv_lens=None, nxt_kv_lens_cpu=host, num_needed_tokens=0,
    )  # fmt: skip
    assert request.kv.kv_allocated_len == 192
