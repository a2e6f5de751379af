"""KV pools: the demo's on the CPU with its pages, and SGLang's own in DeepSeek-V3.2's shape, for its write of new tokens."""

from __future__ import annotations

from typing import Any

import torch

from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.testing.shape import LATENT, ROPE


class CpuKVPool:
    """KV and index keys of one layer. Memory starts as NaN: a slot that is read before it is written would show."""

    def __init__(self, num_pages: int, kv_dim: int, index_dim: int):
        self.page_size = PAGE_SIZE
        self.dtype = torch.float32
        self.size = (num_pages - 1) * PAGE_SIZE  # as SGLang counts: the page that padding rows write to comes on top
        self.kv = torch.full((num_pages * PAGE_SIZE, 1, kv_dim), float("nan"))
        self.index_k = torch.full((num_pages, PAGE_SIZE, index_dim), float("nan"))

    def set_mla_kv_buffer(self, layer, loc: torch.Tensor, k: torch.Tensor, k_rope: torch.Tensor) -> None:
        """Write as SGLang's kernel does: one location after the other in memory, whatever the strides of `loc`."""
        dense = torch.as_strided(loc, loc.shape, (1,))
        self.kv[dense] = torch.cat([k, k_rope], dim=-1)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.kv

    def set_index_k(self, loc: torch.Tensor, keys: torch.Tensor) -> None:
        self.index_k.view(-1, keys.shape[-1])[loc] = keys


class PageAllocator:
    """Hands out pages in shuffled order, page 0 aside (padding rows write there)."""

    def __init__(self, num_pages: int, seed: int):
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self._pages = order.tolist()

    def slots(self, num_tokens: int) -> torch.Tensor:
        """int32 [num_tokens] slots on pages of their own."""
        pages = [self._pages.pop() for _ in range(-(-num_tokens // PAGE_SIZE))]
        slots = torch.tensor(pages)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)
        return slots.flatten()[:num_tokens].to(torch.int32)


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
