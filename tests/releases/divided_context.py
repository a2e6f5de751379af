"""Ranks that divide the KV of every request, one after the other in one process: SGLang's own writer of their KV, our backends.

The demo's target stands on all of them: each has its part of the KV, all index keys and a backend, and what each attends to is
joined. Its draft model has all of the KV, as in SGLang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from joined_parts import joined
from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_dcp_sharded_triton
from sglang.srt.runtime_context import get_parallel

from nsa_backend.demo.engine import Engine
from nsa_backend.demo.model import TinySparseMla
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls
from nsa_backend.testing.pool import CpuKVPool
from nsa_backend.testing.runner import make_runner
from nsa_backend.testing.shape import AttentionShape


def rank_of(ranks: int, rank: int) -> contextlib.AbstractContextManager:
    """This process as one of `ranks`, with what SGLang resolves --dcp-size to."""
    return get_parallel().override(attn_dcp_size=ranks, attn_dcp_rank=rank, dcp_size=ranks, dcp_enabled=ranks > 1)


class OwnPool(CpuKVPool):
    """A rank's rows of the KV, and all index keys; page 0 is zeros, as SGLang's is."""

    def __init__(self, num_pages: int, kv_dim: int, index_dim: int, ranks: int):
        super().__init__(num_pages, kv_dim, index_dim)
        self.kv = self.kv[: len(self.kv) // ranks].clone()
        self.kv[:PAGE_SIZE] = 0
        self.size = len(self.kv) - PAGE_SIZE

    def set_mla_kv_buffer(self, layer: Any, loc: torch.Tensor, k: torch.Tensor, k_rope: torch.Tensor) -> None:
        set_mla_kv_buffer_dcp_sharded_triton(self.kv, loc, k, k_rope)


class Backends:
    """The backends of all ranks, each called as its rank."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.pools: list[OwnPool] = []
        self.backends: list[Any] = []

    def __iter__(self) -> Iterator[tuple[OwnPool, Any]]:
        for rank, (pool, backend) in enumerate(zip(self.pools, self.backends, strict=True)):
            with rank_of(self.ranks, rank):
                yield pool, backend

    def __getattr__(self, name: str) -> Any:
        """A method of the backends, which returns nothing."""

        def call(*arguments: Any, **options: Any) -> None:
            for _, backend in self:
                getattr(backend, name)(*arguments, **options)

        return call


class DividedMla(TinySparseMla):
    """The demo's model on all ranks."""

    backends: Backends

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        parts = []
        for pool, backend in self.backends:
            self.pool = pool
            with calls.running(backend):
                out, lse = self.attend(input_ids, positions, batch)
            assert lse.shape == (len(input_ids), self.shape.heads)
            parts.append((out, lse))
        return self.logits(joined(parts))


def divide(engine: Engine, ranks: int) -> Backends:
    """Put the target of `engine` on `ranks`; returns their backends. Called before its prefill."""
    target, shape = engine.target, engine.shape
    pages = -(-engine.req_to_token_pool.req_to_token.shape[1] // (PAGE_SIZE * ranks))
    blocks = (torch.randperm(pages * engine.num_requests, generator=torch.Generator().manual_seed(ranks)) + 1).int()
    for request, own in zip(engine.req_pool_indices.tolist(), blocks.view(engine.num_requests, pages), strict=True):
        slots = (own[:, None] * PAGE_SIZE * ranks + torch.arange(PAGE_SIZE * ranks, dtype=torch.int32)).flatten()
        table = engine.req_to_token_pool.req_to_token
        table[request] = slots[: table.shape[1]]
    num_pages = (pages * engine.num_requests + 1) * ranks
    draft = engine.draft.pool
    draft.__init__(num_pages, shape.latent + shape.rope, shape.index_dim)
    backends = Backends(ranks)
    for rank in range(ranks):
        with rank_of(ranks, rank):
            backends.pools.append(OwnPool(num_pages, shape.latent + shape.rope, shape.index_dim, ranks))
            runner = make_runner(
                AttentionShape(shape.heads, shape.latent, shape.rope, nope=shape.latent, index_topk=shape.index_topk),
                engine.req_to_token_pool, backends.pools[-1], num_steps=engine.num_steps,
                num_draft_tokens=engine.num_draft_tokens, is_draft_worker=False,
            )  # fmt: skip
            backends.backends.append(create_backend(runner))
    target.net.__class__, target.net.backends, target.backend = DividedMla, backends, backends
    target.run = lambda batch: target.net.forward(batch.input_ids, batch.positions, batch)
    return backends
