"""A request that a decode server retracts and resumes, through SGLang's own pools and allocator: its draft KV comes back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kv_pools import PAGE, contents, dsa_pool, scribble
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from nsa_backend.adapters import retraction
from nsa_backend.adapters.installed import adapter


@pytest.fixture
def pools(monkeypatch, one_rank):
    """(allocator, target pool, draft pool), on slots of one numbering."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    target, draft = dsa_pool(layers=2, seed=1), dsa_pool(layers=1, seed=2)
    allocator = PagedTokenToKVPoolAllocator(
        target.size, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=target, need_sort=False
    )
    return allocator, target, draft


SLOTS = torch.arange(2 * PAGE, 4 * PAGE + 10)
OTHERS = torch.arange(5 * PAGE, 7 * PAGE + 10)
PAGES, OTHER_PAGES = [2, 3, 4], [5, 6, 7]


def retract_and_resume(allocator, *pools) -> None:
    """A request at SLOTS is copied to the host, its slots are given to others, and it comes back at OTHERS."""
    copy = allocator.get_cpu_copy(SLOTS)
    for pool in pools:
        scribble(pool)
    allocator.load_cpu_copy(copy, OTHERS)


def test_without_the_plugin_the_draft_comes_back_as_what_others_wrote(pools):
    allocator, target, draft = pools
    before = contents(target, SLOTS, PAGES), contents(draft, SLOTS, PAGES)
    retract_and_resume(allocator, target, draft)
    assert contents(target, OTHERS, OTHER_PAGES) == before[0]
    assert contents(draft, OTHERS, OTHER_PAGES) != before[1]


def test_kv_and_index_keys_of_both_models_come_back(pools):
    allocator, target, draft = pools
    retraction.keep_draft_kv(allocator, draft)
    before = contents(target, SLOTS, PAGES), contents(draft, SLOTS, PAGES)
    retract_and_resume(allocator, target, draft)
    assert (contents(target, OTHERS, OTHER_PAGES), contents(draft, OTHERS, OTHER_PAGES)) == before


@pytest.mark.parametrize(("mode", "kept"), [("decode", True), ("prefill", False), ("null", False)])
def test_a_decode_server_alone_keeps_it(pools, monkeypatch, mode, kept):
    """A server of both roles, or of prefill, drops a retracted request's KV and computes it again."""
    allocator, _, draft = pools
    module = __import__(type(adapter).__module__, fromlist=["get_server_args"])
    monkeypatch.setattr(module, "get_server_args", lambda: SimpleNamespace(disaggregation_mode=mode))
    adapter.keep_draft_kv(SimpleNamespace(token_to_kv_pool_allocator=allocator, token_to_kv_pool=draft))
    assert isinstance(allocator.get_cpu_copy(SLOTS), retraction.CopyWithDraft) == kept


def test_drafts_in_the_target_s_own_pool_are_in_its_copy(pools):
    allocator, target, _ = pools
    retraction.keep_draft_kv(allocator, target)
    assert not isinstance(allocator.get_cpu_copy(SLOTS), retraction.CopyWithDraft)
