"""Draft rounds outside CUDA graphs under DP attention: SGLang pads every step's rows after the round was planned."""

from types import SimpleNamespace

import pytest
import torch
from batches import forward_batch
from metadata_reference import Batch
from padded_rank import PROMPTS, Attention, Rank

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls


@pytest.mark.parametrize("num_steps", [2, 4])
@pytest.mark.parametrize("rows", [3, 4, 8])
def test_a_rank_with_fewer_requests_than_its_peer(monkeypatch, num_steps, rows):
    """Each step's attention gets lengths for the padding rows too, and the real rows draft what they draft alone."""
    alone, padded = (Rank(monkeypatch, PROMPTS, num_steps) for _ in range(2))
    want = alone.draft(None)
    assert torch.equal(padded.draft([3, rows]), want)
    assert [attention.rows for attention in padded.attentions] == [[rows]] * (num_steps - 1)
    assert torch.equal(padded.draft([3, rows]), want)


def test_an_idle_rank_beside_ranks_with_requests(monkeypatch):
    """Its rows are padding alone; what its step backends hold belongs to an earlier round, or is nothing."""
    rank = Rank(monkeypatch, PROMPTS, 3)
    rank.idle([0, 2])
    rank.draft([3, 3])
    for peer in (2, 7):
        rank.idle([0, peer])
        for step in rank.backend.attn_backends:
            metadata = step.forward_metadata
            assert metadata.cache_seqlens_int32.tolist() == [1] * peer
            assert sum(metadata.nsa_extend_seq_lens_list) == peer


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2])
def test_rows_that_are_no_whole_request(make_runner, monkeypatch, mode, fused):
    """Rows are padded to a multiple of the attention TP size too, which need not hold a whole number of requests."""
    backend, d, padding = create_backend(make_runner(num_steps=3)), 4, 3
    monkeypatch.setattr(adapter, "fuse_topk", lambda: fused)
    attention = backend.decode_attention = Attention(backend.decode_attention)
    pool = backend.token_to_kv_pool
    pool.get_key_buffer = lambda layer_id: torch.randn(2**20, 1, 12, generator=torch.Generator().manual_seed(1))
    batch = forward_batch(
        Batch("decode", [30, 40], [3, 4], backend.writer.req_to_token.numpy(), 64, 0, num_draft_tokens=d), mode
    )
    for name, value in calls.batch_fields(SimpleNamespace(runner=make_runner(), backend=backend)).items():
        setattr(batch, name, value if name != "token_to_kv_pool" else pool)
    backend.init_forward_metadata(batch)
    real = len(backend.forward_metadata.nsa_cache_seqlens_int32)
    lengths = backend.forward_metadata.nsa_cache_seqlens_int32[:, None]
    slots = torch.where(torch.arange(64) < lengths, torch.arange(64), -1).to(torch.int32)
    slots = torch.cat([slots, slots.new_full((padding, 64), -1)])
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=4, v_head_dim=8, head_dim=12, scaling=0.5, logit_cap=0.0)
    query = torch.randn(real + padding, 4 * 12)
    forward = backend.forward_decode if mode.is_decode() else backend.forward_extend
    for _ in range(2):  # two layers
        out = forward(query, None, None, layer, batch, save_kv_cache=False, topk_indices=slots)
        assert out.shape == (real + padding, 4, 8)
        assert out[real:].eq(0).all()
    assert attention.rows == [real + padding] * 2
