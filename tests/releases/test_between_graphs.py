"""What one forward leaves behind for the next: pending launches, dense prefill, reserved rows, and shared page tables."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from batches import MODES, begin_forward, check, fill, forward_batch, prefill_batch, random_batch, static_batch
from sglang.srt.models.deepseek_common import attention_backend_handler

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.attention.interface import NothingToPrepare
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls

DISPATCH = getattr(attention_backend_handler, f"handle_attention_{adapter.BACKEND_NAMES[0]}")
"""SGLang's choice between dense and absorbed attention, which every layer of the model makes."""


class Watched(NothingToPrepare):
    """Stands in for an implementation and keeps what it was told before it was asked to prepare."""

    def __init__(self):
        self.told: list = []

    def reserve(self, max_rows):
        self.told.append(max_rows)

    def prepare(self, metadata):
        self.told.append("prepare")
        return metadata


def captured_decode(backend, requests: int):
    """A decode graph of `requests`, warmed up; returns the runner's static batch."""
    backend.init_cuda_graph_state(requests, requests)
    static = static_batch(requests, requests, ForwardMode.DECODE)
    calls.before_capture(backend, static)
    begin_forward(backend, static)
    return static


def chosen_method(runner, backend) -> str:
    batch = SimpleNamespace(**calls.batch_fields(SimpleNamespace(runner=runner, backend=backend)))
    with calls.running(backend):
        return DISPATCH(None, batch).name


@pytest.mark.parametrize("then", ["capture", "replay", "eager decode"])
def test_the_forward_after_a_dense_prefill_is_absorbed(make_runner, then):
    """A prefill serves densely; SGLang's model must not take that for the forward that follows it."""
    runner = make_runner()
    backend = create_backend(runner)
    static = captured_decode(backend, 2)
    backend.dense_prefill.runs = True
    assert chosen_method(runner, backend) == "MLA"
    backend.init_forward_metadata(prefill_batch(runner, [7, 28], [2, 2]))  # fits the dense path
    assert chosen_method(runner, backend) == "MHA_ONE_SHOT"
    if then == "capture":
        calls.before_capture(backend, static)
    elif then == "replay":
        calls.before_replay(backend, static)
    else:
        backend.init_forward_metadata(forward_batch(random_batch(runner, "decode", 2, 1, 1), ForwardMode.DECODE))
    assert chosen_method(runner, backend) == "MLA"


def test_an_eager_forward_is_no_captured_one(make_runner):
    """A graph on the GPU made its launch by itself: what was set up for it on the host must not run in the next forward."""
    runner = make_runner()
    backend = create_backend(runner)
    static = captured_decode(backend, 2)
    calls.before_replay(backend, static)
    assert backend.runs_captured
    batch = random_batch(runner, "decode", 3, 5, 1)
    backend.init_forward_metadata(forward_batch(batch, ForwardMode.DECODE))
    assert not backend.runs_captured
    for layer in (0, 1):
        backend.get_indexer_metadata(layer, None)
    check(backend.forward_metadata, batch)


def test_implementations_know_the_rows_of_graphs_before_the_first_capture(make_runner):
    """Memory that a capture would allocate belongs to its graph, once for every graph and draft step."""
    runner = make_runner(num_steps=4)
    multi_step = calls.draft_factory(runner, 4).create_decode_backend()
    backend = create_backend(runner)
    for each in (backend, *multi_step.attn_backends):
        each.decode_attention = Watched()
    backend.init_cuda_graph_state(4, 20)
    multi_step.init_cuda_graph_state(4, 6)
    assert backend.decode_attention.told == [20]
    assert [step.decode_attention.told for step in multi_step.attn_backends] == [[6]] * 3
    static = static_batch(2, 2, ForwardMode.DECODE)
    static.out_cache_loc = torch.zeros(8, dtype=torch.int64)
    calls.before_round_capture(multi_step, static)
    assert [step.decode_attention.told for step in multi_step.attn_backends] == [[6]] * 3


@pytest.mark.parametrize("mode", list(MODES))
def test_graphs_over_two_request_pools_do_not_write_each_others_tables(make_runner, mode):
    """Two models of one process with pools of their own, such as two engines: both are read after both have written."""
    batches = []
    for seed in (3, 4):
        runner = make_runner(num_steps=3)
        runner.req_to_token_pool.req_to_token.random_(0, 2**20, generator=torch.Generator().manual_seed(seed))
        backend = create_backend(runner)
        rows = 5 * (1 if mode == "decode" else 4)
        backend.init_cuda_graph_state(5, rows)
        static = static_batch(5, rows, MODES[mode])
        calls.before_capture(backend, static)
        begin_forward(backend, static)
        batch = random_batch(runner, mode, 5, seed, 3)
        if mode == "draft_extend_v1":
            batch = replace(batch, tail_rows=rows - sum(batch.extend_lens))
        fill(static, batch)
        calls.before_replay(backend, static)
        begin_forward(backend, static)
        batches.append((backend, batch))
    for backend, batch in batches:
        check(backend.forward_metadata, batch)


def test_graphs_over_one_request_pool_share_one_table(make_runner):
    """A table is the largest thing that this package allocates: target and draft have one."""
    runner = make_runner()
    tables = set()
    for backend in (create_backend(runner), create_backend(runner)):
        captured_decode(backend, 3)
        tables.add(backend.forward_metadata.real_page_table.data_ptr())
    assert len(tables) == 1


def test_graphs_captured_anew_for_larger_batches_have_room(make_runner):
    """What was captured for the sizes before is forgotten: its replay has no metadata."""
    runner = make_runner()
    backend = create_backend(runner)
    small, large = captured_decode(backend, 2), captured_decode(backend, 5)
    batch = random_batch(runner, "decode", 5, 9, 1)
    fill(large, batch)
    calls.before_replay(backend, large)
    begin_forward(backend, large)
    check(backend.forward_metadata, batch)
    with pytest.raises(ValueError, match="no graph of 2 requests was captured for DECODE: "):
        calls.before_replay(backend, small)


def test_draft_rounds_captured_anew_have_no_graph_of_the_sizes_before(make_runner):
    multi_step = calls.draft_factory(make_runner(num_steps=3), 3).create_decode_backend()
    multi_step.init_cuda_graph_state(2, 2)
    static = static_batch(2, 2, ForwardMode.DECODE)
    static.out_cache_loc = torch.zeros(6, dtype=torch.int64)
    calls.before_round_capture(multi_step, static)
    calls.before_round_replay(multi_step, static)
    multi_step.init_cuda_graph_state(4, 4)
    with pytest.raises(ValueError, match="no draft graph of 2 requests was captured"):
        calls.before_round_replay(multi_step, static)


@pytest.mark.parametrize("mode", list(MODES))
def test_tables_of_an_eager_forward_reach_the_longest_request_and_no_farther(make_runner, mode):
    """In steps of four pages; a server with a context of 160K tokens would clear 640 KiB a row otherwise."""
    runner = make_runner(num_steps=3, table_width=10_000)
    backend = create_backend(runner)
    batch = replace(random_batch(runner, mode, 3, 5, 3), seq_lens=[20, 300, 257], extend_lens=[])
    backend.init_forward_metadata(forward_batch(replace(batch, extend_lens=[2, 2, 2]), MODES[mode]))
    assert backend.forward_metadata.real_page_table.shape[1] == 8
