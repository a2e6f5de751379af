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
    *,
    decode: bool = False,
) -> SparseInputs:
    """Views of the query, split into its latent and RoPE parts, beside the metadata of its rows.

    `decode` says that a row is a request, whose length some kernels want as it is.
    """
    heads, latent_dim = layer.tp_q_head_num, layer.v_head_dim
    joined = None
    if q_rope is None:
        joined = q.contiguous().view(-1, heads, layer.head_dim)
        q_nope, q_rope = joined[..., :latent_dim], joined[..., latent_dim:]
    else:
        q_nope, q_rope = q.view(-1, heads, latent_dim), q_rope.view(-1, heads, layer.head_dim - latent_dim)
    rows = q_nope.shape[0]
    cache_seqlens, cu_seqlens_q = metadata.nsa_cache_seqlens_int32, metadata.nsa_cu_seqlens_q
    cu_seqlens_k, schedule = metadata.nsa_cu_seqlens_k, metadata.schedule
    if rows != cache_seqlens.shape[0]:
        # Of a batch that SGLang padded, it may hand over the real rows alone (from 0.5.13 on).
        cache_seqlens, schedule = cache_seqlens[:rows], None
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q[: rows + 1], cu_seqlens_k[: rows + 1]
    return SparseInputs(
        q_nope=q_nope,
        q_rope=q_rope,
        kv_cache=kv_cache,
        topk_slots=topk_slots,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        sm_scale=layer.scaling,
        logit_cap=layer.logit_cap,
        q_joined=joined,
        request_seqlens=metadata.cache_seqlens_int32 if decode else None,
        schedule=schedule,
    )


def rope_in_fp8(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    layer: host.RadixAttention,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply RoPE to query and key and cast both to fp8_e4m3, in SGLang's one launch.

    Args:
        q_nope: [rows, heads, latent]; q_rope: [rows, heads, rope]; k_nope: [rows, 1, latent]; k_rope: [rows, 1, rope].
        positions: [rows].
        cos_sin_cache: [positions of the model, rope].
        is_neox: whether RoPE rotates halves (True) or neighbours.

    Returns:
        Query [rows, heads, latent + rope], k_nope [rows, latent] and k_rope [rows, rope], without scales.
    """
    latent_dim = layer.v_head_dim
    return host.mla_quantize_and_rope_for_fp8(
        q_nope.view(-1, layer.tp_q_head_num, latent_dim),
        q_rope.view(-1, layer.tp_q_head_num, layer.head_dim - latent_dim),
        k_nope.squeeze(1),
        k_rope.squeeze(1),
        positions,
        cos_sin_cache,
        is_neox,
        latent_dim,
        layer.head_dim - latent_dim,
    )
