"""Paged KV memory of the demo: SGLang's request-to-token pool, and KV and index-key buffers on the CPU."""

from __future__ import annotations

import torch

from nsa_backend.kernels.plan import PAGE_SIZE


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
