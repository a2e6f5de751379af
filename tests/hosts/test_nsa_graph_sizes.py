"""Batch sizes to capture are counted in tokens: bs x tokens a request divisible by the attention TP size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.model_executor import cuda_graph_runner
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import eagle_draft_cuda_graph_runner, eagle_draft_extend_cuda_graph_runner
from sglang.srt.utils import common

from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.registration import create_draft_extend_backend

OFFERED = list(range(1, 33))
WORLD = [(tp, d) for tp in (1, 2, 4, 8) for d in range(2, 9)]


@pytest.fixture
def attention_tp(monkeypatch, make_runner):
    """Returns a function that makes SGLang believe in an attention TP group, with tokens gathered, and gives a runner."""

    def prepare(tp: int, d: int) -> SimpleNamespace:
        monkeypatch.setattr(cuda_graph_runner, "get_attention_tp_size", lambda: tp)
        monkeypatch.setattr(cuda_graph_runner, "get_attention_cp_size", lambda: 1)
        for module in (cuda_graph_runner, eagle_draft_cuda_graph_runner, eagle_draft_extend_cuda_graph_runner):
            for name in ("require_gathered_buffer", "require_mlp_tp_gather", "require_mlp_sync"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, lambda args: True)
            if hasattr(module, "require_attn_tp_gather"):
                monkeypatch.setattr(module, "require_attn_tp_gather", lambda args: False)
        runner = make_runner(num_steps=d - 1)
        runner.req_to_token_pool.size = 32
        runner.tp_size, runner.dp_size = tp, 1
        values = {name: getattr(ServerArgs, name) for name in ("enable_two_batch_overlap", "enable_torch_compile")}
        values |= {"enable_profile_cuda_graph": False, "disable_cuda_graph_padding": False, "cuda_graph_bs": list(OFFERED)}
        values["speculative_eagle_topk"] = 1
        vars(runner.server_args).update(values)
        return runner

    return prepare


class Chosen(Exception):
    """Raised by the first thing a runner does with its batch sizes, so that it needs no GPU."""


def stop(*args):
    raise Chosen


def sizes(runner_class, worker) -> list[int]:
    """`capture_bs` of SGLang's own runner, built as far as its choice of sizes."""
    found = object.__new__(runner_class)
    with pytest.raises(Chosen):
        found.__init__(worker)
    return found.capture_bs


@pytest.mark.parametrize(("tp", "d"), WORLD)
def test_draft_extend_counts_the_tokens_of_a_request(attention_tp, monkeypatch, tp, d):
    runner = attention_tp(tp, d)
    backend = create_draft_extend_backend(SimpleNamespace(draft_model_runner=runner))  # installs the hook
    monkeypatch.setattr(NativeSparseAttnBackend, "init_cuda_graph_state", stop)
    worker = SimpleNamespace(
        draft_runner=runner,
        draft_extend_attn_backend=backend,
        server_args=runner.server_args,
        speculative_num_steps=d - 1,
    )
    chosen = sizes(eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner, worker)
    assert chosen == [bs for bs in OFFERED if bs * d % tp == 0]
    original = eagle_draft_extend_cuda_graph_runner.get_batch_sizes_to_capture
    assert original is cuda_graph_runner.get_batch_sizes_to_capture


@pytest.mark.parametrize(("tp", "d"), WORLD)
def test_target_verify_counts_the_tokens_of_a_request(attention_tp, tp, d):
    """SGLang's target runner calls the same function with D tokens a request; ours serves every size it picks."""
    runner = attention_tp(tp, d)
    chosen, _ = cuda_graph_runner.get_batch_sizes_to_capture(runner, d)
    assert chosen == [bs for bs in OFFERED if bs * d % tp == 0]


@pytest.mark.parametrize(("tp", "d"), WORLD)
def test_a_draft_step_has_one_token_a_request(attention_tp, tp, d):
    runner = attention_tp(tp, d)
    draft = SimpleNamespace(init_cuda_graph_state=stop)
    worker = SimpleNamespace(draft_runner=runner, server_args=runner.server_args)
    runner.draft_attn_backend = draft
    chosen = sizes(eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner, worker)
    assert chosen == [bs for bs in OFFERED if bs % tp == 0]


def test_another_backend_keeps_sglangs_sizes(attention_tp):
    runner = attention_tp(4, 4)
    create_draft_extend_backend(SimpleNamespace(draft_model_runner=runner))
    other = SimpleNamespace(init_cuda_graph_state=stop)
    worker = SimpleNamespace(draft_runner=runner, draft_extend_attn_backend=other, server_args=runner.server_args)
    chosen = sizes(eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner, worker)
    assert chosen == [bs for bs in OFFERED if bs % 4 == 0]


def test_gathering_is_what_dp_attention_asks_for():
    """The condition that the tests above switch on is SGLang's own for DP attention."""
    args = SimpleNamespace(enable_dp_attention=True, dp_size=2, moe_dense_tp_size=None)
    assert common.require_mlp_tp_gather(args)
