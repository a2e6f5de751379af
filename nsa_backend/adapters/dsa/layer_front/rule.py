"""The rule by which a GPU and a layer can have the front in two launches; what it leaves, SGLang's own layer serves."""

from __future__ import annotations

from typing import Any

import torch

from nsa_backend.adapters.dsa.layer_front.projections import scales_of
from nsa_backend.kernels.layer_front_weights import GROUP, FrontWeights
from nsa_backend.kernels.rope_quantise import TOGETHER


def device_problem() -> str | None:
    """Why this GPU and its norms are not what the launches repeat to the bit, or None."""
    if torch.cuda.get_device_capability() != (9, 0):
        return "the GPU is no Hopper"
    from flashinfer import norm

    if norm._use_cuda_norm(torch.device("cuda")):
        return "FlashInfer's norms are its CUDA ones, which sum in another order: nvidia-cutlass-dsl is missing or turned off"
    return None


def weights_of(attention: Any) -> FrontWeights:
    """Of a layer, as they are now: an update of weights may bring others."""
    indexer, rope = attention.indexer, attention.rotary_emb
    q_norm, latent_norm = attention.q_a_layernorm, attention.kv_a_layernorm
    own = (q_norm.weight.data, latent_norm.weight.data)
    epsilons = (q_norm.variance_epsilon, latent_norm.variance_epsilon)
    if indexer is None:
        return FrontWeights(*own, None, None, rope.cos_sin_cache, None, *epsilons, 0.0, rope.is_neox_style)
    norm, index_rope = indexer.k_norm, indexer.rotary_emb
    return FrontWeights(
        *own,
        norm.weight.data,
        norm.bias.data,
        rope.cos_sin_cache,
        index_rope.cos_sin_cache,
        *epsilons,
        norm.variance_epsilon,
        rope.is_neox_style,
        index_rope.is_neox_style,
        indexer.use_dsa_indexer_fusion,
    )


def layer_problem(attention: Any) -> str | None:
    """Why SGLang's own sequence serves this layer (a DeepseekV2AttentionMLA whose weights are loaded), or None."""
    from sglang.srt.layers.layernorm import RMSNorm

    if not attention.use_dsa or attention.q_lora_rank is None:
        return "it is no sparse layer"
    odd = {
        "it has a gate": hasattr(attention, "prepare_attention_output_gate"),
        "it has learned sinks": getattr(attention, "learnable_sink_param", None) is not None,
        "it has no RoPE": attention.rotary_emb is None,
        "its absorbed weights are not bfloat16": attention.w_kc is None
        or attention.w_kc.dtype != torch.bfloat16
        or attention.use_deep_gemm_bmm,
        "its norms are of another kind": any(
            type(norm) is not RMSNorm or norm.variance_size_override is not None or norm.cast_x_before_out_mul
            for norm in (attention.q_a_layernorm, attention.kv_a_layernorm)
        ),
    }
    found = next((why for why, holds in odd.items() if holds), None) or indexer_problem(attention.indexer)
    return found or projection_problem(attention) or weights_of(attention).problem()


def indexer_problem(indexer: Any) -> str | None:
    """The same of a layer's indexer; None for one without, which attends to the selection of an earlier layer."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.layernorm import LayerNorm

    if indexer is None:
        return None
    if type(indexer) is not Indexer:
        return f"its indexer is {type(indexer).__name__}"
    if indexer.head_dim != GROUP or indexer.n_heads % TOGETHER:
        return "its index heads are not 128 wide"
    if type(indexer.k_norm) is not LayerNorm:
        return "its norms are of another kind"
    gates = indexer.wk_weights_proj if indexer.use_dsa_indexer_fusion else indexer.weights_proj
    if getattr(gates, "set_lora", False) or gates.weight.dtype != torch.bfloat16:
        return "weights_proj has LoRA adapters or is not bfloat16"
    return None


def projection_problem(attention: Any) -> str | None:
    """The same of the projections in front of its attention."""
    before, after_norm, indexer = [attention.fused_qkv_a_proj_with_mqa], [attention.q_b_proj], attention.indexer
    if indexer is not None:
        before += [] if indexer.use_dsa_indexer_fusion else [indexer.wk]
        after_norm.append(indexer.wq_b)
    try:
        formats = [{scales_of(linear) for linear in linears} for linears in (before, after_norm)]
    except ValueError as problem:
        return str(problem)
    return "projections of one input have weights of two formats" if any(len(found) > 1 for found in formats) else None
