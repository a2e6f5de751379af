"""Servers that are not timed stand still with all their processes, and go on afterwards; what is timed has its GPU alone."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from nsa_backend.benchmarks.trained import gpu_lock
from nsa_backend.benchmarks.trained.pausing import paused

CHILD = "import time; time.sleep(60)"
SERVER = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {CHILD!r}]); print(1, flush=True); c.wait()"


@pytest.fixture
def server():
    """A process that started another one, as a server starts its scheduler."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
    assert process.stdout.readline()
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    yield family
    for one in family:
        one.kill()
    process.wait()
    process.stdout.close()


def come_to(family: list[psutil.Process], stopped: bool) -> bool:
    """Whether all of them stand still, or none: a signal arrives when the process is scheduled next."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if all((one.status() == psutil.STATUS_STOPPED) == stopped for one in family):
            return True
        time.sleep(0.05)
    return False


def test_a_server_and_what_it_started_stand_still_and_go_on(server):
    assert len(server) == 2
    with paused([server[0].pid]):
        assert come_to(server, stopped=True)
    assert come_to(server, stopped=False)


def test_they_go_on_after_an_error_and_one_that_ended_does_no_harm(server):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(RuntimeError, match="of the measurement"), paused([ended.pid, server[0].pid]):
        assert come_to(server, stopped=True)
        raise RuntimeError("of the measurement")
    assert come_to(server, stopped=False)


def test_what_is_timed_waits_for_those_that_are_busy(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test_what_is_timed")
    with gpu_lock.busy():
        with gpu_lock.alone(time.monotonic() + 0.2) as free:
            assert not free
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test_another_gpu")
        with gpu_lock.alone(time.monotonic()) as free:
            assert free
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "test_what_is_timed")
    with gpu_lock.alone(time.monotonic()) as free:
        assert free
