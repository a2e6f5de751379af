"""NSA_BACKEND_CHECK=1: a value outside its pool is named before anything reads it, eager and captured alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from batches import MODES

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardBatch, ForwardMode
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls

WIDTH, POOL, KV_SLOTS = 200, 10, 2**20
D = 4

BAD = [
    ("req_pool_indices", POOL + 1, rf"request row 1: req_pool_indices is {POOL + 1}, which is outside the request pool of"),
    ("req_pool_indices", -1, "request row 1: req_pool_indices is -1"),
    ("seq_lens", WIDTH + 1, f"request row 1: seq_lens is {WIDTH + 1}, which is outside the {WIDTH} tokens"),
    ("seq_lens", -3, "request row 1: seq_lens is -3"),
    ("slot", KV_SLOTS, rf"request row 1: token 7 has KV slot {KV_SLOTS}, which is outside the KV pool of {KV_SLOTS} slots"),
    ("slot", -1, "request row 1: token 7 has KV slot -1"),
]


@pytest.fixture
def checked(make_runner, monkeypatch):
    """Returns a runner of which every backend checks values."""
    monkeypatch.setenv("NSA_BACKEND_CHECK", "1")
    return make_runner(table_width=WIDTH, pool_size=POOL, num_steps=D - 1)


def values(runner) -> dict[str, torch.Tensor]:
    return {
        "seq_lens": torch.tensor([30, 40], dtype=calls.LENGTHS_DTYPE),
        "req_pool_indices": torch.tensor([2, 5]),
        "accept": torch.tensor([1, D], dtype=torch.int32),
    }


def spoil(runner, found: dict[str, torch.Tensor], field: str, value: int) -> None:
    if field == "slot":
        runner.req_to_token_pool.req_to_token[5, 7] = value
    else:
        found[field][1] = value


def eager(backend, mode: ForwardMode, found: dict[str, torch.Tensor]) -> None:
    accept = found["accept"].tolist()
    backend.init_forward_metadata(
        ForwardBatch(
            forward_mode=mode, batch_size=2, input_ids=None, req_pool_indices=found["req_pool_indices"],
            seq_lens=found["seq_lens"], seq_lens_cpu=found["seq_lens"].clone(), seq_lens_sum=0, out_cache_loc=torch.arange(6),
            extend_seq_lens=found["accept"], extend_prefix_lens_cpu=[0, 0],
            extend_seq_lens_cpu=accept if mode == ForwardMode.EXTEND or adapter.is_ragged_draft_extend(mode) else [D, D],
        )
    )  # fmt: skip


def static(mode: ForwardMode, found: dict[str, torch.Tensor]) -> ForwardBatch:
    """A graph runner's buffers, which hold the values."""
    return ForwardBatch(
        forward_mode=mode, batch_size=2, input_ids=None, req_pool_indices=found["req_pool_indices"],
        seq_lens=found["seq_lens"], seq_lens_sum=0, out_cache_loc=torch.arange(6),
        positions=torch.zeros(2 if mode.is_decode() else 2 * D), spec_info=SimpleNamespace(num_accept_tokens=found["accept"]),
    )  # fmt: skip


def captured(backend, mode: ForwardMode, found: dict[str, torch.Tensor], spoiled) -> None:
    batch = static(mode, found)
    backend.init_cuda_graph_state(2, len(batch.positions))
    calls.before_capture(backend, batch)
    spoiled()
    calls.before_replay(backend, batch)


@pytest.mark.parametrize("mode", [*MODES.values(), ForwardMode.EXTEND])
@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_eager(checked, mode, field, value, message):
    found = values(checked)
    backend = create_backend(checked)
    eager(backend, mode, found)
    spoil(checked, found, field, value)
    with pytest.raises(ValueError, match=f"NSA_BACKEND_CHECK=1: {message}"):
        eager(backend, mode, found)


COUNTS = [
    (mode, "accept", count, f"request row 1: extend_lens is {count}, which is outside the {2 * D} query rows")
    for mode in MODES.values()
    if adapter.is_ragged_draft_extend(mode)
    for count in (-1, 2 * D + 1)
]
"""Accepted tokens, where a mode counts them."""


@pytest.mark.parametrize(("mode", "field", "value", "message"), [*((m, *bad) for m in MODES.values() for bad in BAD), *COUNTS])
def test_captured(checked, mode, field, value, message):
    found = values(checked)
    captured(create_backend(checked), mode, found, lambda: None)
    with pytest.raises(ValueError, match=f"NSA_BACKEND_CHECK=1: {message}"):
        captured(create_backend(checked), mode, found, lambda: spoil(checked, found, field, value))


def captured_round(runner) -> tuple[dict[str, torch.Tensor], NativeSparseAttnMultiStepBackend, ForwardBatch]:
    found = values(runner)
    multi_step, batch = NativeSparseAttnMultiStepBackend(runner, 1, D - 1), static(ForwardMode.DECODE, found)
    multi_step.init_cuda_graph_state(2, 2)
    calls.before_round_capture(multi_step, batch)
    return found, multi_step, batch


@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_a_draft_round(checked, field, value, message):
    found, multi_step, batch = captured_round(checked)
    calls.before_round_replay(multi_step, batch)
    spoil(checked, found, field, value)
    with pytest.raises(ValueError, match=f"NSA_BACKEND_CHECK=1: {message}"):
        calls.before_round_replay(multi_step, batch)


def test_a_draft_token_whose_slot_was_never_assigned(checked):
    """The tables of a draft round reach N tokens past the length, and so does the check."""
    _, multi_step, batch = captured_round(checked)
    table = checked.req_to_token_pool.req_to_token
    table[5, 40 + D - 1] = -1  # the first column that nothing reads
    calls.before_round_replay(multi_step, batch)
    table[5, 40 + D - 2] = -1
    with pytest.raises(ValueError, match="request row 1: token 42 has KV slot -1"):
        calls.before_round_replay(multi_step, batch)


def test_a_batch_at_the_limits_passes(checked):
    found = values(checked)
    found["seq_lens"][:] = torch.tensor([WIDTH, 1])
    found["req_pool_indices"][:] = torch.tensor([checked.req_to_token_pool.req_to_token.shape[0] - 1, 0])
    for mode in MODES.values():
        eager(create_backend(checked), mode, found)
        captured(create_backend(checked), mode, found, lambda: None)


def test_what_padding_holds_passes(checked):
    """No token yet, and the page that padding writes to."""
    found = values(checked)
    found["seq_lens"][1] = 0
    found["req_pool_indices"][1] = 0
    checked.req_to_token_pool.req_to_token[0] = 0
    checked.req_to_token_pool.req_to_token[2] = KV_SLOTS - 1
    eager(create_backend(checked), ForwardMode.DECODE, found)


def test_nothing_is_looked_at_without_the_switch(make_runner, monkeypatch):
    monkeypatch.delenv("NSA_BACKEND_CHECK", raising=False)
    runner = make_runner(table_width=WIDTH, pool_size=POOL)
    backend = create_backend(runner)
    assert backend.writer.value_check is None
    found = values(runner)
    captured(backend, ForwardMode.DECODE, found, lambda: spoil(runner, found, "seq_lens", -3))
