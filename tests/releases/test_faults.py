"""An exception in our code, eager, captured or replayed, says where it came from and is never swallowed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from batches import begin_forward, begin_round

from nsa_backend.adapters.sglang_types import ForwardBatch, ForwardMode
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls


class Planted(Exception):
    pass


def fail(*args, **kwargs):
    raise Planted("planted")


def notes(error) -> list[str]:
    return error.value.__notes__


def batch(mode: ForwardMode, requests: int = 3) -> ForwardBatch:
    lengths = torch.full((requests,), 9, dtype=calls.LENGTHS_DTYPE)
    return ForwardBatch(
        forward_mode=mode, batch_size=requests, input_ids=None, req_pool_indices=torch.arange(requests), seq_lens=lengths,
        seq_lens_cpu=lengths.clone(), seq_lens_sum=27, out_cache_loc=torch.arange(3 * requests),
        extend_seq_lens=torch.full((requests,), 4), extend_seq_lens_cpu=[4] * requests, extend_prefix_lens_cpu=[5] * requests,
    )  # fmt: skip


@pytest.mark.parametrize(("mode", "launch"), [(ForwardMode.EXTEND, "write_prefill"), (ForwardMode.DECODE, "write")])
def test_eager(make_runner, monkeypatch, mode, launch):
    backend = create_backend(make_runner())
    monkeypatch.setattr(backend.writer, launch, fail)
    with pytest.raises(Planted, match=r"^planted") as error:
        backend.init_forward_metadata(batch(mode))
    assert notes(error) == [f"nsa_backend: while preparing {mode.name}, batch size 3"]


def test_capture(make_runner, monkeypatch):
    """The launch is made inside the graph, so that is where a capture fails."""
    backend = create_backend(make_runner())
    backend.init_cuda_graph_state(4, 16)
    one = batch(ForwardMode.TARGET_VERIFY, 4)
    monkeypatch.setattr(backend.writer, "write", fail)
    one.positions = torch.zeros(16)
    calls.before_capture(backend, one)
    with pytest.raises(Planted) as error:
        begin_forward(backend, one)
    assert notes(error) == ["nsa_backend: while capturing TARGET_VERIFY, batch size 4"]


def test_replay(make_runner):
    backend = create_backend(make_runner())
    with pytest.raises(ValueError, match="no graph of 7 requests") as error:
        calls.before_replay(backend, batch(ForwardMode.DRAFT_EXTEND_V2, 7))
    assert notes(error) == ["nsa_backend: while replaying DRAFT_EXTEND_V2, batch size 7"]


def test_a_draft_round_names_its_step(make_runner, monkeypatch):
    multi_step = NativeSparseAttnMultiStepBackend(make_runner(num_steps=5), 1, 5)
    one = batch(ForwardMode.DECODE)
    one.out_cache_loc = torch.arange(15)
    multi_step.init_cuda_graph_state(3, 3)
    calls.before_round_capture(multi_step, one)
    monkeypatch.setattr(multi_step.attn_backends[2].decode_attention, "prepare", fail)
    with pytest.raises(Planted) as error:
        begin_round(multi_step, one)
    assert notes(error) == [
        "nsa_backend: while capturing a draft round, batch size 3, draft step 2",
        "nsa_backend: while capturing a draft round, batch size 3",
    ]
    with pytest.raises(ValueError, match="no draft graph of 2 requests") as error:
        calls.before_round_replay(multi_step, batch(ForwardMode.DECODE, 2))
    assert notes(error) == ["nsa_backend: while replaying a draft round, batch size 2"]


def test_an_eager_draft_round(make_runner, monkeypatch):
    multi_step = NativeSparseAttnMultiStepBackend(make_runner(num_steps=3), 1, 3)
    monkeypatch.setattr(multi_step.writer, "write", fail)
    with pytest.raises(Planted) as error:
        multi_step.init_forward_metadata(batch(ForwardMode.DECODE))
    assert notes(error) == ["nsa_backend: while preparing a draft round, batch size 3"]


@pytest.mark.parametrize("step", [0, 1])
def test_attention_names_its_step(make_runner, monkeypatch, step):
    runner = make_runner(num_steps=3)
    runner.token_to_kv_pool.get_key_buffer = lambda layer_id: torch.zeros(64, 1, 12)
    multi_step = NativeSparseAttnMultiStepBackend(runner, 1, 3)
    one = batch(ForwardMode.DECODE)
    one.out_cache_loc = torch.arange(9)
    multi_step.init_forward_metadata(one)
    backend = multi_step.attn_backends[step]
    monkeypatch.setattr(backend.decode_attention, "forward", fail)
    layer = SimpleNamespace(tp_q_head_num=4, v_head_dim=8, head_dim=12, layer_id=0, scaling=1.0, logit_cap=0.0)
    with pytest.raises(Planted) as error:
        backend.forward_decode(
            torch.zeros(3, 32), None, None, layer, SimpleNamespace(token_to_kv_pool=runner.token_to_kv_pool),
            q_rope=torch.zeros(3, 16),
            topk_indices=torch.zeros(3, 64, dtype=torch.int32),
        )  # fmt: skip
    assert notes(error) == [f"nsa_backend: while preparing a draft round, batch size 3, draft step {step}"]
