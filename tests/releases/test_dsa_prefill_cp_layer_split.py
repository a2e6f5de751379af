"""Ranks of prefill context parallel that keep the KV of some layers each: what they attend to comes through SGLang's own pool.

--enable-dsa-cache-layer-split, on the prefill server of a pair. The pool writes a layer on the rank that keeps it, and hands it
to every rank that asks for it: all of them must ask for the same layers in the same order, as the built-in backend does.
"""

from __future__ import annotations

import pytest
import torch
from divided_prefill import rank_of, record
from sglang.srt.mem_cache.dsa_cache_layer_split import LayerSplitDSATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from nsa_backend.demo import engine
from nsa_backend.demo.model import ModelShape
from nsa_backend.refusals import refusals
from nsa_backend.testing.pool import PAGE_SIZE, CpuKVPool

LENGTHS = [[75], [150, 9, 70, 33], [3, 200, 2, 1, 2], [2]]
LAYERS = 3
"""Of the pool: a layer for each rank, of which the demo's model is the first."""


class SplitPool(CpuKVPool):
    """The demo's pool, whose KV is in SGLang's own pool of split layers."""

    def __init__(self, num_pages: int, kv_dim: int, index_dim: int):
        super().__init__(num_pages, kv_dim, index_dim)
        latent = ModelShape().latent
        self.kv = None  # is nowhere else
        self.split = OnTheCpu(
            size=self.size, page_size=PAGE_SIZE, kv_lora_rank=latent, dtype=self.dtype, qk_rope_head_dim=kv_dim - latent,
            layer_num=LAYERS, device="cpu", index_head_dim=128, enable_memory_saver=False, kv_cache_dim=kv_dim,
            layer_shard_rank=get_parallel().attn_cp_rank, layer_shard_size=LAYERS,
        )  # fmt: skip
        for buffer in (*self.split.kv_buffer, self.split.remote_kv_buffer):
            buffer.fill_(float("nan"))

    def set_mla_kv_buffer(self, layer, loc, k, k_rope) -> None:
        self.split.set_mla_kv_buffer(layer, loc, k, k_rope)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.split.get_key_buffer(layer_id)

    def set_index_k(self, loc, keys) -> None:
        super().set_index_k(loc, keys)
        self.split.prefetch_kv_buffer(0)  # as SGLang's indexer does, before the layer's KV is written


class OnTheCpu(LayerSplitDSATokenToKVPool):
    def _write_mla_kv_buffer(self, dst_buffer, loc, cache_k_nope, cache_k_rope) -> None:
        """SGLang's kernel."""
        dst_buffer[loc.long()] = torch.cat([cache_k_nope, cache_k_rope], -1)


@pytest.fixture
def network(monkeypatch):
    """Ranks run one after the other, the one that keeps the layer first: what it sends is kept for the others, in order."""
    sent: list[torch.Tensor] = []
    received: list[int] = []

    def broadcast(tensor: torch.Tensor, src: int, group: object) -> None:
        if get_parallel().attn_cp_rank == src:
            sent.append(tensor.clone())
            return
        tensor.copy_(sent[len(received)])
        received.append(src)

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return sent, received


def prefilled(lengths: list[int]) -> list[torch.Tensor]:
    """Logits of the rows of this rank in each of two chunks, the second on a cached prefix."""
    generator = torch.Generator().manual_seed(sum(lengths))
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]
    demo = engine.Engine(prompts, num_steps=1, padding=0)
    outputs = record(demo)
    demo.prefill(demo.target, demo.prompts)
    return outputs


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_ranks_attend_to_layers_that_others_keep(monkeypatch, network, lengths):
    sent, received = network
    whole = prefilled(lengths)
    monkeypatch.setattr(engine, "CpuKVPool", SplitPool)
    for rank in range(LAYERS):
        received.clear()
        with rank_of(LAYERS, rank):
            divided = prefilled(lengths)
        for mine, everything in zip(divided, whole, strict=True):
            torch.testing.assert_close(mine, everything[rank::LAYERS] if len(everything) >= LAYERS else everything)
        assert len(received) == (len(sent) if rank else 0), "a rank that asks for other layers waits for ever"
    assert sent


SPLIT = "--tp-size 8 --enable-prefill-cp --cp-strategy interleave --enable-dsa-cache-layer-split --disaggregation-mode prefill"


def test_it_is_served(resolve):
    args = resolve("--attention-backend", "dsa", *SPLIT.split(), "--disaggregation-transfer-backend", "mooncake")
    assert refusals(args) == []
    args.check_server_args()
