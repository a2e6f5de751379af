"""Shape SGLang's query arguments into what implementations take."""

from __future__ import annotations

import torch

from nsa_backend import host
from nsa_backend.attention.common import SparseInputs
from nsa_backend.metadata import NSAMetadata


def sparse_inputs(
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    layer: host.RadixAttention,
    kv_cache: torch.Tensor,
    topk_slots: torch.Tensor,
    metadata: NSAMetadata,
) -> SparseInputs:
    """Views of the query, split into its latent and RoPE parts, beside the metadata of its rows."""
    heads, latent_dim = layer.tp_q_head_num, layer.v_head_dim
    if q_rope is None:
        joined = q.contiguous().view(-1, heads, layer.head_dim)
        q_nope, q_rope = joined[..., :latent_dim], joined[..., latent_dim:]
    else:
        q_nope, q_rope = q.view(-1, heads, latent_dim), q_rope.view(-1, heads, layer.head_dim - latent_dim)
    return SparseInputs(
        q_nope=q_nope,
        q_rope=q_rope,
        kv_cache=kv_cache,
        topk_slots=topk_slots,
        cache_seqlens=metadata.nsa_cache_seqlens_int32,
        cu_seqlens_q=metadata.nsa_cu_seqlens_q,
        cu_seqlens_k=metadata.nsa_cu_seqlens_k,
        sm_scale=layer.scaling,
        logit_cap=layer.logit_cap,
        flashmla_tiles=metadata.flashmla_tiles,
    )


def pad_topk_rows(topk_slots: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Append rows of -1 where SGLang padded the query beyond the indexer's rows (TP with partial DP attention)."""
    missing = num_rows - topk_slots.shape[0]
    if missing < 0:
        raise ValueError(f"the indexer chose slots for {topk_slots.shape[0]} rows and the query has {num_rows}: rows would mix")
    if missing == 0:
        return topk_slots
    return torch.nn.functional.pad(topk_slots, (0, 0, 0, missing), value=-1)
