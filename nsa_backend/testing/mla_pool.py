"""SGLang's KV pool in DeepSeek-V3.2's shape, for its write of new tokens."""

from __future__ import annotations

from typing import Any

import torch

from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.testing.shape import LATENT, ROPE


def one_layer(dtype: torch.dtype, packed_dim: int | None, device: str, **sparse: bool) -> Any:
    """A pool of one layer and a page of slots.

    Args:
        dtype: of the KV cache.
        packed_dim: size of a slot of an FP8 cache that is packed as FlashMLA reads it; None for other dtypes.
        device: of its memory.
        sparse: the release's option that makes it a pool of sparse attention.
    """
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=PAGE_SIZE, page_size=PAGE_SIZE, dtype=dtype, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, layer_num=1,
        device=device, enable_memory_saver=False, override_kv_cache_dim=packed_dim, **sparse,
    )  # fmt: skip
