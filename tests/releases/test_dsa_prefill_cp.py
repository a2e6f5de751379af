"""Metadata of the rows that a rank of prefill context parallel computes, against SGLang's own division and its own windows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import MODES, forward_batch, prefill_batch, random_batch
from divided_prefill import rank_of
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from properties import tried
from server_words import SPECULATIVE
from sglang.srt.batch_overlap import two_batch_overlap
from sglang.srt.layers.cp import base, zigzag
from sglang.srt.layers.cp.interleave import InterleaveCPStrategy, interleave_rows_per_request

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardBatch, ForwardMode
from nsa_backend.metadata.views import NSAMetadata
from nsa_backend.refusals import refusals
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls

RUNS = tried(15, suppress_health_check=list(HealthCheck))


def metadata(runner: SimpleNamespace, batch: ForwardBatch) -> NSAMetadata:
    backend = create_backend(runner)
    backend.init_forward_metadata(batch)
    return backend.forward_metadata


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@RUNS
def test_a_rank_has_what_sglang_divides_off_for_it(make_runner, data, seed):
    """Row by row; what exists once a request is that of all ranks."""
    runner = make_runner()
    requests = data.draw(st.integers(1, 8))
    prefix = data.draw(st.lists(st.integers(0, 200), min_size=requests, max_size=requests))
    new = data.draw(st.lists(st.integers(1, 90), min_size=requests, max_size=requests))
    batch, ranks = prefill_batch(runner, prefix, new, seed), data.draw(st.integers(2, 8))
    whole = metadata(runner, batch)
    for rank in range(ranks):
        with rank_of(ranks, rank):
            mine, strategy = metadata(runner, batch), base.get_cp_strategy()
            if sum(new) < ranks:
                assert mine.nsa_seqlens_expanded.tolist() == whole.nsa_seqlens_expanded.tolist()
                continue
            rows = strategy.build_metadata(sum(new), None, new).per_rank_actual_token[rank]
            for name in ("nsa_seqlens_expanded", "nsa_cache_seqlens_int32", "token_to_batch_idx", "table_rows"):
                assert torch.equal(getattr(mine, name), strategy.shard_local_tokens(getattr(whole, name))), name
                assert len(getattr(mine, name)) == rows
            for window, all_windows in zip(mine.indexer_k_start_end, whole.indexer_k_start_end, strict=True):
                assert torch.equal(window, strategy.shard_local_tokens(all_windows))
        assert mine.nsa_extend_seq_lens_list == interleave_rows_per_request(new, rank, ranks)
        assert mine.cu_seqlens_q.tolist() == np.cumsum([0, *mine.nsa_extend_seq_lens_list]).tolist()
        assert mine.nsa_cu_seqlens_k.tolist() == np.cumsum([0, *mine.nsa_cache_seqlens_int32.tolist()]).tolist()
        assert mine.nsa_cu_seqlens_q.tolist() == list(range(rows + 1))
        for name in ("cache_seqlens_int32", "cu_seqlens_k", "real_page_table", "indexer_seq_lens", "indexer_seq_lens_cpu"):
            assert torch.equal(getattr(mine, name), getattr(whole, name)), name


def test_windows_are_those_of_sglangs_own_backend(make_runner, monkeypatch):
    """Where every request has a row on the rank; of others, SGLang's own leaves out the keys, and ours does not."""
    runner, (own, _) = make_runner(), calls.builtin()
    monkeypatch.setattr(f"{own.__module__}.can_dsa_prefill_cp_interleave", lambda batch: True)
    batch = prefill_batch(runner, [0, 130, 7], [70, 12, 33])
    for rank in range(4):
        with rank_of(4, rank):
            windows, owners = own._cal_indexer_k_start_end(SimpleNamespace(device="cpu"), batch, [0, 1, 2])
            mine = metadata(runner, batch)
        assert [window.tolist() for window in mine.indexer_k_start_end] == [window.tolist() for window in windows]
        assert mine.token_to_batch_idx.tolist() == owners.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_only_prefills_are_divided(make_runner, mode):
    runner = make_runner()
    forward_mode = ForwardMode.DECODE if mode == "draft_decode" else ForwardMode[mode.upper()]
    batch = forward_batch(random_batch(runner, mode, 5, 1, 3), forward_mode)
    batch.input_ids = torch.zeros(20, dtype=torch.long)
    with rank_of(2, 1):
        assert adapter.rows_of_rank(batch) is None
        assert adapter.rows_of_rank(prefill_batch(runner, [0], [5])) == slice(1, None, 2)
    assert adapter.rows_of_rank(prefill_batch(runner, [0], [5])) is None


CP = {"enable_prefill_cp": True, "cp_strategy": "interleave"}


@pytest.mark.parametrize("drafts", [(), SPECULATIVE], ids=["n0", "n3"])
def test_a_server_that_sglang_has_resolved_is_served(resolve, drafts):
    args = adapter.resolved(
        resolve("--attention-backend", "dsa", "--tp-size", "2", "--enable-prefill-cp", "--cp-strategy", "interleave", *drafts)
    )
    assert (args.attn_cp_size, args.attn_dp_size, str(args.cuda_graph_config.prefill.backend)) == (2, 1, "disabled")
    assert refusals(args) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cp_strategy": "zigzag"}, "--cp-strategy zigzag: a rank then has two blocks"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap beside --enable-prefill-cp: its halves"),
        (
            {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1},
            "--speculative-algorithm EAGLE3 beside --enable-prefill-cp: a dense draft",
        ),
        (
            {"dsa_prefill_backend": "trtllm", "kv_cache_dtype": "fp8_e4m3"},
            "trtllm on an FP8 KV cache beside --enable-prefill-cp: SGLang then leaves RoPE",
        ),
    ],
)
def test_what_is_not_served_beside_it(arguments, change, sentence):
    (found,) = refusals(arguments(**CP | change))
    assert found.startswith(f"nsa_backend does not serve {sentence}")
    assert "\n" not in found
    assert refusals(arguments(**CP)) == refusals(arguments(**change | {"enable_prefill_cp": False, "cp_strategy": None})) == []


def test_sglang_itself_does_not_do_what_is_refused():
    """Each of these refusals goes once SGLang does."""
    assert (
        zigzag.ZigzagCPStrategy.materialize_full_indexer_k_cache
        is base.ContextParallelStrategy.materialize_full_indexer_k_cache
    )
    with pytest.raises(NotImplementedError, match="does not support dense K/V"):
        InterleaveCPStrategy(2).materialize_full_kv(None)
    assert "attn_cp_metadata" not in Path(two_batch_overlap.__file__).read_text()
