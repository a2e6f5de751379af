"""A pair of prefill and decode servers as the end-to-end cases and the soak run ask it, against small HTTP servers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import pd_servers
import run_case
from pd_servers import ALONE, BOOTSTRAP, DECODE, Pair, command, rooms, router_command
from workloads import CASES

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
words = sys.argv[1:]
option = dict(zip(words, words[1:]))
port, role = int(option["--port"]), option.get("--disaggregation-mode", "alone")
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open({seen!r}, "a") as seen:
            print(json.dumps([role, self.path, asked]), file=seen)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        count = 1 if role == "prefill" else 4
        meta = {{"spec_correct_drafts_histogram": [0, 0, 0, 9], "cached_tokens": 0}}
        many = [{{"output_ids": [7] * count, "meta_info": meta}} for _ in asked["input_ids"]]
        self.wfile.write(json.dumps(many).encode())
    def log_message(self, *arguments):
        pass
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Small servers in place of SGLang's; returns a function that tells what they were asked: [role, path, body] each."""
    script, seen = tmp_path / "server.py", tmp_path / "seen"
    script.write_text(SERVER.format(seen=str(seen)))
    monkeypatch.setattr(pd_servers, "command", lambda arguments: [sys.executable, str(script), *command(arguments)[3:]])
    monkeypatch.setattr(pd_servers, "APART_SECONDS", 0.0)
    return lambda: [json.loads(line) for line in seen.read_text().splitlines()]


def test_both_servers_get_the_request_and_the_decode_server_answers(stand_ins):
    with Pair({"port": 34000, "model_path": "x"}, "nixl") as pair:
        pair.wait(20)
        answers = pair.generate([[1, 2], [3, 4]], {"temperature": 0})
        alive = pair.prefill.process.pid
    assert [a["output_ids"] for a in answers] == [[7] * 4] * 2
    asked = {role: body for role, path, body in stand_ins()}
    assert asked["prefill"] == asked["decode"]
    assert asked["prefill"]["bootstrap_port"] == [34000 + BOOTSTRAP] * 2
    assert len(set(asked["prefill"]["bootstrap_room"])) == 2
    assert subprocess.run(["ps", "-p", str(alive)], capture_output=True, check=False).returncode == 1


def test_a_case_measures_the_pair_and_one_server(stand_ins, monkeypatch):
    case = next(c for c in CASES if c.name == "PD, without CUDA graphs")
    monkeypatch.setattr(run_case, "WORKLOADS", {"8x300": lambda: [[[2, 3]] * 8]})
    found = run_case.run_disaggregated(case, {"port": 34040, "model_path": "x"})
    assert tuple(found) == case.measured() == ("8x300", "8x300, one server")
    assert all(len(of_run["output_ids"]) == 8 for of_run in found.values())
    assert sorted(role for role, _, _ in stand_ins()) == ["alone", "decode", "prefill"]


def test_a_server_that_ends_says_so(stand_ins, monkeypatch):
    monkeypatch.setattr(pd_servers, "command", lambda arguments: [sys.executable, "-c", "import sys; sys.exit(3)"])
    with Pair({"port": 34080}, "nixl") as pair, pytest.raises(RuntimeError, match="the server ended with 3"):
        pair.wait(20)


def test_ports_of_a_case_are_apart():
    ports = [0, DECODE, ALONE, pd_servers.ROUTER, BOOTSTRAP]
    assert len(set(ports)) == len(ports)
    router = router_command(34000)
    assert router[router.index("--prefill") + 1 :][:2] == ["http://127.0.0.1:34000", str(34000 + BOOTSTRAP)]
    assert router[router.index("--decode") + 1] == f"http://127.0.0.1:{34000 + DECODE}"


def test_rooms_are_not_shared():
    drawn = [room for _ in range(50) for room in rooms(20, 1)["bootstrap_room"]]
    assert len(set(drawn)) == 1000
    assert all(0 <= room < 2**63 for room in drawn)


def test_arguments_become_words():
    words = command(
        {"port": 1, "cuda_graph_bs_decode": [1, 2], "disable_cuda_graph": True, "enable_x": False, "model_path": "p"}
    )
    assert words[3:] == ["--port", "1", "--cuda-graph-bs-decode", "1", "2", "--disable-cuda-graph", "--model-path", "p"]
