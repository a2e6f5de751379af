"""The benchmarks of real servers: what is read from answers and traces, servers that start and end, the made-up checkpoint."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest
from free_ports import free_port

from nsa_backend.benchmarks.commands import serve
from nsa_backend.benchmarks.servers import generation, server, server_options

ROOT = Path(__file__).resolve().parents[2]


def answer(histogram: list[int]) -> dict:
    return {"meta_info": {"spec_correct_drafts_histogram": histogram}}


def test_rounds_and_accept_length_are_counted_from_histograms():
    assert generation.counted([answer([0, 0, 0, 64]), answer([4, 0, 0, 60])], 257) == (64, (4 + 124 * 4) / 128)
    assert generation.counted([{"meta_info": {}}], 257) == (256, 1.0)
    assert generation.counted([answer([2]), answer([0, 1])], 5) == (2, 4 / 3)


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


def serve_options(**given):
    return argparse.Namespace(**({"steps": None, "batch": None, "length": None, "prompt_tokens": None, "quick": False} | given))


def test_serve_measures_the_whole_matrix_and_what_one_chooses():
    every = serve.shapes(serve_options())
    assert sorted(every) == sorted([(b, n) for b in (1, 8, 32) for n in (300, 4096, 32768)] + [(1, 131072)])
    assert every[-1] == (32, 32768)
    assert serve.shapes(serve_options(length=[131072], batch=[8])) == [(8, 131072)]
    assert [serve.repeats(b, n, False) for b, n in ((1, 300), (32, 4096), (32, 32768))] == [7, 5, 3]


def test_a_side_that_is_told_by_an_option(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(
        server.subprocess, "Popen", lambda words, **how: found.append((words, how["env"]["NSA_BACKEND_DISABLE"]))
    )
    for side in ("verify", "ours"):
        server.Server(side, tmp_path, 100, 3, tmp_path / "log", "--tp-size", "2")
    (verify, ours), switches = zip(*found, strict=True)
    assert switches == ("0", "0")
    assert [word for word in verify if word not in ours] == ["sparse_verify"]
    assert verify[-2:] == ours[-2:] == ["--tp-size", "2"]
