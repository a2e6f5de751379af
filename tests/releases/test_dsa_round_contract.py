"""What whole rounds ask of SGLang and of a server's options, read from SGLang's own classes and resolved arguments."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace

import installed_source
import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.utils import common

from nsa_backend.adapters import naive_eagle
from nsa_backend.adapters.dsa import draft
from nsa_backend.adapters.dsa.rounds import worker as round_worker
from nsa_backend.adapters.dsa.rounds.by_release import release
from nsa_backend.adapters.dsa.rounds.own_round import OF_REQUESTS
from nsa_backend.adapters.dsa.rounds.served import CONFIDENTIAL, DP_ATTENTION, NEEDED, ON_THE_HOST, SWITCH, has_rounds
from nsa_backend.adapters.installed import adapter
from nsa_backend.environment import asked
from nsa_backend.refusals import refusals
from nsa_backend.round_graph import child_graphs


@pytest.mark.parametrize(
    ("name", "bad", "advice"),
    [
        ("speculative_algorithm", None, "pass --speculative-algorithm EAGLE"),
        ("speculative_algorithm", "EAGLE3", "pass --speculative-algorithm EAGLE"),
        ("disable_overlap_schedule", True, "drop --disable-overlap-schedule"),
        ("disable_cuda_graph", True, "drop --disable-cuda-graph"),
        ("pp_size", 2, "pass --pp-size 1"),
        ("enable_two_batch_overlap", True, "drop --enable-two-batch-overlap"),
        ("speculative_adaptive", True, "drop --speculative-adaptive"),
        ("enable_lora", True, "drop --enable-lora"),
    ],
)
def test_a_server_that_can_have_none_does_not_start(arguments, monkeypatch, name, bad, advice):
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "1")
    assert refusals(arguments(**{"speculative_algorithm": "EAGLE"} | {name: bad})) == [
        "NSA_BACKEND_ROUND_GRAPH=1, which NAIVE_EAGLE sets, cannot be served with these options: "
        f"{advice}, or unset it and choose EAGLE"
    ]


def test_decode_graphs_of_another_kind(arguments, monkeypatch):
    """Whole graphs alone can join another one."""
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "1")
    server = arguments(speculative_algorithm="EAGLE")
    server.cuda_graph_config = SimpleNamespace(
        decode=SimpleNamespace(backend="tc_piecewise"), prefill=server.cuda_graph_config.prefill
    )
    (sentence,) = refusals(server)
    assert "pass --cuda-graph-backend-decode full, or unset it and choose EAGLE" in sentence


def test_values_that_are_checked_on_the_host(arguments, monkeypatch):
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "1")
    monkeypatch.setenv("NSA_BACKEND_CHECK", "1")
    (sentence,) = refusals(arguments(speculative_algorithm="EAGLE"))
    assert sentence.endswith("which looks at every replay on the host, cannot both be: unset one")


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_switches_of_sglang_that_do_something_on_the_host_in_every_round(arguments, monkeypatch, caplog, name):
    caplog.set_level("INFO")
    server = arguments(speculative_algorithm="EAGLE")
    monkeypatch.delenv("NSA_BACKEND_CHECK", raising=False)
    assert has_rounds(server, ("dsa", "dsa"), adapter.BACKEND_NAMES)
    monkeypatch.setenv(name, "1")
    assert not has_rounds(server, ("dsa", "dsa"), adapter.BACKEND_NAMES)
    assert caplog.messages == [f"nsa_backend: speculative rounds are three CUDA graphs; for one, unset {name}"]
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "1")
    assert refusals(server) == [f"NSA_BACKEND_ROUND_GRAPH=1 and {name}=1, {ON_THE_HOST[name]}, cannot both be: unset one"]


def test_who_insists_on_one_graph_in_confidential_computing(arguments, monkeypatch):
    """Before weights load; others are served with three."""
    server = arguments(speculative_algorithm="EAGLE")
    monkeypatch.setattr(common, "is_confidential_compute", lambda: True, raising=False)
    assert refusals(server) == []
    monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "1")
    (sentence,) = refusals(server)
    assert sentence.endswith(f"cannot be served here: {CONFIDENTIAL}; unset it and choose EAGLE")


def test_naive_eagle_asks_for_one_graph_where_a_scheduler_chooses_its_worker(monkeypatch):
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.delenv(SWITCH)
    chosen = []
    marked = SimpleNamespace(**{naive_eagle.MARK: True})
    has_rounds = lambda server_args: chosen.append(asked(SWITCH))  # noqa: E731
    for server_args in (SimpleNamespace(), marked):
        draft._round_worker((), has_rounds, lambda algorithm, args: object, SimpleNamespace(is_eagle=lambda: True), server_args)
    assert chosen == [None, True]


def test_sglang_captures_anew_into_another_runner():
    """Rounds look at the runner: after /update_weights_from_disk with `recapture_cuda_graph` it is another."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    runner = (installed_source.ROOT / "model_executor" / "model_runner.py").read_text()
    assert "self.weight_updater = WeightUpdater(" in runner
    assert "self.recapture_cuda_graph()" in inspect.getsource(WeightUpdater.update_weights_from_disk)
    fields = {field.name: field for field in dataclasses.fields(WeightUpdater)}
    assert "recapture_cuda_graph" in fields
    assert all(field.init for field in fields.values())  # so that one with another function of this name has all the rest
    assert "self.decode_cuda_graph_runner = capture.runner" in inspect.getsource(ModelRunner.init_decode_cuda_graph)


def test_a_server_has_rounds_in_one_graph_unless_its_options_forbid_them(arguments, monkeypatch, caplog):
    """Not one of another attention backend, whose log then has no word of ours."""
    caplog.set_level("INFO")
    monkeypatch.delenv("NSA_BACKEND_CHECK", raising=False)
    can = arguments(speculative_algorithm="EAGLE")
    ours = adapter.BACKEND_NAMES
    assert has_rounds(can, ("dsa", "dsa"), ours)
    assert not has_rounds(arguments(speculative_algorithm="EAGLE", pp_size=2), ("triton", "fa3"), ours)
    assert not caplog.messages
    assert not has_rounds(arguments(speculative_algorithm="EAGLE", pp_size=2, enable_lora=True), ("dsa", "fa3"), ours)
    monkeypatch.setenv("NSA_BACKEND_CHECK", "1")
    assert not has_rounds(can, ("dsa", "dsa"), ours)
    assert caplog.messages == [
        "nsa_backend: speculative rounds are three CUDA graphs; for one, pass --pp-size 1 and drop --enable-lora",
        "nsa_backend: speculative rounds are three CUDA graphs; for one, unset NSA_BACKEND_CHECK",
    ]


def test_options_that_are_needed_exist(arguments):
    """A release that renames one must not lose its check; every one is at a served value by default."""
    server = arguments(speculative_algorithm="EAGLE")
    assert all(rule.value(server) in rule.served for rule in (*NEEDED, *DP_ATTENTION))


def assigned(cls: type, name: str) -> bool:
    """Whether a class has a member of this name, or its methods assign an attribute of it."""
    return hasattr(cls, name) or f"self.{name} = " in inspect.getsource(cls) or f"self.{name}: " in inspect.getsource(cls)


def test_what_rounds_ask_of_sglang_is_there():
    """The stand-ins of these tests have these names; SGLang's own classes must."""
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.eagle_info import EagleDraftInput
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2

    worker = (
        "target_worker",
        "draft_worker",
        "spec_v2_attn_backends",
        release().last_reader,
        "speculative_num_draft_tokens",
    )
    assert [name for name in worker if not assigned(EAGLEWorkerV2, name)] == []
    assert "on_publish" in inspect.signature(EAGLEWorkerV2.forward_batch_generation).parameters
    draft_worker = (
        "cuda_graph_runner",
        "cuda_graph_runner_for_draft_extend",
        "draft_runner",
        "seed_dsa_topk_from_draft_extend",
    )
    assert [name for name in draft_worker if not assigned(EagleDraftWorker, name)] == []
    runner = (installed_source.ROOT / "model_executor" / "model_runner.py").read_text()
    assert "self.device_timer = " in runner
    assert f"self.{release().reads_done}: " in runner
    batch = {field.name for field in dataclasses.fields(ScheduleBatch)}
    read = {
        "sampling_info",
        "spec_info",
        "has_grammar",
        "return_logprob",
        "return_hidden_states",
        "multimodal_inputs",
        "beam_tail",
        "global_num_tokens",
    }
    emptied = {"reqs", *OF_REQUESTS}
    plain = {"forward_mode", "is_extend_in_batch", "req_pool_indices", "seq_lens"}
    assert (read | emptied | plain) - batch == release().lacks & read
    assert "self.sampling_params = sampling_params" in inspect.getsource(Req.__init__)
    sampling = {field.name for field in dataclasses.fields(SamplingBatchInfo)}
    asked = {"is_all_greedy", "penalizer_orchestrator", "logit_bias", "has_custom_logit_processor", "has_watermark_candidates"}
    assert asked - sampling == release().lacks & asked
    filled = {"temperatures", "top_ps", "top_ks", "min_ps", "need_top_p_sampling", "need_top_k_sampling", "sampling_seed"}
    assert filled <= sampling
    result = {field.name for field in dataclasses.fields(GenerationBatchResult)}
    assert {"next_token_ids", "accept_lens", "next_draft_input", "logits_output"} <= result
    assert "next_token_logprobs" in {field.name for field in dataclasses.fields(LogitsProcessorOutput)}
    drafts = {field.name for field in dataclasses.fields(EagleDraftInput)}
    asked_of_drafts = {"future_indices", "future_dsa_topk_indices_available", "cuda_graph_compatible", "bonus_tokens"}
    assert asked_of_drafts - drafts == release().lacks & asked_of_drafts
    assert release().lacks <= read | asked | asked_of_drafts


def test_rounds_are_captured_where_a_scheduler_has_all_that_they_need_and_is_not_ready_yet():
    """Its process sends what `get_init_info` returns once it is built, and only then looks at requests."""
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.scheduler_components.dp_attn import SchedulerDPAttnAdapter
    from sglang.srt.model_executor.runner import freeze_gc

    process = inspect.getsource(scheduler.run_scheduler_process)
    steps = [process.index(step) for step in (" = Scheduler(", ".send(scheduler.get_init_info())", ".run_event_loop()")]
    assert steps == sorted(steps)
    built = inspect.getsource(scheduler.Scheduler)
    needed = ("future_map", "forward_stream_ctx", "dp_attn_adapter", "draft_worker")
    assert [name for name in needed if f"self.{name}" not in built] == []
    assert "(SetInternalStateReq, self.set_internal_state)" in built
    assert "(GetInternalStateReq, self.get_internal_state)" in built
    assert {"get_idle_batch", "maybe_prepare_mlp_sync_batch"} <= set(dir(SchedulerDPAttnAdapter))
    assert list(inspect.signature(freeze_gc).parameters) == ["enable_cudagraph_gc"]


def test_graphs_are_captured_to_be_kept(monkeypatch):
    """SGLang's capture, as far as the making of its graph: the one that joins others."""
    made = []
    monkeypatch.setattr(child_graphs.KeptGraph, "__new__", lambda cls: made.append(cls))
    round_worker._capture_kept(lambda *arguments: torch.cuda.CUDAGraph())
    assert made == [child_graphs.KeptGraph]
    assert torch.cuda.CUDAGraph is not child_graphs.KeptGraph


def test_a_kept_graph_is_ready_for_a_batch_that_replays_it_alone(monkeypatch):
    """Its executable is not left to the first replay, in the middle of traffic."""
    graph, done = child_graphs.KeptGraph.__new__(child_graphs.KeptGraph), []
    for name in ("capture_end", "instantiate"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda self, name=name: done.append(name))
    graph.capture_end()
    assert done == ["capture_end", "instantiate"]


def test_what_joins_graphs_is_there():
    from cuda.bindings import runtime

    assert "keep_graph" in inspect.signature(torch.cuda.CUDAGraph.__new__).parameters
    assert hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph")
    functions = ("StreamGetCaptureInfo", "GraphAddChildGraphNode", "StreamUpdateCaptureDependencies")
    assert [name for name in functions if not hasattr(runtime, f"cuda{name}")] == []
