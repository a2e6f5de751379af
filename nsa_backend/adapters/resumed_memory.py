"""The padding row of the request table after `resume_memory_occupation`, which SGLang 0.5.17 to 0.5.23 leave to chance.

The table lies in memory that a release gives back. Requests that come later write their own rows; row 0 belongs to the padding
rows of captured batches, nobody writes it after start, and it is read in every replay with padding: as slots of the KV pool, in
which it would point anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

from nsa_backend.adapters.sglang import HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.kernels.inputs import PADDING_SLOT

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def clear_padding_row_on_resume() -> None:
    """From now on, row 0 of the request table is zero again whenever its memory has come back."""
    hook(f"{MANAGER}.resume_memory_occupation", _resume, HookType.AROUND)


def _resume(original: Callable, manager: Any, request: Any) -> Any:
    """Around `resume_memory_occupation`; memory that stays released must not be written."""
    answer = original(manager, request)
    if GPU_MEMORY_TYPE_KV_CACHE not in manager.offload_tags:
        manager.tp_worker.model_runner.req_to_token_pool.req_to_token[PADDING_SLOT].zero_()
    return answer
