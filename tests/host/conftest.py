"""The real SGLang package in this process, with the plugin loaded, on a machine without a GPU."""

from types import SimpleNamespace

import pytest

from nsa_backend.demo.cpu_host import prepare_process

prepare_process()


@pytest.fixture
def make_runner():
    """Returns a function of (table_width, pool_size, num_steps, index_topk) that builds a CPU model runner."""
    import torch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from nsa_backend.demo.cpu_host import make_runner

    def build(table_width: int = 700, pool_size: int = 300, num_steps: int = 3, index_topk: int = 64):
        pool = ReqToTokenPool(pool_size, table_width, "cpu", enable_memory_saver=False)
        generator = torch.Generator().manual_seed(table_width)
        pool.req_to_token.copy_(torch.randint(0, 2**20, pool.req_to_token.shape, generator=generator))
        return make_runner(
            SimpleNamespace(index_topk=index_topk, heads=4, latent=8, rope=4),
            pool,
            SimpleNamespace(page_size=64, dtype=torch.float32, size=2**20 - 64),
            num_steps=num_steps,
            num_draft_tokens=num_steps + 1,
            is_draft_worker=False,
        )

    return build
