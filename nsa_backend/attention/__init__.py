"""One lazy table of sparse-attention implementations; a name is used or refused with a reason, never replaced."""

from __future__ import annotations

from importlib import import_module

from nsa_backend import host
from nsa_backend.attention.common import AttentionConfig, SparseAttention

IMPLEMENTATIONS = {
    "fa3": "nsa_backend.attention.fa3",
    "flashmla_sparse": "nsa_backend.attention.flashmla_sparse",
    "flashmla_kv": "nsa_backend.attention.flashmla_kv",
    "torch": "nsa_backend.attention.torch_reference",
}
"""Name to module. A module has `supports(config) -> reason or None` and `build(config) -> SparseAttention`."""


def build_attention(name: str, option: str, config: AttentionConfig) -> SparseAttention:
    """Build the implementation that the user chose.

    Args:
        name: a key of `IMPLEMENTATIONS`.
        option: the command-line option it came from, for the message.
        config: what the model, the KV pool and the GPU are.

    Raises:
        ValueError: the name is unknown or cannot run here; says why and which ones can.
    """
    module = import_module(IMPLEMENTATIONS[name]) if name in IMPLEMENTATIONS else None
    reason = module.supports(config) if module else "nsa_backend has no such implementation"
    if reason is None:
        return module.build(config)
    usable = [other for other, path in IMPLEMENTATIONS.items() if import_module(path).supports(config) is None]
    raise ValueError(
        f"{option} {name} cannot run here: {reason}. Choose one of: {', '.join(usable) or 'none on this machine'}; "
        f"or {host.WAY_BACK}"
    )
