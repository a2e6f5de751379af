"""Logits of target_verify two rows at a time, and of all rows at once: SGLang's own indexer over a DeepGEMM in torch."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from batches import MODES, forward_batch
from metadata_reference import Batch
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.layers.attention.dsa.paged_mqa_logits_backend import DSAPagedMQALogitsBackend

from nsa_backend import backend as backend_module
from nsa_backend import config
from nsa_backend.adapters import index_scores
from nsa_backend.adapters.installed import adapter
from nsa_backend.config import BackendConfig
from nsa_backend.kernels.metadata_torch import paged_mqa_schedule
from nsa_backend.registration import create_backend

TOPK, WIDTH, PAGES, HEADS, NUM_SMS, D = 64, 700, 64, 4, 132, 4
SURPLUS_LAST = adapter.schedule_surplus_last(90)


class DeepGemm:
    """`fp8_paged_mqa_logits` on Hopper, by its source: rows of a group are scored as far as the last one's pages reach.

    What lies beyond is memory that nobody wrote, here a score that beats all others.
    """

    def __init__(self) -> None:
        self.pages_read = self.calls = 0

    def fp8_paged_mqa_logits(self, q, kv_cache, weights, context_lens, block_table, schedule, max_len, clean_logits=False):
        self.calls += 1
        groups, next_n, heads, dim = q.shape
        assert next_n in (1, 2)
        assert context_lens.shape == (groups, next_n)
        assert context_lens.is_contiguous()
        assert block_table.shape[0] == groups
        assert block_table.stride(1) == 1
        assert weights.shape == (groups * next_n, heads)
        assert not clean_logits
        assert torch.equal(schedule, paged_mqa_schedule(context_lens[:, -1], NUM_SMS, SURPLUS_LAST))
        keys = kv_cache.view(PAGES, -1)[:, : 64 * dim].view(PAGES, 64, dim).float()
        logits = torch.full((groups, next_n, max_len), float("inf"))
        for group, lens in enumerate(context_lens.tolist()):
            pages = block_table[group, : -(-lens[-1] // 64)]
            self.pages_read += len(pages)
            scores = (q[group].float() @ keys[pages].flatten(0, 1).T).relu()  # [next_n, heads, tokens]
            weighed = weights.view(groups, next_n, heads)[group][..., None] * scores
            logits[group, :, : 64 * len(pages)] = weighed.sum(1)
        return logits.flatten(0, 1)

    def get_paged_mqa_logits_metadata(self, context_lens, page_size, num_sms):
        return paged_mqa_schedule(context_lens[:, -1], num_sms, SURPLUS_LAST)


@pytest.fixture
def select(make_runner, monkeypatch):
    """Returns a function of a mode, lengths and whether pairs are asked for: the indexer's selection, and pages read."""
    from_runner, deep_gemm = BackendConfig.from_runner, DeepGemm()
    monkeypatch.setattr(
        BackendConfig, "from_runner", lambda runner: replace(from_runner(runner), num_sms=NUM_SMS, surplus_last=SURPLUS_LAST)
    )
    monkeypatch.setattr(backend_module, "check_schedule", lambda *rule: None)
    monkeypatch.setattr(dsa_indexer, "_is_cuda", True)
    pool = SimpleNamespace(page_size=64, index_page_size=64)
    monkeypatch.setattr(dsa_indexer, "get_token_to_kv_pool", lambda: pool)
    monkeypatch.setattr(dsa_indexer, "resolve_fp8_paged_mqa_logits_fn", lambda: deep_gemm.fp8_paged_mqa_logits, raising=False)
    plan = deep_gemm.get_paged_mqa_logits_metadata  # of chunks of more rows than SMs, on 0.5.23
    monkeypatch.setattr(dsa_indexer, "resolve_paged_mqa_logits_metadata_fn", lambda: plan, raising=False)
    monkeypatch.setattr(dsa_indexer, "deep_gemm", deep_gemm, raising=False)

    def selected(
        mode: str, lengths: list[int], pairs: bool | None, drafts: int = D, padding: int = 0
    ) -> tuple[torch.Tensor, int]:
        monkeypatch.delenv("NSA_BACKEND_PAIRED_LOGITS", raising=False)
        if pairs is not None:
            monkeypatch.setenv("NSA_BACKEND_PAIRED_LOGITS", str(int(pairs)))
        runner = make_runner(table_width=WIDTH, num_steps=drafts - 1, index_topk=TOPK)
        table = runner.req_to_token_pool.req_to_token
        pages = torch.stack([torch.randperm(PAGES, generator=torch.Generator().manual_seed(row)) for row in range(len(table))])
        table.copy_((64 * pages[..., None] + torch.arange(64)).flatten(1)[:, : table.shape[1]])
        backend = create_backend(runner)
        slots = list(range(1, len(lengths) + 1))
        batch = Batch(mode, lengths, slots, table.numpy(), TOPK, 0, num_steps=drafts - 1, num_draft_tokens=drafts)
        forward = forward_batch(batch, MODES[mode])
        backend.init_forward_metadata(forward)
        generator = torch.Generator().manual_seed(7)
        rows = len(lengths) * drafts + padding
        q = torch.randint(-3, 4, (rows, HEADS, 128), generator=generator)  # sums of small integers are exact
        weights = torch.randint(1, 5, (rows, HEADS, 1), generator=generator).float()
        index_k = torch.randint(0, 4, (PAGES, 64 * 132), generator=generator, dtype=torch.uint8)
        indexer = SimpleNamespace(
            paged_mqa_logits_backend=DSAPagedMQALogitsBackend.DEEPGEMM, sm_count=NUM_SMS, n_heads=HEADS, index_topk=TOPK,
            _get_index_k_read_buffer=lambda pool, layer_id: index_k, _mask_init_and_local_tokens=lambda *scores: None,
        )  # fmt: skip
        metadata = backend.get_indexer_metadata(0, forward)
        deep_gemm.pages_read = deep_gemm.calls = 0
        found = dsa_indexer.Indexer._get_topk_paged(indexer, forward, 0, q, weights, metadata)
        return found.sort(dim=1).values, deep_gemm.pages_read

    return selected


@pytest.mark.parametrize(
    "lengths", [[1], [60, 61, 62, 63, 64], [300, 1, 690, 59, 128], [WIDTH - 4, WIDTH, 1], [255, 256, 257], [500] * 40]
)
def test_pairs_select_what_single_rows_select(select, lengths):
    """Where a row of a pair is a page longer than the other, at the context limit, and more rows than SMs."""
    single, pages = select("target_verify", lengths, pairs=False)
    paired, pages_of_pairs = select("target_verify", lengths, pairs=True)
    assert torch.equal(single, paired)
    assert (single >= 0).any(dim=1).all()
    assert pages_of_pairs <= pages / 2 + len(lengths)


def test_padding_rows_select_nothing(select):
    """As under DP attention, where a rank's rows are as many as those of another."""
    single, _ = select("target_verify", [70, 9, 300], False, padding=5)
    paired, _ = select("target_verify", [70, 9, 300], True, padding=5)
    assert torch.equal(single, paired)
    assert (paired[-5:] == -1).all()
    assert (paired[:-5] >= 0).any(dim=1).all()


@pytest.mark.parametrize(("mode", "drafts"), [("target_verify", 3), ("draft_extend_v2", 4)])
def test_rows_that_are_no_pairs_stay_single(select, mode, drafts):
    single = select(mode, [70, 9, 300], False, drafts)
    paired = select(mode, [70, 9, 300], True, drafts)
    assert torch.equal(single[0], paired[0])
    assert single[1] == paired[1]


@pytest.mark.parametrize(
    ("lengths", "release", "device_sm", "paired"),
    [
        ([700, 640], "0.5.23", 90, True),
        ([700], "0.5.23", 90, False),  # of one request alone single rows are faster up to 4096 tokens
        ([700, 640], "0.5.17", 90, False),  # whose DeepGEMM was not timed
        ([700, 640], "0.5.23", 100, False),
    ],
)
def test_who_asks_for_nothing_has_pairs_where_they_were_timed(select, monkeypatch, lengths, release, device_sm, paired):
    single, pages = select("target_verify", lengths, False)
    monkeypatch.setattr(config, "installed", lambda: release)
    monkeypatch.setattr(config, "_pairs_from", lambda of_cpu, rule=config._pairs_from: rule(device_sm))
    found, pages_read = select("target_verify", lengths, None)
    assert torch.equal(single, found)
    assert pages_read == (pages / 2 if paired else pages)


@pytest.mark.parametrize(("pairs", "pieces"), [(False, 3), (True, 2)])
@pytest.mark.skipif(not index_scores.makes_pieces(), reason="the release's indexer makes one call of any number of rows")
def test_more_rows_than_sms_are_scored_in_one_call(select, monkeypatch, pairs, pieces):
    """Through the schedule of the launch; SGLang's indexer makes one for each piece."""
    lengths = [500, 61, 690, 1, 128, 255, 300] * 10
    in_pieces, _ = select("target_verify", lengths, pairs)
    assert dsa_indexer.deep_gemm.calls == pieces
    for name in index_scores.CALLS:
        monkeypatch.setattr(dsa_indexer, name, partial(index_scores.at_once, getattr(dsa_indexer, name)))
    whole, _ = select("target_verify", lengths, pairs)
    assert dsa_indexer.deep_gemm.calls == 1
    assert torch.equal(in_pieces, whole)


def test_no_rows_are_left_to_sglang(monkeypatch):
    """As of a rank of DP attention without a request: DeepGEMM takes one row at least."""
    monkeypatch.setattr(dsa_indexer, "resolve_fp8_paged_mqa_logits_fn", lambda: len, raising=False)
    given = []
    index_scores.at_once(lambda scores, q: given.append(scores(q)), lambda q: "SGLang's", torch.empty(0, 1, 4, 128))
    index_scores.at_once(lambda scores, q: given.append(scores(q)), lambda q: "SGLang's", torch.empty(5, 1, 4, 128))
    assert given == ["SGLang's", 5]


@pytest.mark.parametrize("device_sm", [0, 90, 100])
def test_pieces_stay_where_a_kernel_needs_them(monkeypatch, device_sm):
    hooked = []
    monkeypatch.setattr(index_scores, "hook", lambda target, *others: hooked.append(target))
    adapter.score_at_once(device_sm)
    assert len(hooked) == (2 if device_sm == 90 and index_scores.makes_pieces() else 0)
    assert all(getattr(import_module(target.rpartition(".")[0]), target.rpartition(".")[2]) for target in hooked)


def test_deep_gemm_scores_as_the_model_of_it_does():
    """Its header still takes the length of a group's last row for all of them, and no more than two rows."""
    folder = Path(find_spec("deep_gemm").submodule_search_locations[0]) / "include/deep_gemm"
    header = (folder / "scheduler/sm90_paged_mqa_logits.cuh").read_text()
    assert "(is_context_lens_2d ? q_idx * next_n + next_n - 1 : q_idx)" in header
    assert "(kIsContextLens2D ? q_idx * kNextN + kNextN - 1 : q_idx)" in header
    source = inspect.getsource(dsa_indexer.Indexer._get_topk_paged)
    assert "ctx_2d.shape == (B, next_n)" in source
    assert (
        source.count("metadata.get_seqlens_int32()") == 3
    )  # lengths of decode, the number of groups, and CuTe's, of Blackwell
