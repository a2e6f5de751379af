"""Ranks of released models in `serve`, `profile` and `capture`: what runs where and when, what is left out, what is printed."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.benchmarks import lanes
from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.commands import capture, profile, rank_serve, serve, vllm_rank
from nsa_backend.benchmarks.reports import parts
from nsa_backend.benchmarks.reports.cells import run_cells
from nsa_backend.benchmarks.servers import server
from nsa_backend.benchmarks.servers.server import Streamed
from nsa_backend.cli.bench import add_arguments

H200 = 139 * ranks.GIB


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that makes torch see GPUs of so many bytes under these names."""

    def seen(names: str = "0", memory: int = H200) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))

    seen()
    return seen


def options(**given) -> argparse.Namespace:
    words = "model port sides steps batch length prompt_tokens parallel servers samples parts temperature top_p"
    known = dict.fromkeys(words.split())
    return argparse.Namespace(**(known | {"quick": False, "checkpoint": ["v3.2-tp8"]} | given))


class FakeServer:
    """Our rounds take 10 ms and the built-in's 12; every draft is wrong."""

    events: list = []  # noqa: RUF012 (of all that run in one test)

    def __init__(self, side, checkpoint, port, steps, log, *words, environment):
        self.side, self.steps, self.words = side, steps, words
        self.events.append(f"{side} on {environment['CUDA_VISIBLE_DEVICES']} at {port}")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.events.append(f"{self.side} ends")

    def wait(self, seconds):
        assert seconds >= 900

    def streamed(self, prompts, tokens):
        rounds = tokens - 1
        info = {"spec_correct_drafts_histogram": [rounds, 0]} if self.steps else {}
        seconds = 0.5 + rounds * (0.010 if self.side == "ours" else 0.012)
        return Streamed([0.5] * len(prompts), seconds, [{"meta_info": info} for _ in prompts])


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(FakeServer, "events", [])
    monkeypatch.setattr(rank_serve, "Server", FakeServer)
    monkeypatch.setattr(rank_serve.time, "sleep", lambda seconds: None)
    return FakeServer.events


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("3", [["ours 3"], ["builtin 3"], ["builtin 3"], ["ours 3"]]),
        ("0,1", [["ours 0", "builtin 1"], ["builtin 0", "ours 1"]]),
    ],
)
def test_sides_run_in_both_orders_and_never_two_on_a_gpu(gpus, started, names, expected, capsys):
    gpus(names)
    with ExitStack() as resources:
        cells = serve.cells(options(steps=[3], batch=[1, 8], length=[300]), resources)
        report = run_cells(cells, 600, lambda report: None)
    begun = [event.replace(" on ", " ").split(" at ")[0] for event in started if " on " in event]
    assert begun == [one for stage in expected for one in stage]
    running = 0
    for event in started:
        running += -1 if event.endswith("ends") else 1
        assert running <= len(names.split(","))
    rows = report["rows"]
    assert len(rows) == 2 * 2 * 2
    assert {(row["side"], row["turn"]) for row in rows} == {(side, turn) for side in ("ours", "builtin") for turn in (0, 1)}
    assert {row["round_ms"]["median"] for row in rows if row["side"] == "ours"} == {10.0}
    assert all(row["seconds_to_ready"] >= 0 for row in rows)
    assert not report["not_measured"]
    serve.show(report)
    shown = capsys.readouterr().out
    assert "10.00 (10.00-10.00)" in shown
    assert "0.833" in shown
    assert "over the accept length of a trained model" in shown


def test_by_default_what_the_gpu_cannot_hold_is_told_and_the_rest_is_measured(gpus, started):
    with ExitStack() as resources:
        cells = serve.cells(options(), resources)
        rows = [row for cell in cells if cell.section == "left_out" for row in cell.measure()]
    assert [(row["batch"], row["length"], row["needs_gib"]) for row in rows] == [(32, 32768, pytest.approx(170.9, abs=0.5))]
    measured = {cell.name.split(", ")[2] for cell in cells if cell.section == "rows"}
    assert measured == {f"{b} x {n}" for b in (1, 8, 32) for n in (300, 4096)} | {"1 x 32768", "8 x 32768", "1 x 131072"}
    assert cells[0].name.startswith("v3.2-tp8, N = 0, 1 x 300, ours on 0")
    assert not started, "nothing starts before the first cell is measured"


TOO_SMALL = r"v3.2-tp8 needs \d+\.\d GiB, 82\.3 of them for weights and \d+\.\d for \d+ tokens, .* has 80\.0 GiB"


@pytest.mark.parametrize(
    ("bench", "given", "memory", "sentence"),
    [
        *((bench, {}, 80 * ranks.GIB, TOO_SMALL) for bench in (serve, profile, capture)),
        (
            serve,
            {"checkpoint": ["wide", "glm-5.2-tp8"]},
            H200,
            "glm-5.2-tp8 fills a GPU and wide shares one: measure them in two",
        ),
        (profile, {"checkpoint": ["wide"], "sides": ["auto"]}, H200, "--sides is for ranks of released models here"),
        (serve, {"parallel": ["tp2"]}, H200, "v3.2-tp8 is one rank already: leave --parallel out"),
    ],
)
def test_what_cannot_be_measured_ends_before_weights_are_made(gpus, started, bench, given, memory, sentence):
    gpus(memory=memory)
    with ExitStack() as resources, pytest.raises(SystemExit, match=sentence):
        bench.cells(options(**given), resources)
    assert not started


PLANNED = [
    pytest.param(words, id=f"{path.stem} {job.name}")
    for path in sorted((Path(lanes.__file__).parent / "plans").glob("ranks_*.json"))
    for job in lanes.plan(path)
    if (words := shlex.split(job.command))[4] in ("serve", "profile", "capture")
]


@pytest.mark.parametrize("words", PLANNED)
def test_what_a_plan_asks_of_a_rank_is_measured_on_an_h200(gpus, started, words):
    """Every side of every rank, with drafts and without; an H200 cannot hold one shape of each model."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(words[4:])
    with ExitStack() as resources:
        found = import_module(f"nsa_backend.benchmarks.commands.{args.what}").cells(args, resources)
    asked = {(rank, f"N = {n}", side) for rank in args.checkpoint for n in args.steps or [3] for side in args.sides or ["ours"]}
    named = [cell.name for cell in found if cell.section == "rows"]
    assert {one for one in asked if not any(set(one) <= set(re.split(", | on 0", name)) for name in named)} <= {
        one for one in asked if one[1] == "N = 0" and one[2] in server.WITH_DRAFTS
    }
    assert {cell.name.partition(", ")[2] for cell in found if cell.section != "rows"} <= {
        "32 x 32768 does not fit",
        "128 x 4096 does not fit",
    }
    assert not started


def test_another_release_would_serve_another_model(gpus, monkeypatch):
    from sglang.srt.configs import model_config

    monkeypatch.delattr(model_config, "dsa_layer_skips_topk", raising=False)
    for bench in (serve, profile, capture):
        with ExitStack() as resources, pytest.raises(SystemExit, match=r"glm-5.2-tp8 has indexers .* SGLang 0.5.17 or newer"):
            bench.cells(options(checkpoint=["glm-5.2-tp8"]), resources)


def test_a_rank_is_served_with_weights_that_are_drawn(tmp_path):
    words = server.command(ranks.write(tmp_path / "rank", "glm-5.1-tp8"), 1, 3)
    assert words[1:3] == ["-m", "nsa_backend.benchmarks.servers.rank_server"]
    assert words[words.index("--load-format") + 1] == "dummy"
    (tmp_path / "config.json").write_text("{}")
    assert server.command(tmp_path, 1, 3)[2] == "sglang.launch_server"


NAMES = {
    "attention": "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Collective",
    "logits": "void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u, 128u, 64u, true, false, 3u, 3u, 256u, 128u, 512u, float>(un",
    "top-k": "void sglang::topk_small_batch_cluster_kernel<true, (sglang::TopKMode)1, 16u, 1u>(sglang::TopKPagedParams)",
    "MoE": "fused_moe_kernel",
    "quantisation": "void sglang::per_token_group_quant_flat_kernel<sglang::QuantTrait<__nv_bfloat16, __nv_fp8_e4m3, 128u",
    "indexer": "void sglang::fast_hadamard_transform_kernel<sglang::FastHadamardKernelTraits<16, 7, __nv_bfloat16> >(HadamardP",
    "RoPE, norms, writes": "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*",
    "projections": "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 0u, 0u, 1u, 16u, 16u",
    "rest": "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*",
}
"""What a rank of DeepSeek-V3.2 runs most of on an H200 with SGLang 0.5.23, as its profiler names it, by part."""
MORE = {
    "void deep_gemm::sched::sm90_paged_mqa_logits_metadata<32u, 256u, 132u, false>(unsigned int": "metadata",
    "_fused_dsa_target_verify_metadata_kernel": "metadata",
    "metadata_kernel": "metadata",
    "attend_kernel": "attention",
    "join_kernel": "attention",
    "join_query_kernel": "RoPE, norms, writes",
    "topk_slots_kernel": "top-k",
    "void tensorrt_llm::kernels::deepseek_v3_topk_kernel<float, float, float, int, 256, true>(float*": "MoE",
    "void sglang::tiny_n_gemm_kernel<sglang::GEMMTraitN<256u, 7168u, 2u, 32u, __nv_bfloat16>, 4u": "MoE",
    "_moe_sum_reduce_kernel": "MoE",
    "_act_quant_kernel": "quantisation",
    "void sglang::fused_store_indexer_cache<__nv_bfloat16, long, 6u, true>": "indexer",
    "void sglang::set_mla_kv_buffer_kernel<1024l, 128l, true, long>": "RoPE, norms, writes",
    "nvjet_sm90_tss_64x8_64x16_1x1_h_bz_splitK_TNT": "projections",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float": "projections",
}


@pytest.mark.parametrize(("name", "part"), [*((name, part) for part, name in NAMES.items()), *MORE.items()])
def test_a_kernel_is_of_one_part(name, part):
    assert parts.part_of(name) == part


LAYERS, GAP, EACH, LAUNCH = 4, 30.0, 2.0, 7.0


def trace(rounds: int) -> list[dict]:
    """A prefill, then rounds of two graphs: a small one, and one whose layers run each of NAMES once; GAP us before either."""
    events, now = [], 0.0

    def graph(number: int, names: list[str]) -> None:
        nonlocal now
        now += GAP
        events.append({"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": now - 20, "dur": LAUNCH, "tid": 1,
                       "args": {"correlation": number}})  # fmt: skip
        for name in names:
            events.append({"cat": "kernel", "name": name, "ts": now, "dur": EACH, "args": {"correlation": number}})
            now += EACH

    graph(0, ["prefill"] * 500)
    for number in range(rounds):
        graph(2 * number + 1, [*NAMES.values()] * LAYERS)
        graph(2 * number + 2, ["metadata_kernel"])
    return events


def test_a_round_is_told_by_part_with_what_lies_between_rounds(capsys):
    found = parts.of_rounds(trace(8), LAYERS)
    assert found["rounds"] == 6  # neither the first nor the last
    assert found["parts"] == {"metadata": [1, EACH]} | {part: [LAYERS, LAYERS * EACH] for part in NAMES}
    assert found["kernel_us"] == found["launches"] * EACH == (len(NAMES) * LAYERS + 1) * EACH
    assert found["idle_us"] == 2 * GAP
    assert found["period_us"] == found["kernel_us"] + found["idle_us"]
    assert found["graph_launch_us"] == 2 * LAUNCH
    assert found["launches_a_layer"] == round((len(NAMES) * LAYERS + 1) / LAYERS, 1)
    row = {"checkpoint": "v3.2-tp8", "steps": 3, "batch": 1, "length": 300}
    profile.show({"rows": [row | {"side": side} | found for side in ("ours", "builtin")]})
    shown = capsys.readouterr().out
    assert "v3.2-tp8, N = 3, 1 x 300: kernels of a round by part" in shown
    assert "host in graph launches" in shown
    with pytest.raises(RuntimeError, match="three are too few"):
        parts.of_rounds(trace(3), LAYERS)


@pytest.fixture
def traced(monkeypatch):
    """Servers leave the trace of eight rounds."""
    monkeypatch.setattr(FakeServer, "generate", lambda self, prompts, tokens: None, raising=False)
    monkeypatch.setattr(FakeServer, "profiled", lambda self, folder, prompts, tokens: None, raising=False)
    monkeypatch.setattr(rank_serve.traces, "read_events", lambda folder: trace(8))


def test_servers_that_were_timed_tell_some_of_their_rounds_by_part(gpus, started, traced, capsys):
    with ExitStack() as resources:
        asked = options(steps=[3], batch=[1, 8], length=[300], parts=[8], sides=["ours"], samples=2)
        report = run_cells(serve.cells(asked, resources), 600, lambda report: None)
    first, _, third, *_ = report["rows"]
    assert [row["batch"] for row in report["rows"] if "parts" in row] == [8, 8]
    assert (first["samples"], third["rounds"]) == (2, 6)
    assert sum("ours on" in event for event in started) == 2, "one server a turn"
    serve.show(report)
    assert "8 x 300: kernels of a round by part" in capsys.readouterr().out


def test_profile_reads_the_trace_of_each_side(gpus, started, traced):
    with ExitStack() as resources:
        report = run_cells(profile.cells(options(steps=[3], batch=[1], length=[300]), resources), 600, lambda report: None)
    assert [(row["side"], row["steps"], row["rounds"]) for row in report["rows"]] == [("ours", 3, 6), ("builtin", 3, 6)]
    assert json.dumps(report)
    assert report["rows"][0]["launches_a_layer"] == round((len(NAMES) * LAYERS + 1) / (61 + 3), 1)


def test_vllm_is_asked_for_the_same_cells_and_gives_the_same_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vllm_rank, "version", lambda name: "0.33.0")
    engines = []

    def start(folder, steps, wanted):
        engines.append((ranks.rank_in(folder), steps, vllm_rank.engine_options(folder, steps, wanted)))
        return lambda asked, tokens: (0.5 + tokens * 0.011, tokens, 1.0)

    monkeypatch.setattr(sys, "argv", ["vllm_rank", str(tmp_path / "out.json"), "--batch", "1", "8", "--length", "300"])
    rows = vllm_rank.run(vllm_rank.parsed(), start)
    assert [(name, steps) for name, steps, _ in engines] == [("v3.2-tp8", 3), ("v3.2-tp8", 0)]
    assert engines[0][2]["compilation_config"]["cudagraph_capture_sizes"] == [1, 4, 8, 32]
    assert "speculative_config" not in engines[1][2]
    assert {row["round_ms"]["median"] for row in rows} == {11.0}
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == rows
    builtin = [row | {"side": "builtin", "round_ms": {"median": 10.0, "min_max": [9.0, 11.0]}} for row in rows]
    rank_serve.show([*builtin, *rows])
    assert "1.100" in capsys.readouterr().out


def test_vllm_draws_the_weights_of_a_model_once(monkeypatch):
    dummy_loader = SimpleNamespace(initialize_dummy_weights=None)
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(dummy_loader=dummy_loader))
    vllm_rank.take_over()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    dummy_loader.initialize_dummy_weights(model, "its config")
    first = model[0].weight.clone()
    assert not torch.equal(first, model[1].weight)
    for part in model.modules():
        dummy_loader.initialize_dummy_weights(part, "its config")
    assert torch.equal(model[0].weight, first)
