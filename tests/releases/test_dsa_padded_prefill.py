"""Prefill under DP attention: SGLang pads every rank to the largest, idle ones too, so that all replay one captured prefill."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from padded_rank import PROMPTS, beside_other_ranks
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from nsa_backend.demo.engine import Engine
from nsa_backend.demo.model import TinySparseMla

pytestmark = pytest.mark.skipif(
    not hasattr(ForwardBatch, "logical_forward_mode"), reason="this release leaves an idle rank idle while others prefill"
)

TOKENS = sum(map(len, PROMPTS))
CAPTURED = [32, 128, 256]
"""Tokens of captured prefills."""


class Indexer(TinySparseMla):
    """The demo's model, whose indexer chooses for the rows that have metadata and leaves -1 in the others, as SGLang's does."""

    def _index(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        metadata = self.attention_backend(batch).get_indexer_metadata(0, batch)
        real = sum(metadata.get_dsa_extend_len_cpu())
        start, end = metadata.get_indexer_kvcache_range()
        assert len(start) == len(end) == len(metadata.get_seqlens_expanded()) == real <= len(positions)
        self.pool.set_index_k(batch.out_cache_loc, self._new_index_keys(input_ids, positions, batch))
        one = torch.ones(len(positions))
        query = torch.stack([one, -positions.float(), one], dim=1)[:real]
        chosen = metadata.topk_transform(query @ self._gathered_keys(metadata).T, self.shape.index_topk, ks=start)
        return torch.cat([chosen, chosen.new_full((len(positions) - real, chosen.shape[1]), -1)])


@pytest.fixture
def model(monkeypatch):
    """Returns a function that makes an engine's target model, one rank of two, and its runner."""
    beside_other_ranks(monkeypatch)
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(bs=CAPTURED)))
    monkeypatch.setattr(forward_batch_info, "get_exec", lambda: SimpleNamespace(graph=graph))
    monkeypatch.setattr(forward_batch_info, "prefill_graph_tolerates_sum_len", lambda: False)

    def made() -> tuple[Engine, SimpleNamespace]:
        engine = Engine(PROMPTS, num_steps=3, padding=0)
        engine.target.net.__class__ = Indexer
        backend = engine.target.backend
        backend.late_layer_num_tokens = lambda batch: None
        options = {"lora_manager": None, "attn_tp_sequence_sharded": lambda tokens: False, "attn_backend": backend}
        return engine, SimpleNamespace(**vars(engine.target.runner) | options)

    return made


def among(batch: ForwardBatch, tokens: list[int]) -> ForwardBatch:
    """`batch` where SGLang's schedulers have counted `tokens` new ones, rank by rank, and one captured prefill can take all."""
    batch.global_num_tokens_cpu = batch.global_num_tokens_for_logprob_cpu = tokens
    batch.global_num_tokens_gpu = torch.zeros(len(tokens), dtype=torch.long)
    batch.is_extend_in_batch = batch.can_run_dp_prefill_cuda_graph = True
    batch.global_num_token_non_padded_cpu = tokens[0]
    batch.lora_ids = [None] * batch.batch_size
    return batch


def prompts_at_once(engine: Engine) -> ForwardBatch:
    lens = [len(prompt) for prompt in PROMPTS]
    positions = torch.cat([torch.arange(length) for length in lens])
    request = torch.repeat_interleave(engine.req_pool_indices, torch.tensor(lens))
    return engine.batch(
        ForwardMode.EXTEND,
        engine.target,
        torch.tensor([token for prompt in PROMPTS for token in prompt]),
        positions,
        torch.tensor(lens),
        engine.req_to_token_pool.req_to_token[request, positions].long(),
        extend_seq_lens=torch.tensor(lens, dtype=torch.int32),
        extend_prefix_lens=torch.zeros(len(lens), dtype=torch.long),
        extend_seq_lens_cpu=lens,
        extend_prefix_lens_cpu=[0] * len(lens),
        extend_num_tokens=sum(lens),
    )


def nobody() -> ForwardBatch:
    """What the scheduler of a rank without a request makes while another one prefills."""
    none = torch.zeros(0, dtype=torch.long)
    return ForwardBatch(
        forward_mode=ForwardMode.IDLE,
        batch_size=0,
        input_ids=none,
        req_pool_indices=none,
        seq_lens=none,
        orig_seq_lens=none.int(),
        seq_lens_cpu=none,
        seq_lens_sum=0,
        out_cache_loc=none,
        positions=none,
        extend_num_tokens=0,
    )


def forward(engine: Engine, batch: ForwardBatch) -> torch.Tensor:
    engine.target.backend.init_forward_metadata(batch)
    return engine.target.run(batch)


@pytest.mark.parametrize("peer", [0, 2, 200])
def test_a_padded_prefill_computes_what_it_computes_alone(model, peer):
    """Its bucket is that of the larger rank; attention gets the real rows, the others stay zero."""
    (engine, _), (padded_engine, padded_runner) = model(), model()
    alone = forward(engine, prompts_at_once(engine))
    batch = among(prompts_at_once(padded_engine), [TOKENS, peer])
    batch.prepare_mlp_sync_batch(padded_runner)
    assert len(batch.input_ids) == batch.extend_num_tokens == (128 if peer < 128 else 256)
    out = forward(padded_engine, batch)
    assert torch.equal(out[:TOKENS], alone)
    own = padded_engine.req_to_token_pool.req_to_token[padded_engine.req_pool_indices[2], : len(PROMPTS[2])].long()
    same = engine.req_to_token_pool.req_to_token[engine.req_pool_indices[2], : len(PROMPTS[2])].long()
    assert torch.equal(padded_engine.target.pool.get_key_buffer(0)[own], engine.target.pool.get_key_buffer(0)[same])


def test_an_idle_rank_prefills_a_request_that_nobody_has(model):
    """One of the whole bucket, in row 0 of the request table, whose slots are all 0: nothing else is written."""
    engine, runner = model()
    forward(engine, prompts_at_once(engine))
    keys = engine.target.pool.get_key_buffer(0)
    before = keys.clone()
    batch = among(nobody(), [0, TOKENS])
    batch.prepare_mlp_sync_batch(runner)
    assert batch.forward_mode == ForwardMode.EXTEND
    assert batch.batch_size == 1
    assert len(forward(engine, batch)) == 128
    metadata = engine.target.backend.forward_metadata
    assert metadata.nsa_seqlens_expanded.tolist() == list(range(1, 129))
    assert set(metadata.real_page_table.flatten().tolist()) == {0}
    same = (keys == before) | (keys.isnan() & before.isnan())
    assert (~same).flatten(1).any(1).nonzero().flatten().tolist() == [0]
