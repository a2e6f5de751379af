"""The benchmarks of real servers: what is read from answers and traces, servers that start and end, the made-up checkpoint."""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from pathlib import Path

import pytest
from free_ports import free_port

from nsa_backend.benchmarks.commands import draft, serve
from nsa_backend.benchmarks.servers import generation, pairs, server, server_options, sides

ROOT = Path(__file__).resolve().parents[2]


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
    assert one.ttft_ms == pytest.approx(100)


def test_a_trace_is_read_by_graph(tmp_path):
    def gpu(name: str, correlation: int, ts: float, dur: float) -> dict:
        return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}

    def cpu(name: str, correlation: int) -> dict:
        return {"cat": "cuda_runtime", "name": name, "ts": 0, "dur": 1, "args": {"correlation": correlation}}

    events = [cpu("cudaGraphLaunch", 1), cpu("cudaLaunchKernel", 2), cpu("cudaGraphLaunch", 3), cpu("cudaStreamSynchronize", 4)]
    events += [gpu("a", 1, 10, 2), gpu("b", 1, 14, 6), gpu("c", 2, 30, 5), gpu("a", 3, 50, 2), gpu("b", 3, 53, 1)]
    with gzip.open(tmp_path / "x.trace.json.gz", "wt") as stream:
        json.dump({"traceEvents": events}, stream)
    profile = draft.read_profile(tmp_path, 2)
    assert profile["in_graphs_us"] == (10 + 4) / 2
    assert profile["graphs"] == [{"nodes": 2, "replays": 1.0, "span_us": 7.0}]
    assert profile["kernel_us"] == 16 / 2
    assert (profile["kernels"], profile["launch_calls"], profile["graph_launches"]) == (2.5, 0.5, 1.0)
    assert profile["synchronisations"] == 0.5
    assert profile["calls_a_round"] == {}  # of two rounds nothing can be told


def test_servers_run_the_command_of_the_readme(monkeypatch):
    """In the names of the first release, which every later one goes on taking with the plugin."""
    block = re.search(r"python -m sglang.launch_server(.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    shown = re.findall(r"--[\w-]+(?: [\w.]+)?", block.replace("\\\n", " "))
    made = []
    for release in ("0.5.12.post1", "0.5.23"):
        monkeypatch.setattr(server_options, "installed", lambda release=release: release)
        made.append(" ".join(server.command(Path("x"), 1)))
        assert "speculative" not in " ".join(server.command(Path("x"), 1, 0))
    for option in shown:
        if not option.startswith(("--model-path", "--tp-size")):
            assert any(option in command for command in made), option
    assert "--attention-backend dsa --dsa-decode-backend fa3" in made[1]


FAKE_SERVER = """
import http.server, json, os, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.answer({})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("stream"): return self.stream(body)
        self.answer([{"disabled": os.environ["NSA_BACKEND_DISABLE"], "body": body} for _ in body["input_ids"]])
    def stream(self, body):
        self.send_response(200); self.send_header("Content-Type", "text/event-stream"); self.end_headers()
        if body["sampling_params"]["max_new_tokens"] > 100:
            self.event({"error": {"message": "too long"}}); return
        for index in (1, 0): self.event({"index": index, "meta_info": {"completion_tokens": 1 + index}})
        time.sleep(0.2)
        for index in (0, 1): self.event({"index": index, "body": body})
        self.wfile.write(b"data: [DONE]\\n\\n")
    def event(self, data):
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\\n\\n"); self.wfile.flush()
    def answer(self, data):
        self.send_response(200); self.send_header("Content-Type", "application/json"); self.end_headers()
        self.wfile.write(json.dumps(data).encode())
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


@pytest.mark.parametrize(("backend", "disabled"), [("ours", "0"), ("builtin", "1")])
def test_a_server_is_asked_and_ended(monkeypatch, tmp_path, unused_port, backend, disabled):
    code = FAKE_SERVER.replace("PORT", str(unused_port))
    monkeypatch.setattr(server, "command", lambda *arguments: [sys.executable, "-c", code])
    with server.Server(backend, tmp_path, unused_port, 3, tmp_path / "log") as running:
        running.wait()
        seconds, answers = running.generate([[1, 2], [3]], 7)
    assert 0 < seconds < 30
    assert [a["disabled"] for a in answers] == [disabled] * 2
    assert answers[0]["body"]["input_ids"] == [[1, 2], [3]]
    assert answers[0]["body"]["sampling_params"] == {"temperature": 0, "max_new_tokens": 7, "ignore_eos": True}
    assert running._process.returncode is not None


def test_a_stream_tells_first_tokens_from_the_end(monkeypatch, tmp_path, unused_port):
    code = FAKE_SERVER.replace("PORT", str(unused_port))
    monkeypatch.setattr(server, "command", lambda *arguments: [sys.executable, "-c", code])
    with server.Server("ours", tmp_path, unused_port, 3, tmp_path / "log") as running:
        running.wait()
        found = running.streamed([[1], [2]], 7)
        with pytest.raises(RuntimeError, match=r"refused a batch: .*too long"):
            running.streamed([[1], [2]], 101)
        with pytest.raises(RuntimeError, match="answered 2 of 3 prompts"):
            running.streamed([[1], [2], [3]], 7)
    assert 0 < max(found.first_seconds) <= found.seconds - 0.2
    assert [a["index"] for a in found.answers] == [0, 1]
    assert found.answers[0]["body"]["sampling_params"]["stream_interval"] == server.NEVER
    assert [[tokens for tokens, _ in of_one] for of_one in found.progress] == [[1, 0], [2, 0]]
    assert [of_one[0][1] for of_one in found.progress] == found.first_seconds


@pytest.fixture
def unused_port() -> int:
    return free_port()


def test_a_server_that_ends_shows_the_end_of_its_log(monkeypatch, tmp_path, unused_port):
    monkeypatch.setattr(server, "command", lambda *arguments: [sys.executable, "-c", "print('no memory'); raise SystemExit(3)"])
    with (
        server.Server("ours", tmp_path, unused_port, 3, tmp_path / "log") as running,
        pytest.raises(RuntimeError, match=r"the server ended with 3.*\nno memory"),
    ):
        running.wait()


def test_an_unknown_checkpoint_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"neither faithful or wide or .*or deep or v3.2-tp8 or .* nor a folder"):
        sides.checkpoint_of("narrow", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert sides.checkpoint_of(str(tmp_path), tmp_path) == tmp_path


def test_servers_are_kept_until_another_checkpoint_or_n_is_asked_for(monkeypatch, tmp_path):
    """And both have started before either is waited for."""
    events = []

    class Fake:
        def __init__(self, backend, checkpoint, port, steps, log, *options, environment):
            self.name = f"{backend} {checkpoint.name} N={steps} {port}"
            events.append(f"start {self.name}")

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            events.append(f"end {self.name}")

        def wait(self):
            events.append(f"wait {self.name}")

    monkeypatch.setattr(pairs, "Server", Fake)
    monkeypatch.setattr(sides.time, "sleep", lambda seconds: None)
    checkpoint = tmp_path / "tiny"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    running = sides.Servers(tmp_path, 100, [(8, 300)], 256)
    first = running.of(str(checkpoint), 3)
    assert running.of(str(checkpoint), 3) is first
    assert events == [f"{doing} {who}" for doing in ("start", "wait") for who in ("ours tiny N=3 100", "builtin tiny N=3 150")]
    events.clear()
    running.of(str(checkpoint), 0)
    assert [e for e in events if e.startswith("end")] == ["end builtin tiny N=3 150", "end ours tiny N=3 100"]
    assert events[2].startswith("start ours tiny N=0")
    events.clear()
    running.close()
    assert len(events) == 2


def serve_options(**given):
    return argparse.Namespace(**({"steps": None, "batch": None, "length": None, "prompt_tokens": None, "quick": False} | given))


def test_serve_measures_the_whole_matrix_and_what_one_chooses():
    every = serve.shapes(serve_options())
    assert sorted(every) == sorted([(b, n) for b in (1, 8, 32) for n in (300, 4096, 32768)] + [(1, 131072)])
    assert every[-1] == (32, 32768)
    assert serve.shapes(serve_options(length=[131072], batch=[8])) == [(8, 131072)]
    assert [serve.repeats(b, n, False) for b, n in ((1, 300), (32, 4096), (32, 32768))] == [7, 5, 3]
