"""FlashMLA's sparse prefill kernel, which also serves decode: one query row, its own list of slots."""

from __future__ import annotations

import torch

from nsa_backend.attention.common import AttentionConfig, NothingToPrepare, SparseInputs, joined_query

HEADS_MULTIPLE = 64
"""Query heads come in blocks of 64 on Hopper."""


def supports(config: AttentionConfig) -> str | None:
    """Why flashmla_sparse cannot run, or None."""
    if config.device_sm != 90:
        return "nsa_backend runs FlashMLA on Hopper (SM90) alone so far"
    if config.kv_cache_dtype == torch.float8_e4m3fn and config.prefill:
        return None  # on pages dequantised once a layer
    if config.kv_cache_dtype != torch.bfloat16:
        return f"it reads a bfloat16 KV cache and this one is {config.kv_cache_dtype}"
    return None


def build(config: AttentionConfig) -> FlashMlaSparse:
    return FlashMlaSparse()


class FlashMlaSparse(NothingToPrepare):
    """Pads the query heads to a multiple of 64 and trims the output; slots of -1 are skipped by the kernel."""

    def __init__(self) -> None:
        from sgl_kernel.flash_mla import flash_mla_sparse_fwd

        self._attend = flash_mla_sparse_fwd

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        heads, latent_dim = inputs.q_nope.shape[1:]
        out, _, _ = self._attend(
            q=joined_query(inputs.q_nope, inputs.q_rope, -(-heads // HEADS_MULTIPLE) * HEADS_MULTIPLE),
            kv=inputs.kv_cache,
            indices=inputs.topk_slots.unsqueeze(1),
            sm_scale=inputs.sm_scale,
            d_v=latent_dim,
        )
        return out[:, :heads]
