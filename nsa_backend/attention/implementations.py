"""One lazy table of sparse-attention implementations; a name is used or refused with a reason, never replaced."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import ModuleType

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.interface import SparseAttention
from nsa_backend.config import AttentionConfig, BackendConfig

IMPLEMENTATIONS = {
    "fa3": "nsa_backend.attention.fa3",
    "flashmla_sparse": "nsa_backend.attention.flashmla_sparse",
    "flashmla_kv": "nsa_backend.attention.flashmla_kv",
    "sparse_decode": "nsa_backend.attention.sparse_decode",
    "trtllm": "nsa_backend.attention.trtllm",
    "torch": "nsa_backend.attention.torch_reference",
    "auto": "nsa_backend.attention.auto",
}
"""Name to module, which has `problems(config) -> [reason]`, empty where it can run, and `build(config) -> SparseAttention`."""

OPTION_VALUES = tuple(name for name in IMPLEMENTATIONS if name not in ("torch", "auto"))
"""What --nsa-decode-backend may name; SGLang's closed list has neither of the other two."""


def implementation(name: str) -> ModuleType:
    """The module of `name`, a key of `IMPLEMENTATIONS`; imported when it is asked for."""
    return import_module(IMPLEMENTATIONS[name])


def build_attention(name: str, asked: str, config: AttentionConfig) -> SparseAttention:
    """Build the implementation that the user chose.

    Args:
        name: a key of `IMPLEMENTATIONS`.
        asked: how the user asked for it, such as "--nsa-decode-backend fa3", for the message.
        config: what the model, the KV pool and the GPU are.

    Raises:
        ValueError: the name is unknown or cannot run here; gives all reasons, and which ones can.
    """
    found = implementation(name).problems(config) if name in IMPLEMENTATIONS else ["nsa_backend has no such implementation"]
    if not found:
        return implementation(name).build(config)
    usable = [other for other, why_not in reasons(config).items() if why_not is None and other != "auto"]
    raise ValueError(
        f"{asked} cannot run here: {'; '.join(found)}. Choose one of: {', '.join(usable) or 'none on this machine'}; "
        f"or {adapter.WAY_BACK}"
    )


def build_decode(config: BackendConfig) -> SparseAttention:
    """What runs in decode, target_verify and draft_extend; raises ValueError where it cannot run here."""
    asked = "NSA_BACKEND_AUTO_DECODE=1" if config.decode_impl == "auto" else f"{adapter.DECODE_OPTION} {config.decode_impl}"
    return build_attention(config.decode_impl, asked, replace(config.attention, partner=config.prefill_impl))


def build_prefill(config: BackendConfig) -> SparseAttention:
    """What runs in sparse prefill; raises ValueError where it cannot run here."""
    attention = replace(config.attention, partner=config.decode_impl, prefill=True)
    return build_attention(config.prefill_impl, f"{adapter.PREFILL_OPTION} {config.prefill_impl}", attention)


def reasons(config: AttentionConfig) -> dict[str, str | None]:
    """All reasons why each implementation cannot run under `config`; None where it can."""
    return {name: "; ".join(implementation(name).problems(config)) or None for name in IMPLEMENTATIONS}
