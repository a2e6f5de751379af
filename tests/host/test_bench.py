"""`python -m nsa_backend bench`: cells under a time bound, reports, exit codes, and what is read from servers and traces."""

from __future__ import annotations

import argparse
import gzip
import inspect
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa_backend import __main__ as command
from nsa_backend.benchmarks import bench_draft, bench_metadata, cells, faithful_checkpoint, generation, servers
from nsa_backend.cli import bench

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """Stands in for `time`: moves when a cell says so."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cells, "time", clock)
    return clock


def timed_cells(clock: Clock, *seconds: float) -> list[cells.Cell]:
    def measure(index: int, took: float) -> list[dict]:
        clock.now += took
        return [{"cell": index}]

    return [cells.Cell(f"cell {i}", lambda i=i, s=s: measure(i, s), "rows" if i else "first") for i, s in enumerate(seconds)]


@pytest.mark.parametrize(
    ("bound", "measured"),
    [(50, [0, 1, 2]), (49, [0, 1]), (20, [0, 1]), (19, [0]), (1, [0])],
)
def test_a_cell_starts_only_where_the_longest_so_far_would_end_in_time(clock, bound, measured):
    kept = []
    report = cells.run_cells(timed_cells(clock, 10, 20, 10), bound, lambda r: kept.append(json.loads(json.dumps(r))))
    assert [row["cell"] for row in report["first"] + report["rows"]] == measured
    assert report["not_measured"] == [f"cell {i}" for i in range(3) if i not in measured]
    assert len(kept) == len(measured)
    assert kept[-1]["rows"] == report["rows"]


def test_a_report_is_json_with_a_row_a_line(tmp_path):
    report = {"environment": {"gpu": "x"}, "rows": [{"a": 1}, {"a": 2}], "not_measured": []}
    cells.write_report(tmp_path / "out.json", report)
    text = (tmp_path / "out.json").read_text()
    assert json.loads(text) == report
    assert text.splitlines().count('{"a": 1},') == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        command.main(["bench", "serve"])
    assert stop.value.code == 2
    assert "bench needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["attention", "--length", "5"], "bench attention does not take --length: it takes --batch --heads"),
        (["metadata", "--checkpoint", "x"], "bench metadata does not take --checkpoint"),
        (["metadata", "--minutes", "0"], "must be above 0"),
        (["metadata", "--steps", "-1"], "must be at least 0"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_bad_arguments(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["bench", *arguments])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("minutes", "code"), [("1", 0), ("0.2", 1)])
def test_exit_code_file_and_json(monkeypatch, capsys, tmp_path, clock, minutes, code):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    asked = []
    made = SimpleNamespace(cells=lambda options, resources: asked.append(options) or timed_cells(clock, 10, 10), show=None)
    monkeypatch.setattr(bench, "import_module", lambda name: made)
    out = tmp_path / "x.json"
    assert command.main(["bench", "draft", "--steps", "3", "5", "--json", "--minutes", minutes, "--out", str(out)]) == code
    printed = capsys.readouterr()
    report = json.loads(out.read_text())
    assert json.loads(printed.out) == report
    assert report["command"] == f"python -m nsa_backend bench draft --steps 3 5 --json --minutes {minutes} --out {out}"
    assert report["environment"]["gpu"] == "NVIDIA H200"
    assert report["not_measured"] == ["cell 1"] * code
    assert ("not measured within 0.2 minutes: cell 1" in printed.err) == bool(code)
    assert asked[0].steps == [3, 5]


def options(**given) -> argparse.Namespace:
    return argparse.Namespace(**({"steps": None, "batch": None, "length": None, "quick": False} | given))


def test_metadata_covers_modes_shapes_and_axes():
    wanted = bench_metadata.wanted(options())
    assert len(wanted) == len(set(wanted))
    growth = [w[1:] for w in wanted if w[0] == "growth"]
    for mode in ("draft_decode", "target_verify", "draft_extend"):
        steps, batches, lengths = ({point[axis] for point in growth if point[0] == mode} for axis in (1, 2, 3))
        assert steps == set(range(2, 9))
        assert (min(batches), max(batches)) == (1, 128)
        assert (min(lengths), max(lengths)) == (1024, 131072)
    rows = [w[1:] for w in wanted if w[0] == "rows"]
    assert {(mode, steps) for mode, steps, _, _ in rows} >= {("draft_decode", 4), ("draft_decode", 8), ("target_verify", 3)}
    assert len(bench_metadata.wanted(options(quick=True))) < len(rows)
    own = bench_metadata.wanted(options(batch=[3, 5], length=[777]))
    assert {w[2:] for w in own} == {(4, 3, 777), (4, 5, 777)}
    assert len(own) == 6


def test_the_earlier_generations_call_what_the_release_has():
    """SGLang's own loop, read in its source, makes the same two calls with the same arguments."""
    from sglang.srt.layers.attention import nsa_backend as builtin

    from nsa_backend.benchmarks import builtin_replay

    loop = inspect.getsource(builtin.NativeSparseAttnMultiStepBackend.init_forward_metadata_replay_cuda_graph)
    ours = inspect.getsource(builtin_replay.precompute)
    for method in ("_precompute_replay_metadata", "init_forward_metadata_replay_cuda_graph_from_precomputed"):
        parameters = set(inspect.signature(getattr(builtin.NativeSparseAttnBackend, method)).parameters) - {"self"}
        assert method in loop
        assert method in ours
        for name in parameters:
            assert f"{name}=" in ours, name
    assert "SGLANG_NSA_ENABLE_MTP_PRECOMPUTE_METADATA" in loop
    assert builtin._USE_FUSED_METADATA_COPY in (True, False)


def answer(histogram: list[int]) -> dict:
    return {"meta_info": {"spec_correct_drafts_histogram": histogram}}


def test_rounds_and_accept_length_are_counted_from_histograms():
    assert generation.counted([answer([0, 0, 0, 64]), answer([4, 0, 0, 60])], 257) == (64, (4 + 124 * 4) / 128)
    assert generation.counted([{"meta_info": {}}], 257) == (256, 1.0)
    assert generation.counted([answer([2]), answer([0, 1])], 5) == (2, 4 / 3)


def test_a_sample_in_the_units_of_a_serving_engineer():
    one = generation.Sample(seconds=1.1, first_seconds=0.1, tokens=251, batch=4, rounds=100, accept=2.5)
    assert one.round_ms == pytest.approx(10)
    assert one.tpot_ms == pytest.approx(4)
    assert one.tokens_per_s == pytest.approx(4 * 251 / 1.1)


def test_prompts_are_different_and_in_the_vocabulary():
    made = generation.prompts(32, 300)
    assert len({tuple(p) for p in made}) == 32
    assert {len(p) for p in made} == {300}
    assert all(1 < token < faithful_checkpoint.VOCAB for p in made for token in p)


def test_a_trace_is_read_by_graph(tmp_path):
    def gpu(name: str, correlation: int, ts: float, dur: float) -> dict:
        return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}

    def cpu(name: str, correlation: int) -> dict:
        return {"cat": "cuda_runtime", "name": name, "ts": 0, "dur": 1, "args": {"correlation": correlation}}

    events = [cpu("cudaGraphLaunch", 1), cpu("cudaLaunchKernel", 2), cpu("cudaGraphLaunch", 3), cpu("cudaStreamSynchronize", 4)]
    events += [gpu("a", 1, 10, 2), gpu("b", 1, 14, 6), gpu("c", 2, 30, 5), gpu("a", 3, 50, 2), gpu("b", 3, 53, 1)]
    with gzip.open(tmp_path / "x.trace.json.gz", "wt") as stream:
        json.dump({"traceEvents": events}, stream)
    profile = bench_draft.read_profile(tmp_path, 2)
    assert profile["in_graphs_us"] == (10 + 4) / 2
    assert profile["graphs"] == [{"nodes": 2, "replays": 1.0, "span_us": 7.0}]
    assert profile["kernel_us"] == 16 / 2
    assert (profile["kernels"], profile["launch_calls"], profile["graph_launches"]) == (2.5, 0.5, 1.0)
    assert profile["synchronisations"] == 0.5


def test_servers_run_the_command_of_the_readme():
    block = re.search(r"python -m sglang.launch_server(.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    shown = re.findall(r"--[\w-]+(?: [\w.]+)?", block.replace("\\\n", " "))
    made = " ".join(servers.command(Path("x"), 1))
    for option in shown:
        if not option.startswith(("--model-path", "--tp-size")):
            assert option in made, option
    assert "speculative" not in " ".join(servers.command(Path("x"), 1, 0))


FAKE_SERVER = """
import http.server, json, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.answer({})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer([{"disabled": os.environ["NSA_BACKEND_DISABLE"], "body": body} for _ in body["input_ids"]])
    def answer(self, data):
        self.send_response(200); self.send_header("Content-Type", "application/json"); self.end_headers()
        self.wfile.write(json.dumps(data).encode())
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


@pytest.mark.parametrize(("backend", "disabled"), [("ours", "0"), ("builtin", "1")])
def test_a_server_is_asked_and_ended(monkeypatch, tmp_path, unused_port, backend, disabled):
    code = FAKE_SERVER.replace("PORT", str(unused_port))
    monkeypatch.setattr(servers, "command", lambda *arguments: [sys.executable, "-c", code])
    with servers.Server(backend, tmp_path, unused_port, 3, tmp_path / "log") as server:
        server.wait()
        seconds, answers = server.generate([[1, 2], [3]], 7)
    assert 0 < seconds < 30
    assert [a["disabled"] for a in answers] == [disabled] * 2
    assert answers[0]["body"]["input_ids"] == [[1, 2], [3]]
    assert answers[0]["body"]["sampling_params"] == {"temperature": 0, "max_new_tokens": 7, "ignore_eos": True}
    assert server._process.returncode is not None


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_server_that_ends_shows_the_end_of_its_log(monkeypatch, tmp_path, unused_port):
    monkeypatch.setattr(
        servers, "command", lambda *arguments: [sys.executable, "-c", "print('no memory'); raise SystemExit(3)"]
    )
    with (
        servers.Server("ours", tmp_path, unused_port, 3, tmp_path / "log") as server,
        pytest.raises(RuntimeError, match=r"the server ended with 3.*\nno memory"),
    ):
        server.wait()


def test_an_unknown_checkpoint_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="neither faithful or wide nor a folder"):
        generation.checkpoint_of("narrow", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert generation.checkpoint_of(str(tmp_path), tmp_path) == tmp_path


def test_every_layer_of_a_checkpoint_works_and_only_the_first_and_the_mtp_layer_add_anything():
    shape = faithful_checkpoint.Shape(hidden=64, heads=2, layers=3, experts=2, experts_per_token=1, expert_dim=16)
    tensors, config = faithful_checkpoint.checkpoint(0, shape), faithful_checkpoint.config(shape)
    layers = [
        {name.split(".", 3)[3]: t for name, t in tensors.items() if name.startswith(f"model.layers.{i}.")} for i in range(4)
    ]
    assert config["num_hidden_layers"] == 3
    assert layers[0].keys() == layers[1].keys() == layers[2].keys() < layers[3].keys()
    for name, tensor in layers[0].items():
        assert torch.equal(tensor, layers[3][name]), name
        same = [torch.equal(tensor, layers[i][name]) for i in (1, 2)]
        assert same == [name != "self_attn.o_proj.weight"] * 2
    assert not any(layers[i]["self_attn.o_proj.weight"].any() for i in (1, 2))
    assert layers[0]["self_attn.o_proj.weight"].any()
    assert layers[1]["self_attn.kv_b_proj.weight"].any()


def test_servers_are_kept_until_another_checkpoint_or_n_is_asked_for(monkeypatch, tmp_path):
    """And both have started before either is waited for."""
    events = []

    class Fake:
        def __init__(self, backend, checkpoint, port, steps, log, *options):
            self.name = f"{backend} {checkpoint.name} N={steps} {port}"
            events.append(f"start {self.name}")

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            events.append(f"end {self.name}")

        def wait(self):
            events.append(f"wait {self.name}")

    monkeypatch.setattr(generation, "Server", Fake)
    monkeypatch.setattr(generation.time, "sleep", lambda seconds: None)
    checkpoint = tmp_path / "tiny"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    servers_ = generation.Servers(tmp_path, 100)
    first = servers_.of(str(checkpoint), 3)
    assert servers_.of(str(checkpoint), 3) is first
    assert events == [f"{doing} {who}" for doing in ("start", "wait") for who in ("ours tiny N=3 100", "builtin tiny N=3 200")]
    events.clear()
    servers_.of(str(checkpoint), 0)
    assert [e for e in events if e.startswith("end")] == ["end builtin tiny N=3 200", "end ours tiny N=3 100"]
    assert events[2].startswith("start ours tiny N=0")
    events.clear()
    servers_.close()
    assert len(events) == 2
