"""What SGLang does on the host before every round, where no request needs another page: nothing is copied to the GPU then.

SGLang counts on the host how far each request's KV slots reach and how far the next round may go, copies both to the GPU, and
there a kernel reads them, but only where some request needs a page. A request of N = 3 takes one about every 16th round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PREPARE = "sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode"


def prepare(original: Callable, batch: Any) -> None:
    """Around `eagle_prepare_for_decode`: the same, and what nothing on the GPU would read stays on the host.

    Args:
        original: SGLang's.
        batch: ScheduleBatch of the next round. One with penalties, which are tensors on its device, is left alone.
    """
    if batch.sampling_info.penalizer_orchestrator.is_required or _needs_pages(batch):
        original(batch)
        return
    device, batch.device = batch.device, "cpu"
    try:
        original(batch)
    finally:
        batch.device = device


def _needs_pages(batch: Any) -> bool:
    """Whether SGLang is about to give a request slots: whether what the next round may write lies beyond its whole pages."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    page_size, reserve = batch.token_to_kv_pool_allocator.page_size, get_alloc_reserve_per_decode()
    return any(req.kv.kv_committed_len + reserve > req.kv.kv_allocated_len // page_size * page_size for req in batch.reqs)
