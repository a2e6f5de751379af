"""Servers that start: SGLang's /health answers a second after it was asked at the earliest; many at once, some that fail."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Thread
from typing import ClassVar

import pytest

from nsa_backend.benchmarks.servers import HEALTH_SECONDS, Server, wait_until_ready
from nsa_backend.benchmarks.trained import serving

ENDLESS = "import time; time.sleep(60)"


@pytest.fixture
def process():
    """What a server's process is to `wait_until_ready`: something that runs or has ended."""
    with subprocess.Popen([sys.executable, "-c", ENDLESS]) as running:
        yield running
        running.kill()


@pytest.fixture
def health():
    """`health(*answers)` is the port of a server whose /health gives these (seconds, status), and the paths it was asked for.

    The last answer is given for ever.
    """
    servers = []

    def serve(*answers: tuple[float, int]) -> tuple[int, list[str]]:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                seconds, status = answers[min(len(asked), len(answers) - 1)]
                asked.append(self.path)
                time.sleep(seconds)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1].server_port, asked

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_that_takes_longer_than_a_second_is_asked_once(health, process):
    port, asked = health((1.3, 200))
    wait_until_ready(port, process, 30)
    assert asked == ["/health"]


def test_one_that_is_still_starting_is_asked_again(health, process):
    port, asked = health((0, 503), (0, 503), (0, 200))
    wait_until_ready(port, process, 30)
    assert len(asked) == 3


def test_the_time_given_bounds_the_last_request_too(health, process):
    port, _ = health((5, 200))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="did not become ready"):
        wait_until_ready(port, process, 0.5)
    assert time.monotonic() - began < 3


def test_one_that_has_ended_is_told_with_its_exit_code():
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as ended:
        ended.wait()
        with pytest.raises(RuntimeError, match="ended with 3"):
            wait_until_ready(1, ended, 30)


@pytest.mark.parametrize("times", [1, 2])
def test_a_server_that_is_stopped_has_ended(tmp_path, times):
    """A second time too: one that did not come up is stopped at once, and again with all others."""
    server = Server.__new__(Server)
    with (tmp_path / "log").open("w") as server._stream, subprocess.Popen([sys.executable, "-c", ENDLESS]) as server._process:
        for _ in range(times):
            server.stop()
            assert server._process.returncode is not None
        assert server._stream.closed


def test_sglang_has_answered_before_the_time_of_a_request_is_up():
    """It gives up after its own time; a shorter one of ours would abort what it generates and never see the answer."""
    from sglang.srt.entrypoints import http_server

    assert http_server.HEALTH_CHECK_TIMEOUT + 1 < HEALTH_SECONDS


class FakeSideServer:
    """Does not come up where its log is in `broken`."""

    broken: ClassVar[set[str]] = set()
    stopped: ClassVar[list[str]] = []

    def __init__(self, side, checkpoint, port, steps, log, requests):
        self.side, self.steps, self.port, self.log, self.name = side, steps, port, log, f"{side}, N = {steps}"

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def wait(self, seconds):
        if self.log.stem in self.broken:
            raise RuntimeError("the server ended with 1; the end of its log: no memory")

    def stop(self):
        self.stopped.append(self.log.stem)

    def end(self):
        pass


def test_a_server_that_does_not_start_is_tried_again_and_then_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(serving, "SideServer", FakeSideServer)
    monkeypatch.setattr(FakeSideServer, "broken", {"n3-ours", "n3-builtin", "n3-builtin-again"})
    monkeypatch.setattr(FakeSideServer, "stopped", [])
    (tmp_path / "checkpoint").mkdir()
    wanted = [("ours", 3), ("builtin", 3), ("ours", 1)]
    with ExitStack() as stack:
        with pytest.raises(FileNotFoundError, match=r"has no config.json"):
            serving.started(stack, tmp_path, wanted, 1000, tmp_path, print)
        (tmp_path / "checkpoint" / "config.json").write_text("{}")
        found = serving.started(stack, tmp_path, wanted, 1000, tmp_path, lambda text: None)
    assert [server.log.name for server in found.servers] == ["n3-ours-again.log", "n1-ours.log"]
    assert [server.port for server in found.servers] == [1000, 1048]
    assert [text.split(":")[0] for text in found.problems] == ["ours, N = 3", "builtin, N = 3", "builtin, N = 3"]
    assert sorted(FakeSideServer.stopped) == ["n3-builtin", "n3-builtin-again", "n3-ours"], "one that failed runs beside others"


def test_servers_are_waited_for_at_the_same_time(monkeypatch, tmp_path):
    """The first one answers only when all are asked; a start that fails while time is short is not tried again."""
    together = Barrier(3, timeout=20)

    class Patient(FakeSideServer):
        def wait(self, seconds):
            together.wait()
            assert seconds <= 30
            super().wait(seconds)

    monkeypatch.setattr(serving, "SideServer", Patient)
    monkeypatch.setattr(FakeSideServer, "broken", {"n1-builtin"})
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    wanted = [("ours", 1), ("builtin", 1), ("ours", 0)]
    with ExitStack() as stack:
        found = serving.started(stack, tmp_path, wanted, 1000, tmp_path, lambda text: None, seconds=30)
    assert [server.name for server in found.servers] == ["ours, N = 1", "ours, N = 0"]
    assert [text.split(":")[0] for text in found.problems] == ["builtin, N = 1"]
