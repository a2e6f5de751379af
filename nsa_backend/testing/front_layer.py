"""What the front of a layer of DeepSeek-V3.2 or GLM-5 has of SGLang's own parts, on a GPU, without its projections."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from nsa_backend.testing.shape import LATENT, ROPE

INDEX_DIM, POSITIONS = 128, 4096


def front_layer(q_rank: int, heads: int, fused: bool = False, device: str = "cuda") -> SimpleNamespace:
    """Norms and RoPE as `adapters.dsa.layer_front` asks a DeepseekV2AttentionMLA for them, with random weights.

    Args:
        q_rank: values of the query's latent.
        heads: of attention, on this rank.
        fused: whether index heads rotate neighbours, as GLM-5's do, whose indexer SGLang fuses; else halves.
        device: of the weights.
    """
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.layernorm import LayerNorm, RMSNorm
    from sglang.srt.layers.rotary_embedding import get_rope

    def norm(kind: type, width: int, dtype: torch.dtype) -> torch.nn.Module:
        made = kind(width, eps=1e-6).to(device, dtype)
        for parameter in made.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return made

    def rope(neox: bool) -> torch.nn.Module:
        return get_rope(ROPE, ROPE, POSITIONS, 10000, neox, None, torch.bfloat16).to(device)

    indexer = SimpleNamespace(
        k_norm=norm(LayerNorm, INDEX_DIM, torch.float32), rotary_emb=rope(not fused), rope_head_dim=ROPE,
        n_heads=32 if fused else 64, head_dim=INDEX_DIM, block_size=128, scale_fmt="ue8m0", softmax_scale=INDEX_DIM**-0.5,
        _update_rope_guarded=Indexer._update_rope_guarded, use_dsa_indexer_fusion=fused,
    )  # fmt: skip
    return SimpleNamespace(
        q_a_layernorm=norm(RMSNorm, q_rank, torch.bfloat16), kv_a_layernorm=norm(RMSNorm, LATENT, torch.bfloat16),
        rotary_emb=rope(False), indexer=indexer, num_local_heads=heads, q_lora_rank=q_rank, kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
    )  # fmt: skip
