"""SGLang's own sequence of kernels in front of a layer, for what each of the two launches replaces: to compare and to time."""

from __future__ import annotations

from typing import Any

import torch

from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.kernels.plan import PAGE_SIZE


def norm_rope_store(
    attention: Any,
    qkv: torch.Tensor,
    key: torch.Tensor | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv_cache: torch.Tensor,
    index_cache: torch.Tensor | None,
    q_scales: Scales | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `kernels.layer_front.norm_rope_store` does, with the layer `attention`; changes `qkv`, and wants `slots` dense."""
    latent = attention.kv_lora_rank
    q, latent_cache = qkv.split([attention.q_lora_rank, latent + attention.qk_rope_head_dim], dim=-1)
    q = attention.q_a_layernorm(q)
    k_nope = attention.kv_a_layernorm(latent_cache[..., :latent]).unsqueeze(1)
    k_pe = latent_cache[..., latent:].unsqueeze(1)
    _, k_pe = attention.rotary_emb(positions, torch.empty_like(k_pe), k_pe)
    write_kv(kv_cache, slots, k_nope, k_pe)
    if key is not None:
        write_index_key(attention.indexer, key, positions, slots, index_cache)
    q = quantised(q, q_scales)
    return (q, None) if q_scales is None else q


def write_kv(kv_cache: torch.Tensor, slots: torch.Tensor, k_nope: torch.Tensor, k_pe: torch.Tensor) -> None:
    """What SGLang's pool does with a layer's KV, each [rows, 1, width]."""
    from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_triton
    from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache_separate

    if kv_cache.dtype != torch.bfloat16:
        k_nope, k_pe = quantize_k_cache_separate(k_nope, k_pe)
    set_mla_kv_buffer_triton(kv_cache.view(k_nope.dtype), slots, k_nope, k_pe)


def write_index_key(
    indexer: Any, key: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, index_cache: torch.Tensor
) -> None:
    """Norm, rotate and store index keys, in one kernel where SGLang has it."""
    from sglang.kernels.ops.attention.dsa.indexer_k import fused_k_indexer_norm_rope_store
    from sglang.kernels.ops.kvcache.dsa_fused_store_index_cache import fused_store_index_k_cache
    from sglang.srt.layers.attention.dsa.dsa_indexer import rotate_activation

    norm, rope = indexer.k_norm, indexer.rotary_emb
    if indexer.use_dsa_indexer_fusion:
        normed_with = (norm.weight, norm.bias, norm.variance_epsilon)
        fused_k_indexer_norm_rope_store(key, index_cache, slots, *normed_with, rope.cos_sin_cache, positions, PAGE_SIZE)
        return
    key = norm(key)
    k_rope = key[..., : indexer.rope_head_dim]
    _, k_rope = rope(positions, torch.empty_like(k_rope), k_rope)
    indexer._update_rope_guarded(key[..., : indexer.rope_head_dim], k_rope)
    fused_store_index_k_cache(rotate_activation(key), index_cache, slots, PAGE_SIZE)


def rope_query(attention: Any, q_rope: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What `kernels.layer_front.rope_query` does, with the layer `attention`; changes `q_rope`."""
    q_rope, _ = attention.rotary_emb(positions, q_rope, torch.empty_like(q_rope[:, :1]))
    return q_rope


def rope_quantise(
    attention: Any, query: torch.Tensor, gates: torch.Tensor, q_rope: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `kernels.layer_front.rope_quantise` does, with the layer `attention`; changes `query` and `q_rope`."""
    from sglang.kernels.ops.attention.dsa.indexer_q import fused_q_indexer_rope_first_quant
    from sglang.kernels.ops.quantization.act_quant_triton import act_quant
    from sglang.srt.layers.attention.dsa.dsa_indexer import rotate_activation

    indexer, q_rope = attention.indexer, rope_query(attention, q_rope, positions)
    if indexer.use_dsa_indexer_fusion:
        scale = indexer.softmax_scale * indexer.n_heads**-0.5
        angles = indexer.rotary_emb.cos_sin_cache
        return *fused_q_indexer_rope_first_quant(query.contiguous(), gates, scale, angles, positions), q_rope
    turned = query[..., : indexer.rope_head_dim]
    turned, _ = indexer.rotary_emb(positions, turned, torch.empty_like(turned[:, :1]))
    indexer._update_rope_guarded(query[..., : indexer.rope_head_dim], turned)
    values, scale = act_quant(rotate_activation(query), indexer.block_size, indexer.scale_fmt)
    return values, (gates * indexer.n_heads**-0.5).unsqueeze(-1) * scale * indexer.softmax_scale, q_rope


def quantised(x: torch.Tensor, scales: Scales | None) -> Any:
    """bfloat16 [rows, columns] as SGLang gives it to projections with such scales: FP8 and its scales, or as it is."""
    if scales is None:
        return x
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8 as quantise

    if scales is Scales.POWERS_OF_TWO:
        return quantise(x, GROUP, scale_ue8m0=True)
    return quantise(x, GROUP, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=False)
