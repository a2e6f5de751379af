"""Batch sizes to capture are counted in tokens: bs x tokens a request divisible by the attention TP size."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import eagle_draft_cuda_graph_runner, eagle_draft_extend_cuda_graph_runner
from sglang.srt.utils import common

from nsa_backend.adapters.installed import adapter
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.registration import create_draft_extend_backend
from nsa_backend.testing.calls import calls

OFFERED = list(range(1, 33))
WORLD = [(tp, d) for tp in (1, 2, 4, 8) for d in range(2, 9)]
choose = eagle_draft_cuda_graph_runner.get_batch_sizes_to_capture
"""SGLang's choice of the sizes, which all of its graph runners call."""


def tell_the_options(server_args: SimpleNamespace, monkeypatch, tp: int, d: int) -> dict[str, Any]:
    """0.5.12: options stand in the server arguments, and the group size is asked of its own function."""
    from sglang.srt.model_executor import cuda_graph_runner

    monkeypatch.setattr(cuda_graph_runner, "get_attention_tp_size", lambda: tp)
    monkeypatch.setattr(cuda_graph_runner, "get_attention_cp_size", lambda: 1)
    monkeypatch.setattr(cuda_graph_runner, "require_gathered_buffer", lambda args: True)
    vars(server_args).update(
        enable_two_batch_overlap=False,
        enable_torch_compile=False,
        enable_profile_cuda_graph=False,
        disable_cuda_graph_padding=False,
        cuda_graph_bs=list(OFFERED),
        speculative_eagle_topk=1,
    )
    return {}


def publish_the_options(server_args: Any, monkeypatch, tp: int, d: int) -> dict[str, Any]:
    """From 0.5.17 on: options are published, and the group size is asked of the parallel context."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
    from sglang.srt.runtime_context import get_context

    decode = PhaseConfig(backend="full", bs=list(OFFERED))
    override = get_context().override_server_args(
        cuda_graph_config=CudaGraphConfig(decode=decode),
        speculative_eagle_topk=1,
        speculative_num_steps=d - 1,
        speculative_num_draft_tokens=d,
    )
    monkeypatch.setattr(common, "get_parallel", lambda: SimpleNamespace(attn_tp_size=tp, attn_cp_size=1))
    monkeypatch.setattr(common, "require_gathered_buffer", lambda *args: True)
    return {"server_args": override.install(), "ps": SimpleNamespace(tp_size=tp, attn_dp_size=1)}


@pytest.fixture
def attention_tp(monkeypatch, make_runner):
    """Returns a function that makes SGLang believe in an attention TP group, with tokens gathered, and gives a runner."""

    def prepare(tp: int, d: int) -> SimpleNamespace:
        runner = make_runner(num_steps=d - 1)
        # Built before SGLang is told of more ranks: only the choice of sizes is to see them.
        runner.draft_extend = create_draft_extend_backend(calls.draft_factory(runner, d - 1))
        for module in (eagle_draft_cuda_graph_runner, eagle_draft_extend_cuda_graph_runner):
            for name in ("require_gathered_buffer", "require_mlp_tp_gather", "require_mlp_sync"):
                monkeypatch.setattr(module, name, lambda *args: True)
            monkeypatch.setattr(module, "require_attn_tp_gather", lambda *args: False, raising=False)
        tell = publish_the_options if "dsa" in adapter.BACKEND_NAMES else tell_the_options
        vars(runner).update(tell(runner.server_args, monkeypatch, tp, d))
        runner.req_to_token_pool.size = 32
        runner.tp_size, runner.dp_size = tp, 1
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
    monkeypatch.setattr(NativeSparseAttnBackend, "init_cuda_graph_state", stop)
    worker = SimpleNamespace(
        draft_runner=runner,
        draft_extend_attn_backend=runner.draft_extend,
        server_args=runner.server_args,
        speculative_num_steps=d - 1,
    )
    chosen = sizes(eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner, worker)
    assert chosen == [bs for bs in OFFERED if bs * d % tp == 0]
    assert eagle_draft_extend_cuda_graph_runner.get_batch_sizes_to_capture is choose


@pytest.mark.parametrize(("tp", "d"), WORLD)
def test_target_verify_counts_the_tokens_of_a_request(attention_tp, tp, d):
    """SGLang's target runner calls the same function with D tokens a request; ours serves every size it picks."""
    runner = attention_tp(tp, d)
    chosen, _ = choose(runner, d)
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
    other = SimpleNamespace(init_cuda_graph_state=stop)
    worker = SimpleNamespace(draft_runner=runner, draft_extend_attn_backend=other, server_args=runner.server_args)
    chosen = sizes(eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner, worker)
    assert chosen == [bs for bs in OFFERED if bs % 4 == 0]


def test_gathering_is_what_dp_attention_asks_for(make_runner):
    """The condition that the tests above switch on is SGLang's own for DP attention."""
    options = {"enable_dp_attention": True, "dp_size": 2, "tp_size": 2}
    if "attn_dp_size" in getattr(ServerArgs, "__struct_fields__", ()):
        options["attn_dp_size"] = 2  # what newer releases resolve the first two to
    published = nullcontext(SimpleNamespace(**options, moe_dense_tp_size=None))
    if "dsa" in adapter.BACKEND_NAMES:
        from sglang.srt.runtime_context import get_context

        published = get_context().override_server_args(**options)
    takes_options = "server_args" in inspect.signature(common.require_mlp_tp_gather).parameters
    with published as args:
        assert common.require_mlp_tp_gather(*[args] * takes_options)
