"""Draft KV of requests that a decode server of PD disaggregation retracts, which SGLang 0.5.17 to 0.5.23 do not keep.

Such a server copies the KV of a retracted request to the host (`Req.offload_kv_cache`) and back to other slots once there is
room, since only the prefill server could compute it again. The copy is of the target's pool. The draft's, KV and index keys,
comes back as whatever was written to those slots before: outputs stay right and drafts of that request are wrong until it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook


@dataclass(frozen=True)
class CopyWithDraft:
    """A request's KV on the host: what SGLang copied of the target's pool, and the same of the draft's."""

    target: Any
    draft: Any


_DRAFT_POOLS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By allocator, which target and draft share: the draft's pool."""


def keep_draft_kv(allocator: Any, draft_pool: Any) -> None:
    """From now on, a request's copy of `allocator` holds `draft_pool`'s part of it too.

    Args:
        allocator: of slots, SGLang's; hands out those of both models, and copies its own pool, the target's.
        draft_pool: KV and index keys of the draft model, at the same slots.
    """
    if draft_pool is allocator.get_kvcache():
        return
    _DRAFT_POOLS[allocator] = draft_pool
    where = f"{type(allocator).__module__}.{type(allocator).__qualname__}"
    hook(f"{where}.get_cpu_copy", _copy_both, HookType.AROUND)
    hook(f"{where}.load_cpu_copy", _load_both, HookType.AROUND)


def _copy_both(original: Callable, allocator: Any, indices: torch.Tensor, *others: Any, **options: Any) -> Any:
    """Around `get_cpu_copy`; `indices` int64 [tokens] are slots of whole requests."""
    target = original(allocator, indices, *others, **options)
    pool = _DRAFT_POOLS.get(allocator)
    return target if pool is None else CopyWithDraft(target, pool.get_cpu_copy(indices))


def _load_both(original: Callable, allocator: Any, copy: Any, indices: torch.Tensor, *others: Any, **options: Any) -> None:
    """Around `load_cpu_copy`."""
    if not isinstance(copy, CopyWithDraft):
        original(allocator, copy, indices, *others, **options)
        return
    original(allocator, copy.target, indices, *others, **options)
    _DRAFT_POOLS[allocator].load_cpu_copy(copy.draft, indices)
