"""The checks of NSA_BACKEND_REQUIRED=1: the server starts only where this backend serves target and drafts, or says why not.

What the options say is looked at in the main process, before any GPU work; what SGLang has built, in the scheduler's process,
before graphs are captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter

OPTIONS = {
    "prefill": "--prefill-attention-backend",
    "decode": "--decode-attention-backend",
    "drafts": "--speculative-draft-attention-backend",
}
"""The options that choose another backend for a part, where --attention-backend is ours."""


def check_names(names: dict[str, str | None], create_backend: Callable) -> None:
    """Raise ValueError where an option chose another backend, or where another plugin took a name of ours.

    Args:
        names: by part of the server, the attention backend that options name.
        create_backend: what ours are built by.
    """
    for part, name in names.items():
        if name not in adapter.BACKEND_NAMES:
            raise ValueError(
                f"NSA_BACKEND_REQUIRED=1 and the attention backend of {part} is {name}: pass --attention-backend "
                f"{adapter.BACKEND_NAMES[0]} with a model that has an index_topk, drop {OPTIONS[part]}, or unset "
                "NSA_BACKEND_REQUIRED"
            )
        if sglang_types.ATTENTION_BACKENDS[name] is not create_backend:
            owner = getattr(sglang_types.ATTENTION_BACKENDS[name], "__module__", "another plugin")
            raise ValueError(
                f"NSA_BACKEND_REQUIRED=1 and {owner} has registered the attention backend {name} since: load this plugin "
                "alone (SGLANG_PLUGINS=nsa_backend), or unset NSA_BACKEND_REQUIRED"
            )


def check_built(part: str, backend: Any, ours: tuple[type, ...]) -> None:
    """Raise ValueError where SGLang has built another backend than ours.

    Args:
        part: whose it is, for the message.
        backend: SGLang's hybrid of prefill and decode, its wrapper for two-batch overlap, or a backend.
        ours: our classes.
    """
    halves = [getattr(backend, name) for name in ("prefill_backend", "decode_backend", "primary") if hasattr(backend, name)]
    for built in halves or [backend]:
        if not isinstance(built, ours):
            kind = type(built)
            raise ValueError(
                f"NSA_BACKEND_REQUIRED=1 and {kind.__module__}.{kind.__qualname__} serves the {part}: pass --attention-backend "
                f"{adapter.BACKEND_NAMES[0]} alone, with no other backend for prefill, decode or drafts and no other plugin "
                "(SGLANG_PLUGINS=nsa_backend), or unset NSA_BACKEND_REQUIRED"
            )
