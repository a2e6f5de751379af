"""What padding rows read after `resume_memory_occupation`, which SGLang 0.5.17 to 0.5.23 leave to chance.

Request table and KV pools lie in memory that a release gives back. Requests that come later write their own rows and pages.
Row 0 of the table belongs to the padding rows of captured batches, nobody writes it after start, and it is read in every replay
with padding: as slots of the KV pool, in which it would point anywhere. Zeros point at page 0, which the allocator gives nobody
and of which padding reads more slots than it writes: numbers that are none would go on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.kernels.batch_inputs import PADDING_SLOT

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


_POOLS: WeakSet[Any] = WeakSet()
"""KV pools of this process's models."""


def clear_padding_on_resume(pool: Any) -> None:
    """From now on, row 0 of the request table and page 0 of this KV pool are zero again whenever their memory has come back.

    Args:
        pool: SGLang's, of latent KV and index keys, of the target or of a draft model.
    """
    _POOLS.add(pool)
    hook(f"{MANAGER}.resume_memory_occupation", _resume, HookType.AROUND)


def _resume(original: Callable, manager: Any, request: Any) -> Any:
    """Around `resume_memory_occupation`; memory that stays released must not be written."""
    answer = original(manager, request)
    if GPU_MEMORY_TYPE_KV_CACHE not in manager.offload_tags:
        manager.tp_worker.model_runner.req_to_token_pool.req_to_token[PADDING_SLOT].zero_()
        for pool in _POOLS:
            for slots in pool.kv_buffer:
                slots[: pool.page_size].zero_()
            for pages in pool.index_k_with_scale_buffer:
                pages[:1].zero_()
    return answer
