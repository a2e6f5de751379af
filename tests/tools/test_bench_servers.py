"""The benchmarks' servers: how they start, what is asked of them and read from their streams, and how they end."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import stand_in_server
import stand_in_stream
from free_ports import free_port
from sglang.srt.managers.io_struct import ProfileReq

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


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Returns a function that starts a server of ours by these words of Python's, with its port behind them."""

    def start(*words: str) -> server.Server:
        port = free_port()
        monkeypatch.setattr(server, "command", lambda *arguments: [sys.executable, *words, str(port)])
        return server.Server("ours", tmp_path, port, 3, tmp_path / "log")

    return start


def test_a_server_is_asked_and_ended_and_its_stream_tells_first_tokens_from_the_end(started, monkeypatch):
    """The stand-in holds the end back until the clock was read at both first tokens."""
    readings = count()

    def clock() -> int:
        reading = next(readings)
        if reading == 2:
            server.call(running.port, stand_in_stream.FIRST_READ)
        return reading

    with started(stand_in_stream.__file__) as running:
        running.wait()
        seconds, answers = running.generate([[1, 2], [3]], 7)
        with monkeypatch.context() as patch:
            patch.setattr(server, "time", SimpleNamespace(perf_counter=clock))
            found = running.streamed([[1], [2]], 7)
        with pytest.raises(RuntimeError, match=r"refused a batch: .*too long"):
            running.streamed([[1], [2]], 101)
        with pytest.raises(RuntimeError, match="answered 2 of 3 prompts"):
            running.streamed([[1], [2], [3]], 7)
    assert running._process.returncode is not None
    assert 0 < seconds < 30
    assert answers[0]["body"]["input_ids"] == [[1, 2], [3]]
    assert answers[0]["body"]["sampling_params"] == {"temperature": 0, "max_new_tokens": 7, "ignore_eos": True}
    assert (found.first_seconds, found.seconds) == ([2, 1], 4)
    assert [a["index"] for a in found.answers] == [0, 1]
    assert found.answers[0]["body"]["sampling_params"]["stream_interval"] == server.NEVER
    assert found.progress == [[(1, 2), (0, 3)], [(2, 1), (0, 4)]]


def test_a_server_that_ends_shows_the_end_of_its_log(started):
    with (
        started("-c", "print('no memory'); raise SystemExit(3)") as running,
        pytest.raises(RuntimeError, match=r"the server ended with 3.*\nno memory"),
    ):
        running.wait()


def test_a_server_that_is_stopped_twice_has_ended(started):
    """One that did not come up is stopped at once, and again with all others."""
    running = started("-c", "import time; time.sleep(60)")
    for _ in range(2):
        running.stop()
        assert running._process.returncode is not None
        assert running._stream.closed


def test_a_server_tells_how_many_tokens_its_pool_holds(tmp_path, monkeypatch, serving):
    """Of what SGLang 0.5.23 answered: its options first, then what its scheduler says, which counts tokens of requests."""
    told = {"tp_size": 2, "dcp_size": 2, "max_total_tokens": None, "page_size": 64, "status": "ready"}
    told |= {"max_total_num_tokens": 1117312, "max_req_input_len": 163834, "version": "0.5.23"}

    class Handler(stand_in_server.Handler):
        def do_GET(self):
            self.answer(told if self.path == "/server_info" else {})

    monkeypatch.setattr(server.subprocess, "Popen", lambda *words, **how: None)
    assert server.Server("ours", tmp_path, serving(Handler), 3, tmp_path / "log").pool_tokens() == 1117312


def test_a_trace_has_no_stacks_of_python_in_it(tmp_path, monkeypatch, serving):
    """Nor shapes; and it ends with the batch."""
    asked = []

    class Handler(stand_in_server.Handler):
        def do_POST(self):
            asked.append((self.path, self.body()))
            self.answer([{"text": "answered"}])

    monkeypatch.setattr(server.subprocess, "Popen", lambda *words, **how: None)
    running = server.Server("ours", tmp_path, serving(Handler), 3, tmp_path / "log")
    assert running.profiled(tmp_path / "traces", [[1]], 7) == [{"text": "answered"}]
    assert [path for path, _ in asked] == ["/start_profile", "/generate", "/stop_profile"]
    given = ProfileReq(**asked[0][1])
    assert (given.output_dir, given.with_stack, given.record_shapes) == (str(tmp_path / "traces"), False, False)


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


def test_an_fp8_cache_has_what_sglang_decodes_it_with(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(server.subprocess, "Popen", lambda words, **how: found.append(words))
    for side, kv in product(("sparse_prefill", "builtin"), server.KV):
        server.Server(side, tmp_path, 100, 3, tmp_path / "log", kv=kv)
    decode = server_options.names().decode
    told = [[words[words.index(option) + 1] for option in ("--kv-cache-dtype", decode)] for words in found]
    assert told == [["bfloat16", "fa3"], ["fp8_e4m3", "flashmla_kv"]] * 2
    assert {words[len(words) - words[::-1].index(decode)] for words in found[:2]} == {"fa3", "flashmla_kv"}


class TestReadiness:
    """SGLang's /health answers a second after it was asked at the earliest."""

    @pytest.fixture
    def process(self):
        """What a server's process is to `wait_until_ready`: something that runs."""
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as running:
            yield running
            running.kill()

    @pytest.fixture
    def health(self, serving):
        """`health(*answers)` is the port of a server whose /health gives these (seconds, status), the last of them for ever.

        And the paths that it was asked for.
        """

        def start(*answers: tuple[float, int]) -> tuple[int, list[str]]:
            asked: list[str] = []

            class Handler(stand_in_server.Handler):
                def do_GET(self):
                    seconds, status = answers[min(len(asked), len(answers) - 1)]
                    asked.append(self.path)
                    time.sleep(seconds)
                    self.send_response(status)
                    self.end_headers()

            return serving(Handler), asked

        return start

    @pytest.mark.parametrize(("answers", "times"), [([(1.3, 200)], 1), ([(0, 503), (0, 503), (0, 200)], 3)])
    def test_one_that_is_starting_is_asked_again_and_one_that_is_slow_is_not(self, health, process, answers, times):
        port, asked = health(*answers)
        server.wait_until_ready(port, process, 30)
        assert asked == ["/health"] * times

    def test_the_time_given_bounds_the_last_request_too(self, health, process):
        port, _ = health((5, 200))
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="did not become ready"):
            server.wait_until_ready(port, process, 0.5)
        assert time.monotonic() - began < 3

    def test_sglang_has_answered_before_the_time_of_a_request_is_up(self):
        """It gives up after its own time; a shorter one of ours would abort what it generates and never see the answer."""
        from sglang.srt.entrypoints import http_server

        assert http_server.HEALTH_CHECK_TIMEOUT + 1 < server.HEALTH_SECONDS
