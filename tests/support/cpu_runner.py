"""A model runner on the CPU for the tests of the backend, in whatever release of SGLang is installed."""

from __future__ import annotations

from types import SimpleNamespace


def build(table_width: int = 700, pool_size: int = 300, num_steps: int = 3, index_topk: int = 64) -> SimpleNamespace:
    """What the demo's runner is, over a request table of random pages."""
    import torch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from nsa_backend.testing.runner import make_runner
    from nsa_backend.testing.shape import AttentionShape

    pool = ReqToTokenPool(pool_size, table_width, "cpu", enable_memory_saver=False)
    generator = torch.Generator().manual_seed(table_width)
    pages = torch.randint(0, 2**14, (pool.req_to_token.shape[0], -(-table_width // 64)), generator=generator)
    slots = 64 * pages[..., None] + torch.arange(64)
    pool.req_to_token.copy_(slots.flatten(1)[:, : pool.req_to_token.shape[1]])
    return make_runner(
        AttentionShape(heads=4, latent=8, rope=4, nope=8, index_topk=index_topk),
        pool,
        SimpleNamespace(page_size=64, dtype=torch.float32, size=2**20 - 64),
        num_steps=num_steps,
        num_draft_tokens=num_steps + 1,
        is_draft_worker=False,
    )
