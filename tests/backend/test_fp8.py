"""FP8 KV: the prefill metadata that dequantising needs, and that flashmla_kv's schedule fits the rows that come."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardBatch, ForwardMode
from nsa_backend.attention.flashmla_kv import FlashMlaKv
from nsa_backend.attention.fp8_prefill import ragged_kv
from nsa_backend.attention.sparse_inputs import sparse_inputs
from nsa_backend.config import AttentionConfig
from nsa_backend.metadata.prefill import prefill_metadata
from nsa_backend.registration import create_backend


def prefill_batch(runner, prefix: list[int], new: list[int]) -> ForwardBatch:
    lengths = torch.tensor([a + b for a, b in zip(prefix, new, strict=True)])
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(new),
        input_ids=None,
        req_pool_indices=torch.arange(len(new)) * 3 + 1,
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=None,
        extend_seq_lens=torch.tensor(new),
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=prefix,
    )


def fp8_metadata(make_runner, prefix, new, *, impl="flashmla_sparse", dense=False):
    """Metadata of a prefill as on an FP8 cache, and the slots of every request."""
    runner = make_runner()
    backend = create_backend(runner)
    attention = replace(backend.config.attention, kv_cache_dtype=torch.float8_e4m3fn)
    backend.writer.config = replace(backend.config, attention=attention, prefill_impl=impl)
    table = runner.req_to_token_pool.req_to_token
    slots = [table[3 * r + 1, : a + b] for r, (a, b) in enumerate(zip(prefix, new, strict=True))]
    return prefill_metadata(backend.writer, prefill_batch(runner, prefix, new), dense=dense), slots


def test_slots_of_all_tokens_in_ragged_order(make_runner):
    metadata, slots = fp8_metadata(make_runner, [70, 0, 5], [3, 130, 1], impl="flashmla_kv")
    assert torch.equal(metadata.page_table_1_flattened, torch.cat(slots))
    assert metadata.topk_indices_offset is None


def test_ragged_rows_stand_for_the_same_tokens(make_runner):
    """Row t of the dequantised KV holds the token whose slot is page_table_1_flattened[t]."""
    metadata, slots = fp8_metadata(make_runner, [70, 0, 5], [3, 130, 1])
    first_rows = (0, 3, 133)
    for row, mine in zip(first_rows, slots, strict=True):
        begin = int(metadata.topk_indices_offset[row])
        assert torch.equal(metadata.page_table_1_flattened[begin : begin + len(mine)], mine)
    assert metadata.topk_indices_offset.shape == (134,)


def test_without_a_prefix_nothing_is_dequantised(make_runner):
    metadata, _ = fp8_metadata(make_runner, [0, 0], [4, 9])
    assert metadata.page_table_1_flattened is None
    k, k_rope = torch.randn(13, 1, 8), torch.randn(13, 1, 4)
    kv = ragged_kv(None, metadata, k, k_rope)
    assert torch.equal(kv, torch.cat([k, k_rope], -1))
    assert metadata.topk_indices_offset.tolist() == [0] * 4 + [4] * 9


def test_dense_prefill_reads_slots(make_runner):
    metadata, slots = fp8_metadata(make_runner, [64, 1], [3, 3], dense=True)
    assert metadata.topk_indices_offset is None
    assert torch.equal(metadata.page_table_1_flattened, torch.cat(slots))


class FlashMla:
    """FlashMLA's two functions as their shapes are documented: a schedule belongs to the rows that it was made for."""

    def __init__(self):
        self.scheduled: list[list[int]] = []

    def get_mla_metadata(self, *, cache_seqlens, **heads):
        self.scheduled.append(cache_seqlens.tolist())
        return torch.zeros(132, 8, dtype=torch.int32), torch.arange(len(cache_seqlens) + 1, dtype=torch.int32)

    def flash_mla_with_kvcache(self, *, q, cache_seqlens, num_splits, indices, **rest):
        assert num_splits.shape == (q.shape[0] + 1,)
        assert cache_seqlens.shape == indices.shape[:1] == q.shape[:1]
        return q[..., :512] + cache_seqlens.view(-1, 1, 1, 1), None


@pytest.mark.parametrize(("rows", "scheduled"), [(4, []), (3, [[4, 5, 6]])])
def test_a_schedule_fits_the_rows_that_came(make_runner, monkeypatch, rows, scheduled):
    """The metadata has four rows, one of them DP attention's padding, which SGLang hands over or not."""
    flash_mla = FlashMla()
    monkeypatch.setattr(adapter, "flash_mla", lambda: flash_mla)
    config = AttentionConfig(device_sm=90, num_heads=64, kv_cache_dtype=torch.float8_e4m3fn, index_topk=64)
    attention = FlashMlaKv(config)
    runner = make_runner(index_topk=64)
    backend = create_backend(runner)
    backend.init_forward_metadata(prefill_batch(runner, [3, 4, 5, 6], [1, 1, 1, 1]))
    padded = torch.tensor([4, 5, 6, 0], dtype=torch.int32)
    metadata = attention.prepare(replace(backend.forward_metadata, nsa_cache_seqlens_int32=padded))
    assert flash_mla.scheduled == [[4, 5, 6, 0]]
    layer = SimpleNamespace(tp_q_head_num=64, v_head_dim=512, head_dim=576, scaling=0.5, logit_cap=0.0)
    kv_cache, slots = torch.zeros(64, 1, 656, dtype=torch.uint8), torch.full((rows, 64), -1, dtype=torch.int32)
    query = torch.zeros(rows, 64 * 576)
    out = attention.forward(sparse_inputs(query, None, layer, kv_cache, slots, metadata))
    assert out.shape == (rows, 64, 512)
    assert out[:, 0, 0].tolist() == [4, 5, 6, 0][:rows]
    assert flash_mla.scheduled[1:] == scheduled
