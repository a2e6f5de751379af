"""The rule by which a GPU and a layer can have the front in two launches; what it leaves, SGLang's own layer serves."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from nsa_backend.adapters.dsa.layer_front.projections import scales_of
from nsa_backend.kernels.layer_front import HEADS
from nsa_backend.kernels.layer_front_weights import GROUP, FrontWeights


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
    indexer, norm = attention.indexer, attention.indexer.k_norm
    return FrontWeights(
        attention.q_a_layernorm.weight.data,
        attention.kv_a_layernorm.weight.data,
        norm.weight.data,
        norm.bias.data,
        attention.rotary_emb.cos_sin_cache,
        indexer.rotary_emb.cos_sin_cache,
        attention.q_a_layernorm.variance_epsilon,
        attention.kv_a_layernorm.variance_epsilon,
        norm.variance_epsilon,
        attention.rotary_emb.is_neox_style,
        indexer.rotary_emb.is_neox_style,
        indexer.use_dsa_indexer_fusion,
    )


def layer_problem(attention: Any) -> str | None:
    """Why SGLang's own sequence serves this layer (a DeepseekV2AttentionMLA whose weights are loaded), or None."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.layernorm import LayerNorm, RMSNorm

    indexer = attention.indexer
    if indexer is None:
        return "it takes the selection of an earlier layer"
    if type(indexer) is not Indexer:
        return f"its indexer is {type(indexer).__name__}"
    fused = indexer.use_dsa_indexer_fusion
    gates = indexer.wk_weights_proj if fused else indexer.weights_proj
    odd = {
        "it has a gate": hasattr(attention, "prepare_attention_output_gate"),
        "it has learned sinks": getattr(attention, "learnable_sink_param", None) is not None,
        "it has no RoPE": attention.rotary_emb is None,
        "ranks that divide its KV have its query's projection whole": attention.dcp_size > 1
        and bool(get_parallel().dcp_replicate_q_proj),
        "its absorbed weights are not bfloat16": attention.w_kc is None
        or attention.w_kc.dtype != torch.bfloat16
        or attention.use_deep_gemm_bmm,
        "its index heads are not 128 wide": indexer.head_dim != GROUP or bool(indexer.n_heads % HEADS),
        "weights_proj has LoRA adapters or is not bfloat16": getattr(gates, "set_lora", False)
        or gates.weight.dtype != torch.bfloat16,
        "its norms are of another kind": type(indexer.k_norm) is not LayerNorm
        or any(
            type(norm) is not RMSNorm or norm.variance_size_override is not None or norm.cast_x_before_out_mul
            for norm in (attention.q_a_layernorm, attention.kv_a_layernorm)
        ),
    }
    found = next((why for why, holds in odd.items() if holds), None)
    if found is not None:
        return found
    try:
        after_norm = {scales_of(linear) for linear in (attention.q_b_proj, indexer.wq_b)}
        before = {scales_of(linear) for linear in (attention.fused_qkv_a_proj_with_mqa, *(() if fused else (indexer.wk,)))}
    except ValueError as problem:
        return str(problem)
    if len(after_norm) > 1 or len(before) > 1:
        return "projections of one input have weights of two formats"
    return weights_of(attention).problem()
