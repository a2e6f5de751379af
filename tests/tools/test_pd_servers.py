"""A pair of prefill and decode servers as the end-to-end cases and the soak run ask it, against small HTTP servers."""

import json
import subprocess
import sys
from pathlib import Path

import pd_servers
import pytest
import run_case
import stand_in_node
from free_ports import free_port
from pd_servers import ALONE, BOOTSTRAP, DECODE, ROUTER, Pair, command, roles
from workloads import CASES


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Small servers in place of SGLang's; returns a function that tells what they were asked: [role, body] each."""
    script, seen = Path(stand_in_node.__file__), tmp_path / "seen"
    monkeypatch.setenv("NODE_SEEN", str(seen))
    monkeypatch.setattr(pd_servers, "command", lambda arguments: [sys.executable, str(script), *command(arguments)[3:]])
    monkeypatch.setattr(pd_servers, "APART_SECONDS", 0.0)
    return lambda: [row[1:] for row in map(json.loads, seen.read_text().splitlines()) if row[0] == "asked"]


@pytest.fixture
def port() -> int:
    return free_port(ROUTER, BOOTSTRAP, DECODE, ALONE)


def test_both_servers_get_the_request_and_the_decode_server_answers(stand_ins, port):
    with Pair({"port": port, "model_path": "{}"}, "nixl") as pair:
        pair.wait(20)
        answers = pair.generate([[1, 2], [3, 4]], {"temperature": 0})
        alive = pair.prefill.process.pid
    assert [a["output_ids"] for a in answers] == [[2], [2]]
    assert {a["role"] for a in answers} == {"decode"}
    asked = {role: body for role, body in stand_ins()}
    assert asked["prefill"] == asked["decode"]
    assert asked["prefill"]["bootstrap_port"] == [port + BOOTSTRAP] * 2
    assert len(set(asked["prefill"]["bootstrap_room"])) == 2
    assert subprocess.run(["ps", "-p", str(alive)], capture_output=True, check=False).returncode == 1


RANKS, PROMPTS = [0, 1, 1], [[1], [2, 3], [4, 5, 6]]
EACH = [{"top_k": 1}, {}, {"top_k": 3}]


@pytest.mark.parametrize("sampling", [EACH[0], EACH], ids=["of all", "of each"])
def test_requests_choose_ranks_of_the_decode_server(stand_ins, port, sampling):
    """The prefill server gives them to the ranks of their rooms, and would refuse others."""
    with Pair({"port": port, "model_path": "{}", "tp_size": 2}, "nixl", gpus=2) as pair:
        pair.wait(20)
        answers = pair.generate(PROMPTS, sampling, RANKS)
    assert [a["output_ids"] for a in answers] == [[1], [2], [3]]
    asked = {(role, body["bootstrap_room"]): body for role, body in stand_ins()}
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


def test_options_of_the_prefill_server_alone():
    prefill, decode = roles({"port": 1, "tp_size": 2}, "nixl", 2, {"enable_prefill_cp": True})
    assert prefill["enable_prefill_cp"]
    assert "enable_prefill_cp" not in decode


@pytest.mark.parametrize(("tp", "gpus"), [(2, 3), (4, 2), (1, 4)])
def test_gpus_that_servers_would_share_in_part(tp, gpus):
    with pytest.raises(AssertionError, match=f"servers of {tp} GPUs each take {tp} or {2 * tp}, not {gpus}"):
        roles({"port": 1, "tp_size": tp}, "nixl", gpus)


def test_a_case_measures_the_pair_and_one_server(stand_ins, port, monkeypatch):
    case = next(c for c in CASES if c.name == "PD, without CUDA graphs")
    monkeypatch.setattr(run_case, "WORKLOADS", {"8x300": lambda: [[[2, 3]] * 8]})
    found = run_case.run_disaggregated(case, {"port": port, "model_path": "{}"})
    assert tuple(found) == case.measured() == ("8x300", "8x300, one server")
    assert all(len(of_run["output_ids"]) == 8 for of_run in found.values())
    assert sorted(role for role, _ in stand_ins()) == ["alone", "decode", "prefill"]
