"""Servers that start: SGLang's /health answers a second after it was asked at the earliest."""

from __future__ import annotations

import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from nsa_backend.benchmarks.servers.server import HEALTH_SECONDS, Server, wait_until_ready

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
