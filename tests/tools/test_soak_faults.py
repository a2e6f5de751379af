"""Faults of a soak run against small processes in place of servers: what comes of each, and what of it is a problem."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import soak_faults
import stand_in_of_faults
from free_ports import free_port
from soak_answers import Template
from soak_side import Soak
from soak_traffic import Client, Traffic


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Returns a function to a run whose server serves, and ends with its rank, and one that starts its server anew."""
    monkeypatch.setattr(soak_faults, "GONE_SECONDS", 6.0)
    monkeypatch.setattr(soak_faults, "UNDER_WAY", 2)
    servers = []

    def running() -> Soak:
        client = Client(port := free_port())
        made = Soak(client, Traffic(client, 0), [Template(0, (2,) * 9, 4)], 600.0, time.monotonic(), port, log=tmp_path / "log")
        made.references = {0: [7] * 4}
        start(made)
        return made

    def start(made: Soak) -> None:
        command = [sys.executable, stand_in_of_faults.__file__, str(made.port)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, text=True)
        servers.append(server)
        assert server.stdout.readline() == "serving\n"
        made.servers.append(server)

    yield running, start
    for server in servers:
        soak_faults.end_all(server)
        server.stdout.close()


def test_a_server_that_ends_with_its_rank_serves_again_when_it_is_started_anew(run, monkeypatch):
    running, start = run
    monkeypatch.setattr(soak_faults, "FATAL", {name: soak_faults.FATAL[name] for name in ("a rank killed in a round",)})
    made = running()
    made.faults = soak_faults.FAULTS
    soak_faults.faults(made, start, enough=1.0)
    killed, two = made.fatal["a rank killed in a round"], made.fatal["two servers started at once"]
    assert (killed["under_way"], killed["finished"], killed["exit"], killed["processes_left"]) == (2, 0, 0, 0)
    assert killed["serves_again"]
    assert killed["ends"]
    assert (two["errors"], two["serves_again"]) == ([], True)
    assert made.problems == []


def test_a_server_that_hangs_is_a_problem():
    found = {"exit": None, "ends": ["OSError"], "processes_left": 3, "serves_again": False}
    problems = soak_faults.problems_of_fatal("a rank killed in a round", found)
    assert [problem.split(": ")[1][:30] for problem in problems] == [
        "the server had not ended 60 s ",
        "3 processes of the ended serve",
        "a server started after it did ",
    ]


def test_malformed_requests_are_sent_as_long_as_the_load_lasts(run, monkeypatch):
    running, _ = run
    made = running()
    made.phase = "load"
    answers = soak_faults.malformed_under_load(made, every=0.0)
    deadline = time.monotonic() + 60
    while not all(answers.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    made.phase = "settle"
    assert answers["a negative length"] == answers["not JSON"] == [400]
    assert answers["no prompt"] == [200]


def test_what_the_builtin_survives_must_not_end_ours():
    theirs = {"malformed": {"no prompt": [400], "not JSON": [400, 422]}, "fatal": {"no memory left in traffic": {"exit": None}}}
    assert soak_faults.compared(theirs, theirs) == soak_faults.compared(theirs, None) == soak_faults.compared({}, theirs) == []
    ours = {"malformed": {"no prompt": [500], "not JSON": [422, 400]}, "fatal": {"no memory left in traffic": {"exit": -9}}}
    assert soak_faults.compared(ours, theirs) == [
        "no prompt: answered 500, and by the built-in backend 400",
        "no memory left in traffic: ended with -9, and the built-in backend survives it",
    ]
    dead = {"malformed": {}, "fatal": {"no memory left in traffic": {"exit": -9}}}
    assert soak_faults.compared(ours, dead) == []


@pytest.mark.slow
def test_what_takes_the_memory_is_ended_and_a_server_that_survives_it_may(run, monkeypatch):
    running, start = run
    monkeypatch.setattr(soak_faults, "HOG", "import time; print('taken', flush=True); time.sleep(60)")
    made, began = running(), time.monotonic()
    made.seconds, made.faults = 90.0, ("no memory left in traffic",)
    soak_faults.faults(made, start, enough=60.0)
    assert time.monotonic() - began < 50
    assert made.fatal["no memory left in traffic"]["exit"] is None
    assert made.problems == []


def test_a_side_that_needs_the_gpu_alone_waits_for_the_others():
    order, gpu = [], f"test_{os.getpid()}"

    def alone() -> None:
        with soak_faults.gpu_shared(gpu, alone=True):
            order.append("alone")

    waiting = threading.Thread(target=alone)
    with soak_faults.gpu_shared(gpu), soak_faults.gpu_shared(gpu):
        waiting.start()
        waiting.join(0.3)
        order.append("shared")
    waiting.join()
    assert order == ["shared", "alone"]
