"""A prefill and a decode server that a benchmark measures as one: how they start, what they are asked, and how they end."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
from pathlib import Path

import pytest
from free_ports import free_port

from nsa_backend.benchmarks.servers import generation, pairs, server, sides
from nsa_backend.benchmarks.servers.pairs import BOOTSTRAP, DECODE, NCCL_PORT, Pair
from nsa_backend.benchmarks.servers.parallel import Parallel

STAND_IN = Path(__file__).resolve().parents[1] / "support" / "stand_in_of_pair.py"


@pytest.fixture
def port() -> int:
    return free_port(DECODE)


@pytest.fixture
def stand_ins(monkeypatch):
    """Small processes in place of servers, which print what they were started with and what they are asked."""
    monkeypatch.setattr(pairs, "APART_SECONDS", 0.0)
    monkeypatch.setattr(server, "command", lambda checkpoint, port, *rest: [sys.executable, str(STAND_IN), str(port)])


def printed(folder: Path, mode: str, what: str) -> list[dict]:
    rows = map(json.loads, (folder / f"glm-5.2-n3.{mode}.log").read_text().splitlines())
    return [row[what] for row in rows if what in row]


def test_both_are_asked_for_the_same_rooms_on_gpus_and_ports_of_their_own(stand_ins, tmp_path, port):
    with Pair(Parallel(dp=2, pd=True), "ours", tmp_path, port, 3, tmp_path / "glm-5.2-n3.log", "--tp-size", "2") as pair:
        pair.wait()
        found = pair.streamed([[1], [2, 3], [4]], 7, temperature=0.5)
        processes = [server._process for server in (pair.prefill, pair.decode)]
    assert [answer["index"] for answer in found.answers] == [0, 1, 2]
    assert None not in {process.poll() for process in processes}
    (prefill,), (decode,) = (printed(tmp_path, mode, "asked") for mode in ("prefill", "decode"))
    assert (decode.pop("stream"), decode["sampling_params"].pop("stream_interval")) == (True, server.NEVER)
    assert prefill == decode
    assert prefill["sampling_params"] == server.greedy(7) | {"temperature": 0.5}
    first = prefill["bootstrap_room"][0]
    assert prefill["bootstrap_room"] == [first, first + 1, first + 2]
    assert prefill["bootstrap_port"] == [port + BOOTSTRAP] * 3
    assert prefill["bootstrap_host"] == ["127.0.0.1"] * 3
    for mode, above, gpu in (("prefill", 0, "0"), ("decode", DECODE, "2")):
        (option,) = printed(tmp_path, mode, "options")
        assert (option["--disaggregation-mode"], option["--base-gpu-id"], option["--tp-size"]) == (mode, gpu, "2")
        assert option["--disaggregation-bootstrap-port"] == str(port + BOOTSTRAP)
        assert option["--nccl-port"] == str(port + above + NCCL_PORT)


def test_a_decode_server_that_refuses_is_not_waited_for(stand_ins, tmp_path, port):
    """Its prefill server, which nobody fetches the KV from, would answer after minutes."""
    with Pair(Parallel(pd=True), "ours", tmp_path, port, 3, tmp_path / "glm-5.2-n3.log") as pair:
        pair.wait()
        began = time.monotonic()
        with pytest.raises(urllib.error.HTTPError, match="400"):
            pair.streamed([[1]], 99)
        assert time.monotonic() - began < 10


def test_pairs_of_two_sides_share_no_port():
    of_dp = (13, *range(233, 240))  # SGLang's own, above the port of a server with DP attention
    own = [BOOTSTRAP, *(server + port for server in (0, DECODE) for port in (0, NCCL_PORT, *of_dp))]
    ports = [sides.PORTS_APART * side + port for side in range(4) for port in own]
    assert len(set(ports)) == len(ports) == 4 * len(own)


def test_rounds_of_a_pair_are_those_of_each_request(monkeypatch):
    """Some decode while others are prefilled, so that the last first token says nothing of the others' rounds."""
    histogram = {"meta_info": {"spec_correct_drafts_histogram": [0, 0, 0, 10]}}
    progress = [[(1, 1.0), (41, 2.0)], [(1, 1.5), (41, 2.6)], [(1, 2.9), (41, 4.0)]]
    found = server.Streamed([1.0, 1.5, 2.9], 4.0, [histogram] * 3, progress)
    pair = object.__new__(Pair)
    monkeypatch.setattr(Pair, "streamed", lambda self, prompts, tokens: found)
    sample = generation.sample_of(pair, [[1]] * 3, 41)
    assert sample.round_ms == pytest.approx(1e3 * 1.1 / 10)
    assert sample.tpot_ms == pytest.approx(1e3 * 1.1 / 40)
    assert sample.ttft_ms == 2900
    assert sample.tokens_per_s == pytest.approx(3 * 41 / 4.0)
