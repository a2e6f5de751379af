"""RoPE and the cast to FP8 of query and key, where SGLang leaves both to the backend."""

from __future__ import annotations

import torch

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter


def rope_in_fp8(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    layer: sglang_types.RadixAttention,
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
    return adapter.mla_quantize_and_rope_for_fp8(
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
