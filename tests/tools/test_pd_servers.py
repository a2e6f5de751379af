"""A pair of prefill and decode servers as the end-to-end cases and the soak run ask it, against small HTTP servers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import pd_servers
import run_case
from pd_servers import ALONE, BOOTSTRAP, DECODE, ROUTER, Pair, command, roles
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
        prompts = asked["input_ids"]
        many = [{{"output_ids": [len(prompt)] * count, "meta_info": meta}} for prompt in prompts if isinstance(prompt, list)]
        one = {{"output_ids": [len(prompts)] * count, "meta_info": meta}}
        self.wfile.write(json.dumps(many or one).encode())
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


@pytest.fixture
def port() -> int:
    return free_port(ROUTER, BOOTSTRAP, DECODE, ALONE)


def test_both_servers_get_the_request_and_the_decode_server_answers(stand_ins, port):
    with Pair({"port": port, "model_path": "x"}, "nixl") as pair:
        pair.wait(20)
        answers = pair.generate([[1, 2], [3, 4]], {"temperature": 0})
        alive = pair.prefill.process.pid
    assert [a["output_ids"] for a in answers] == [[2] * 4] * 2
    asked = {role: body for role, path, body in stand_ins()}
    assert asked["prefill"] == asked["decode"]
    assert asked["prefill"]["bootstrap_port"] == [port + BOOTSTRAP] * 2
    assert len(set(asked["prefill"]["bootstrap_room"])) == 2
    assert subprocess.run(["ps", "-p", str(alive)], capture_output=True, check=False).returncode == 1


RANKS, PROMPTS = [0, 1, 1], [[1], [2, 3], [4, 5, 6]]
EACH = [{"top_k": 1}, {}, {"top_k": 3}]


@pytest.mark.parametrize("sampling", [EACH[0], EACH], ids=["of all", "of each"])
def test_requests_choose_ranks_of_the_decode_server(stand_ins, port, sampling):
    """The prefill server gives them to the ranks of their rooms, and would refuse others."""
    with Pair({"port": port, "model_path": "x", "tp_size": 2}, "nixl", gpus=2) as pair:
        pair.wait(20)
        answers = pair.generate(PROMPTS, sampling, RANKS)
    assert [a["output_ids"] for a in answers] == [[1] * 4, [2] * 4, [3] * 4]
    asked = {(role, body["bootstrap_room"]): body for role, _, body in stand_ins()}
    rooms_asked = {room for _, room in asked}
    assert (len(asked), len(rooms_asked)) == (6, 3)
    chosen = {}
    for room in rooms_asked:
        of_decode = asked["decode", room]
        rank = of_decode.pop("routed_dp_rank")
        assert asked["prefill", room] == of_decode
        assert (of_decode["bootstrap_host"], of_decode["bootstrap_port"]) == ("127.0.0.1", port + BOOTSTRAP)
        chosen[len(of_decode["input_ids"])] = rank, of_decode["sampling_params"]
    each = sampling if isinstance(sampling, list) else [sampling] * 3
    assert chosen == {n: (rank, its_own) for n, rank, its_own in zip((1, 2, 3), RANKS, each, strict=True)}


@pytest.mark.parametrize(("tp", "gpus", "first"), [(1, 2, 1), (2, 4, 2), (2, 2, 0), (4, 4, 0)])
def test_a_decode_server_is_beside_the_prefill_server_or_on_the_same_gpus(tp, gpus, first):
    prefill, decode = roles({"port": 1, "tp_size": tp}, "nixl", gpus)
    assert (prefill["base_gpu_id"], decode["base_gpu_id"]) == (0, first)


@pytest.mark.parametrize(("tp", "gpus"), [(2, 3), (4, 2), (1, 4)])
def test_gpus_that_servers_would_share_in_part(tp, gpus):
    with pytest.raises(AssertionError, match=f"servers of {tp} GPUs each take {tp} or {2 * tp}, not {gpus}"):
        roles({"port": 1, "tp_size": tp}, "nixl", gpus)


def test_a_case_measures_the_pair_and_one_server(stand_ins, port, monkeypatch):
    case = next(c for c in CASES if c.name == "PD, without CUDA graphs")
    monkeypatch.setattr(run_case, "WORKLOADS", {"8x300": lambda: [[[2, 3]] * 8]})
    found = run_case.run_disaggregated(case, {"port": port, "model_path": "x"})
    assert tuple(found) == case.measured() == ("8x300", "8x300, one server")
    assert all(len(of_run["output_ids"]) == 8 for of_run in found.values())
    assert sorted(role for role, _, _ in stand_ins()) == ["alone", "decode", "prefill"]
