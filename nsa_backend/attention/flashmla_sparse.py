"""FlashMLA's sparse prefill kernel, which also serves decode: one query row, its own list of slots."""

from __future__ import annotations

import torch

from nsa_backend import host
from nsa_backend.attention.common import AttentionConfig, SparseInputs

HEADS_MULTIPLE = 64
"""Query heads come in blocks of 64 on Hopper."""


def supports(config: AttentionConfig) -> str | None:
    """Why flashmla_sparse cannot run, or None."""
    if config.device_sm != 90:
        return "nsa_backend runs FlashMLA on Hopper (SM90) alone so far"
    if config.kv_cache_dtype != torch.bfloat16:
        return f"it reads a bfloat16 KV cache and this one is {config.kv_cache_dtype}"
    return None


def build(config: AttentionConfig) -> FlashMlaSparse:
    return FlashMlaSparse()


class FlashMlaSparse:
    """Pads the query heads to a multiple of 64 and trims the output; slots of -1 are skipped by the kernel."""

    def __init__(self) -> None:
        from sgl_kernel.flash_mla import flash_mla_sparse_fwd

        self._attend = flash_mla_sparse_fwd

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        heads, latent_dim = inputs.q_nope.shape[1:]
        out, _, _ = self._attend(
            q=_joined_query(inputs.q_nope, inputs.q_rope),
            kv=inputs.kv_cache,
            indices=inputs.topk_slots.unsqueeze(1),
            sm_scale=inputs.sm_scale,
            d_v=latent_dim,
        )
        return out[:, :heads]


def _joined_query(q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
    """[rows, heads rounded up to 64, latent + rope]; the added heads are zero."""
    rows, heads, latent_dim = q_nope.shape
    padded = -(-heads // HEADS_MULTIPLE) * HEADS_MULTIPLE
    if padded == heads:
        return host.concat_mla_absorb_q_general(q_nope, q_rope)
    q = q_nope.new_zeros(rows, padded, latent_dim + q_rope.shape[-1])
    q[:, :heads, :latent_dim] = q_nope
    q[:, :heads, latent_dim:] = q_rope
    return q
