"""--debug-cuda-graph: SGLang replays by calling what it captured, and the launch in it is made for the batch of that replay."""

from dataclasses import replace

import pytest
import torch
from batches import forward_batch, static_batch
from metadata_reference import Batch
from padded_rank import PROMPTS, Rank

from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.demo import engine as demo
from nsa_backend.demo.speculative import SpeculativeDecoder
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls


@pytest.fixture
def debug_graphs(monkeypatch):
    """A replay is a call of the captured function, as SGLang makes it after the backend's preparation."""
    monkeypatch.setattr(demo.CpuGraph, "replay", lambda graph: graph._run())


def test_decoding_is_what_it_is_with_graphs(debug_graphs):
    """Draft round, target_verify and draft_extend: every draft is right, and the tokens are greedy decoding's."""
    plain = demo.decode_plain(demo.Engine(PROMPTS, num_steps=3), 12)
    tokens, accepted = SpeculativeDecoder(demo.Engine(PROMPTS, num_steps=3)).decode(12)
    assert tokens == plain
    assert set(accepted) == {4}


def eager(backend, lengths, slots):
    """A decode batch of these requests."""
    return forward_batch(Batch("decode", lengths, slots, backend.writer.req_to_token.numpy(), 64, 0), ForwardMode.DECODE)


def first_layer(backend, batch):
    """The head of a captured forward on the host: SGLang's call inside the graph, if it has one, and the first layer's."""
    calls.at_graph_head(backend, batch)
    return backend.get_indexer_metadata(0, batch).attn_metadata


def test_a_replay_writes_the_metadata_of_its_own_batch(make_runner):
    """Whichever batch size was captured last, and whatever ran eagerly since."""
    backend = create_backend(make_runner())
    backend.init_cuda_graph_state(3, 3)
    batches = [static_batch(requests, requests, ForwardMode.DECODE) for requests in (3, 2, 1)]
    for batch in batches:
        calls.before_capture(backend, batch)
        first_layer(backend, batch)
    for batch in batches:
        requests = batch.batch_size
        backend.init_forward_metadata(eager(backend, [400, 300], [7, 8]))
        batch.seq_lens.copy_(torch.arange(1, requests + 1) * 50)
        batch.req_pool_indices.copy_(torch.arange(requests) + 1)
        calls.before_replay(backend, batch)
        metadata = first_layer(backend, batch)
        assert metadata.cache_seqlens_int32.tolist() == batch.seq_lens.tolist()
        table = backend.req_to_token_pool.req_to_token
        assert metadata.real_page_table[requests - 1, 0] == table[requests, 0] // 64


def test_an_eager_forward_after_a_replay_launches_nothing_of_the_graph(make_runner):
    """A real graph makes its launch by itself, so the one set up for a replay may still be pending when others run eagerly."""
    backend = create_backend(make_runner())
    backend.init_cuda_graph_state(2, 2)
    batch = static_batch(2, 2, ForwardMode.DECODE)
    calls.before_capture(backend, batch)
    captured = first_layer(backend, batch)
    calls.before_replay(backend, batch)
    batch.seq_lens.copy_(torch.tensor([60, 70]))
    alone = eager(backend, [9], [4])
    backend.init_forward_metadata(alone)
    assert backend.get_indexer_metadata(0, alone).attn_metadata.cache_seqlens_int32.tolist() == [9]
    assert captured.cache_seqlens_int32.tolist() == [1, 1]


def test_a_captured_round_after_an_eager_one(monkeypatch):
    """The eager round left its own metadata with the step backends; both rounds draft what a rank without graphs drafts."""
    want = Rank(monkeypatch, PROMPTS, 3).draft(None)
    rank = Rank(monkeypatch, PROMPTS, 3)
    backend, static = rank.backend, rank.batch()
    lengths = static.seq_lens.clone()

    def run_captured():
        batch = replace(static, positions=static.positions.clone())
        calls.at_round_head(backend, batch)
        return rank.forward(batch)

    backend.init_cuda_graph_state(4, 4)
    static.seq_lens.fill_(1)
    calls.before_round_capture(backend, static)
    run_captured()
    assert torch.equal(rank.draft(None), want)
    static.seq_lens.copy_(lengths)
    calls.before_round_replay(backend, static)
    assert torch.equal(run_captured(), want)
    for step in backend.attn_backends:
        assert step.forward_metadata.real_page_table.data_ptr() == backend.captured.current.buffers.real_page_table.data_ptr()
