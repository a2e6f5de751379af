"""Prefills in one graph as the backend has them: which kernel attends to their rows, and what ends that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from nsa_backend.demo.engine import Engine
from nsa_backend.kernels.batch_inputs import BatchInputs


class Attention:
    """Says what it is asked for, and hands back the lengths that it was given."""

    def __init__(self, name: str, asked: list):
        self.name, self.asked = name, asked

    def reserve(self, max_rows):
        self.asked.append((self.name, "reserves", max_rows))

    def prepare(self, metadata):
        self.asked.append((self.name, "prepares", len(metadata.nsa_cache_seqlens_int32)))
        return metadata

    def forward(self, inputs):
        given = inputs.cache_seqlens
        self.asked.append((self.name, "attends", None if given is None else given.tolist()))
        return inputs.q_nope


@pytest.fixture
def served():
    """(backend of two requests, what its kernels were asked for, a function that attends for as many rows in a mode)."""
    engine, asked = Engine([[5] * 9, [6] * 4], num_steps=3, padding=0), []
    backend = engine.target.backend
    backend.decode_attention, backend.prefill_attention = Attention("decode", asked), Attention("prefill", asked)
    attention = engine.target.net.attention

    def attend(rows: int, mode: ForwardMode) -> None:
        batch = SimpleNamespace(forward_mode=mode, token_to_kv_pool=engine.target.pool)
        wide = torch.zeros(rows, attention.tp_q_head_num * attention.head_dim)
        chosen = torch.full((rows, engine.shape.index_topk), -1, dtype=torch.int32)
        backend.forward_extend(wide, None, None, attention, batch, topk_indices=chosen)

    return SimpleNamespace(engine=engine, backend=backend, asked=asked, attend=attend)


def rows(lens: list[int], requests: list[int]) -> BatchInputs:
    return BatchInputs(torch.tensor(lens), torch.tensor(requests))


def test_rows_of_a_prefill_are_attended_to_as_requests_that_decode(served):
    backend, asked = served.backend, served.asked
    first = int(served.engine.req_pool_indices[0])
    backend.keep_rows(128, rows([7, 8, 9, 1], [first] * 3 + [0]))
    backend.use_mha = True
    backend.at_head_of_rows(4)
    served.attend(4, ForwardMode.EXTEND)
    assert asked == [("decode", "reserves", 4), ("decode", "prepares", 4), ("decode", "attends", [7, 8, 9, 1])]
    assert backend.use_mha is False


def test_a_table_is_as_wide_as_the_rows_of_its_size_need(served):
    """And another one of the same rows does not take its place."""
    backend, inputs = served.backend, rows([7, 8], [1, 1])
    for width, pages in ((128, 4), (300, 8)):
        backend.keep_rows(width, inputs)
        backend.replay_rows(2)
        assert backend.forward_metadata.real_page_table.shape == (2, pages)


@pytest.mark.parametrize("after", ["eager", "capture", "replay"])
def test_the_next_forward_is_none_of_these(served, after):
    """Whose rows are attended to as before, and that of a captured one ends the other's too."""
    backend, asked = served.backend, served.asked
    backend.init_cuda_graph_state(2, 2)
    inputs = rows([9, 4], served.engine.req_pool_indices.tolist())
    backend.before_capture(ForwardMode.DECODE, 2, inputs)
    backend.keep_rows(128, rows([7, 8], [1, 1]))
    assert backend.runs_captured
    backend.replay_rows(2)
    assert not backend.runs_captured
    if after == "eager":
        served.engine.prefill(served.engine.target, served.engine.prompts)
    elif after == "capture":
        backend.before_capture(ForwardMode.DECODE, 2, inputs)
    else:
        backend.before_replay(ForwardMode.DECODE, 2, inputs)
    assert backend.rows.current is None
    if after == "eager":
        assert {name for name, doing, _ in asked if doing == "attends"} == {"prefill"}
