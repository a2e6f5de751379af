"""What an FP8 KV cache asks for around an implementation.

Where SGLang leaves RoPE and the cast to the backend, both are made here. A prefill by a kernel that reads bfloat16 gets its KV
as one ragged tensor, request after request. Its top-k then counts rows of it, which begin at cu_seqlens_k of the request.
"""

from __future__ import annotations

import torch

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.metadata.views import NSAMetadata


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


def ragged_kv(kv_cache: torch.Tensor, metadata: NSAMetadata, k: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """The batch's KV in bfloat16, [sum of lengths, 1, latent + rope].

    Without a cached prefix the new tokens are all there is, and their exact values are at hand.
    """
    if metadata.page_table_1_flattened is None:
        return torch.cat([k, k_rope], dim=-1)
    return adapter.dequantize_k_cache_paged(kv_cache, metadata.page_table_1_flattened)


def slots_of_ragged(chosen: torch.Tensor, metadata: NSAMetadata) -> torch.Tensor:
    """KV slots of rows of that tensor, int32 like `chosen`; -1 stays -1.

    What a prefill has chosen is kept for draft steps, which read the KV cache itself.
    """
    ends = metadata.cu_seqlens_k
    row = chosen.clamp(min=0)
    request = torch.searchsorted(ends, row, right=True) - 1
    position = row - ends[request]
    page = metadata.real_page_table[request, position // PAGE_SIZE]
    return torch.where(chosen < 0, -1, page * PAGE_SIZE + position % PAGE_SIZE)
