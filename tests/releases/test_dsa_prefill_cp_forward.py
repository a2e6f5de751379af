"""Prefills that ranks divide among them: with SGLang's own strategy, outputs and KV are those of one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from divided_prefill import rank_of, record

from nsa_backend.adapters.installed import adapter
from nsa_backend.demo.engine import Engine

LENGTHS = {
    "one prompt": [75],
    "several": [150, 9, 70, 33],
    "shorter than the ranks are many": [3, 200, 2, 1, 2],  # some ranks have no row of some prompts
    "not divided at first": [2],
}


@pytest.fixture(autouse=True)
def no_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def prefilled(lengths: list[int], change=lambda backend: None) -> tuple[list[torch.Tensor], Engine]:
    """Logits of the rows of this rank in each of two chunks, the second on a cached prefix."""
    engine = Engine(prompts(lengths), num_steps=1, padding=0)
    change(engine.target.backend)
    outputs = record(engine)
    engine.prefill(engine.target, engine.prompts)
    return outputs, engine


def check(ranks: int, lengths: list[int], change=lambda backend: None) -> None:
    whole, alone = prefilled(lengths, change)
    for rank in range(ranks):
        with rank_of(ranks, rank):
            divided, engine = prefilled(lengths, change)
        assert len(divided) == len(whole) == 2
        for mine, everything in zip(divided, whole, strict=True):
            wanted = everything[rank::ranks] if len(everything) >= ranks else everything
            torch.testing.assert_close(mine, wanted)
        for name in ("kv", "index_k"):
            got, kept = getattr(engine.target.pool, name), getattr(alone.target.pool, name)
            torch.testing.assert_close(got, kept, equal_nan=True)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_ranks_compute_is_what_one_computes(ranks, lengths):
    check(ranks, lengths)


def test_with_positions_in_place_of_slots():
    def unfused(backend) -> None:
        backend.fuse_topk = False

    check(2, LENGTHS["several"], unfused)


@pytest.mark.parametrize("fused", [True, False])
def test_on_fp8_kv_that_is_dequantised(monkeypatch, fused):
    """Top-k counts rows of a copy of all requests' KV: of all gathered tokens, and then of a prefix too."""
    monkeypatch.setattr(adapter, "dequantize_k_cache_paged", lambda cache, slots: cache[slots])

    def on_fp8(backend) -> None:
        attention = replace(backend.config.attention, kv_cache_dtype=torch.float8_e4m3fn)
        backend.config = backend.writer.config = replace(backend.config, attention=attention, prefill_impl="flashmla_sparse")
        backend.fuse_topk = fused

    for lengths in LENGTHS.values():
        check(3, lengths, on_fp8)


def test_a_rank_of_a_divided_prefill_attends_with_its_rows_alone():
    """Nothing is computed for the others, and SGLang's padding has no length."""
    lengths = []

    def recorded(backend) -> None:
        forward = backend.prefill_attention.forward
        backend.prefill_attention.forward = lambda inputs: lengths.append(inputs.nsa_cache_seqlens.tolist()) or forward(inputs)

    with rank_of(4, 3):
        prefilled([10], recorded)
    assert lengths == [[4, 0, 0, 0], [9, 0, 0, 0]]


def test_no_divided_prefill_is_dense():
    with rank_of(2, 0):
        engine = Engine(prompts([5]), num_steps=1)
    assert engine.target.backend.config.split_prefill
    assert not Engine(prompts([5]), num_steps=1).target.backend.config.split_prefill
