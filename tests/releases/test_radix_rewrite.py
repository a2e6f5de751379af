"""The radix cache rewrites columns of a live request while a round may read them.

SGLang's own cache, allocator and request pool: another request with the same prefix was cached first, so the tree has slots of
its own for it, and the columns of the second request are turned to those.
"""

import ast
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from installed_source import ROOT
from sglang.srt.mem_cache import allocator as allocators
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

PAGE, PAGES, WIDTH = 64, 40, 640


def radix_cache(is_eagle: bool):
    """The release's radix cache of full attention and its page allocator, on the CPU."""
    pool = ReqToTokenPool(8, WIDTH, "cpu", enable_memory_saver=False)
    kvcache = SimpleNamespace(register_layer_transfer_counter=None)
    allocator = allocators.PagedTokenToKVPoolAllocator(PAGES * PAGE, PAGE, torch.float32, "cpu", kvcache, False)
    options = {"disable": False, "req_to_token_pool": pool, "token_to_kv_pool_allocator": allocator, "page_size": PAGE}
    from sglang.srt.mem_cache.radix_cache import RadixCache as Cache

    if not hasattr(Cache, "cache_unfinished_req"):
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache as Cache

        options["tree_components"] = (ComponentType.FULL,)
    return Cache(CacheInitParams(**options, is_eagle=is_eagle)), pool, allocator


class Request:
    """A prefilled request: its tokens, and pages of its own for them."""

    def __init__(self, cache, pool, row: int, tokens: list[int], pages: list[int]):
        self.row, self.tokens = row, tokens
        slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()[: len(tokens)]
        pool.req_to_token[row, : len(tokens)] = slots.int()
        ids = array("q", tokens)
        root = None if hasattr(cache, "lock") else cache.root_node
        kv = SimpleNamespace(req_pool_idx=row, cache_protected_len=0, cache_inserted_len=0)
        self.req = SimpleNamespace(
            rid=str(row), req_pool_idx=row, kv=kv, fill_ids=ids, get_fill_ids=lambda: ids, full_untruncated_fill_ids=ids,
            origin_input_ids=ids, extra_key=None, cache_salt=None, cache_protected_len=0, last_node=root, prefix_indices=None,
            priority=0, session=None, session_id=None, kv_rotation_base=None, finished=lambda: False, lock=None,
        )  # fmt: skip
        self.kv = {slot: tuple(tokens[: column + 2]) for column, slot in enumerate(slots.tolist())}

    def cached(self, cache) -> None:
        """As the scheduler does once the prefill's result is there; a round with this request may be running then."""
        if hasattr(cache, "cache_unfinished_req"):
            cache.cache_unfinished_req(self.req)
        else:
            cache.checkpoint(self.req, up_to=len(self.tokens))


def page_sets(allocator) -> set[int]:
    return set(allocator.free_pages.tolist())


@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize(("shared", "length"), [(200, 230), (256, 256), (40, 300), (300, 320)])
def test_a_rewritten_column_points_to_the_same_tokens_kv(is_eagle, shared, length):
    """Whichever of the two a round reads, column by column, it finds KV of that position behind the very same tokens."""
    cache, pool, allocator = radix_cache(is_eagle)
    rng = np.random.default_rng(shared + length)
    prefix = rng.integers(1, 1000, shared).tolist()
    first, second = (
        Request(cache, pool, row, prefix + rng.integers(1000 * row, 1000 * row + 999, length - shared).tolist(), pages)
        for row, pages in ((1, [3, 1, 4, 15, 9]), (2, [2, 6, 5, 35, 8]))
    )
    allocator.free_pages = torch.tensor([page for page in range(1, PAGES + 1) if page >= 20 and page != 35])
    before, free = pool.req_to_token[2, :length].clone(), page_sets(allocator)
    first.cached(cache)
    assert pool.req_to_token[1, :length].tolist() == list(first.kv)  # nobody was there before it
    second.cached(cache)
    after = pool.req_to_token[2, :length]
    written = first.kv | second.kv
    changed = [column for column in range(length) if before[column] != after[column]]
    for column in range(length):
        # Draft KV depends on the next token too, which is why SGLang's keys are pairs of tokens with EAGLE.
        reach = column + 1 + is_eagle
        for slot in (int(before[column]), int(after[column])):
            assert written[slot][:reach] == tuple(second.tokens[:reach])
    whole_pages = max(0, shared - is_eagle) // PAGE * PAGE
    assert changed == list(range(whole_pages))
    assert page_sets(allocator) - free == {int(before[column]) // PAGE for column in changed}  # its duplicates, and no others
    assert not {int(slot) // PAGE for slot in after} & page_sets(allocator)


def test_freed_slots_are_written_by_forwards_behind_the_running_one():
    """The duplicates are free at once, while the running round may still read them: every forward is launched on one stream."""
    tree = ast.parse((ROOT / "managers/scheduler.py").read_text())
    (run_batch,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "run_batch"]
    overlapped = [
        node
        for node in ast.walk(run_batch)
        if isinstance(node, ast.With) and any("forward_stream_ctx" in ast.unparse(item) for item in node.items)
    ]
    launches = [
        node
        for node in ast.walk(run_batch)
        if isinstance(node, ast.Call) and "forward_batch_generation" in ast.unparse(node.func)
    ]
    assert overlapped
    assert launches
    inside = {id(call) for block in overlapped for call in ast.walk(block)}
    guarded = [call for call in launches if id(call) in inside]
    assert guarded, "the overlapped branch launches its forward somewhere else"
    for block in overlapped:
        assert "self.forward_stream.wait_stream(self.schedule_stream)" in ast.unparse(block)
