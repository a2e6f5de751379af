"""FP8 KV: the prefill metadata that dequantising needs."""

from __future__ import annotations

from dataclasses import replace

import torch
from batches import prefill_batch

from nsa_backend.attention.fp8 import ragged_kv
from nsa_backend.metadata.prefill import prefill_metadata
from nsa_backend.registration import create_backend


def fp8_metadata(make_runner, prefix, new, *, impl="flashmla_sparse", dense=False):
    """Metadata of a prefill as on an FP8 cache, and the slots of every request."""
    runner = make_runner()
    backend = create_backend(runner)
    attention = replace(backend.config.attention, kv_cache_dtype=torch.float8_e4m3fn)
    backend.writer.config = replace(backend.config, attention=attention, prefill_impl=impl)
    batch, table = prefill_batch(runner, prefix, new), runner.req_to_token_pool.req_to_token
    slots = [table[row, :length] for row, length in zip(batch.req_pool_indices, batch.seq_lens, strict=True)]
    return prefill_metadata(backend.writer, batch, dense=dense), slots


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
