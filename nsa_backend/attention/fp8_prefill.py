"""The KV of a prefill on an FP8 KV cache, for a kernel that reads bfloat16: one ragged tensor, request after request.

Its top-k then counts rows of that tensor, which begin at cu_seqlens_k of the request, instead of KV slots.
"""

from __future__ import annotations

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.metadata.views import NSAMetadata


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
