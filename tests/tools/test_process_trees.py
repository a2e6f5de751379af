"""Ending a process with all that it started, in its session or in sessions of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from living import have_ended, is_alive

from nsa_backend.benchmarks.servers.process_trees import end_all

LEADER = """
import signal, subprocess, sys, time
def told(number, frame):
    print("told", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, told)
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
for own_session in (False, True):
    child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=own_session)
    child.stdout.readline()
    print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def started():
    """Returns a function of the seconds that a leader runs: (it, its child in its session, its child in another)."""
    leaders, children = [], []

    def start(seconds: float = 60.0) -> tuple[subprocess.Popen, int, int]:
        command = [sys.executable, "-c", LEADER, str(seconds)]
        leaders.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        children.extend(int(leaders[-1].stdout.readline()) for _ in range(2))
        return leaders[-1], *children[-2:]

    yield start
    for pid in filter(is_alive, children):
        os.kill(pid, signal.SIGKILL)
    for process in leaders:
        process.kill()
        process.wait()
        process.stdout.close()


def test_unasked_they_are_killed_and_others_stay(started):
    leader, *children = started()
    other, *of_other = started()
    end_all(leader)
    assert leader.returncode == -signal.SIGKILL
    assert leader.stdout.read() == ""
    assert have_ended(children)
    assert other.poll() is None
    assert all(map(is_alive, of_other))


def test_asked_the_leader_ends_by_itself_and_what_is_deaf_is_killed(started):
    leader, *children = started()
    end_all(leader, asked=30.0)
    assert leader.returncode == 5
    assert leader.stdout.read() == "told\n"
    assert have_ended(children)


def test_a_leader_that_has_ended_leaves_its_session_behind(started):
    """What has a session of its own and no parent any more is nobody's."""
    leader, beside, elsewhere = started(seconds=0.0)
    assert leader.wait(30) == 0
    assert is_alive(beside)
    end_all(leader)
    assert have_ended([beside])
    assert is_alive(elsewhere)
