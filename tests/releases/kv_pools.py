"""SGLang's own KV pools of sparse models on the CPU, with contents that tell every slot from every other."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

PAGE = 64


def dsa_pool(layers: int, seed: int, pages: int = 10) -> DSATokenToKVPool:
    """Random latent KV and index keys in `layers` layers."""
    pool = DSATokenToKVPool(
        size=pages * PAGE, page_size=PAGE, kv_lora_rank=512, dtype=torch.bfloat16, qk_rope_head_dim=64, layer_num=layers,
        device="cpu", index_head_dim=128, enable_memory_saver=False, kv_cache_dim=576,
    )  # fmt: skip
    scribble(pool, seed)
    return pool


def scribble(pool: DSATokenToKVPool, seed: int = 99) -> None:
    """Write random values everywhere."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    for buffer in pool.index_k_with_scale_buffer:
        buffer.copy_(torch.randint(0, 256, buffer.shape, generator=generator))


def contents(pool: DSATokenToKVPool, slots: torch.Tensor, pages: list[int]) -> tuple[bytes, bytes]:
    """(latent KV at `slots`, index keys in `pages`) of all layers."""
    kv = torch.stack([buffer[slots] for buffer in pool.kv_buffer]).view(torch.uint8)
    index_keys = torch.stack([buffer[pages] for buffer in pool.index_k_with_scale_buffer])
    return kv.numpy().tobytes(), index_keys.numpy().tobytes()
