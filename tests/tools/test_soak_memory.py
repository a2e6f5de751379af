"""The memory of a soak run's servers: sampled together and by server, and judged together."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from soak_runs import ACTIVE, BEGAN, ENDED, RETRACT, run_of, samples, steady_load, taken_back

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import soak_judge
import soak_server


class TestGrowth:
    def test_warm_up_does_not_count(self):
        assert soak_judge.growth(samples(gpu=lambda s: 20000 + min(s, 55) * 100), "gpu_mib", BEGAN, ENDED) == 0

    def test_leak(self):
        assert soak_judge.growth(samples(host=lambda s: 9000 + 2.0 * s), "host_mib", BEGAN, ENDED) == 240

    def test_not_sampled(self):
        assert soak_judge.growth(samples(gpu=lambda s: None), "gpu_mib", BEGAN, ENDED) is None
        assert soak_judge.growth([], "gpu_mib", BEGAN, ENDED) is None

    def test_held_is_what_a_flush_does_not_give_back(self):
        cache = samples(gpu=lambda s: 20000 if s <= 0 else 20000 + s if s < 245 else 20010)
        assert soak_judge.held(cache, BEGAN, BEGAN + 245) == {"before_mib": 20000, "after_mib": 20010}
        assert soak_judge.held(cache, BEGAN, None)["after_mib"] is None
        assert soak_judge.held([], BEGAN, BEGAN) == {"before_mib": None, "after_mib": None}


class TestServers:
    @pytest.fixture
    def servers(self):
        """Two processes, the second of which has started another: (name to pid, pid of that one)."""
        sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
        starting = f"import subprocess; child = subprocess.Popen({sleeping}); print(child.pid, flush=True); child.wait()"
        first = subprocess.Popen(sleeping)
        second = subprocess.Popen([sys.executable, "-c", starting], stdout=subprocess.PIPE, text=True)
        child = int(second.stdout.readline())
        yield {"prefill": first.pid, "decode": second.pid}, child
        os.kill(child, signal.SIGKILL)
        for process in (first, second):
            process.kill()
            process.wait()
        second.stdout.close()

    def test_each_has_what_it_and_its_processes_hold(self, servers, monkeypatch):
        pids, child = servers
        on_gpus = {pids["prefill"]: 500, pids["decode"]: 40, child: 3000, os.getpid(): 7}
        monkeypatch.setattr(soak_server, "by_process_mib", lambda seconds: on_gpus)
        found = soak_server.memory(pids)
        prefill, decode = found["by_server"]["prefill"], found["by_server"]["decode"]
        assert (prefill["gpu_mib"], decode["gpu_mib"], found["gpu_mib"]) == (500, 3040, 3540)
        assert 0 < prefill["host_mib"] < decode["host_mib"]
        assert found["host_mib"] == pytest.approx(prefill["host_mib"] + decode["host_mib"])

    def test_one_that_has_ended_holds_nothing(self, servers, monkeypatch):
        monkeypatch.setattr(soak_server, "by_process_mib", lambda seconds: {servers[0]["prefill"]: 500})
        found = soak_server.memory({"prefill": servers[0]["prefill"], "decode": 2**22 + 1})  # no process has that number
        assert found["by_server"]["decode"] == {"gpu_mib": 0, "host_mib": None}
        assert found["gpu_mib"] == 500
        assert found["host_mib"] == found["by_server"]["prefill"]["host_mib"]

    def test_nobody_tells(self, servers, monkeypatch):
        monkeypatch.setattr(soak_server, "by_process_mib", lambda seconds: None)
        found = soak_server.memory(servers[0])
        assert found["gpu_mib"] is None
        assert [of_one["gpu_mib"] for of_one in found["by_server"].values()] == [None, None]
        assert soak_server.memory({}) == {"gpu_mib": None, "host_mib": None, "by_server": {}}

    def test_a_report_says_which_of_a_pair_grew(self, tmp_path):
        """The bounds are on both together."""
        prefill, decode = samples(gpu=lambda s: 1500), samples(gpu=lambda s: 2000 + max(s, 0), host=lambda s: 9000 + 2.0 * s)
        both = []
        for first, second in zip(prefill, decode, strict=True):
            total = {key: first[key] + second[key] for key in ("gpu_mib", "host_mib")}
            by_server = {"prefill": first["by_server"]["server"], "decode": second["by_server"]["server"]}
            both.append(first | total | {"by_server": by_server})
        both[0]["by_server"].pop("decode")  # it had not started yet
        run = run_of(tmp_path, steady_load() + taken_back(), f"{ACTIVE}\n{ACTIVE}\n{RETRACT}\n", both)
        run.topology = "pd"
        report = soak_judge.summary(run)
        assert report["growth"] == {"gpu_mib": 120, "host_mib": 240}
        assert report["held"] == {"before_mib": 3500, "after_mib": 3752}
        assert report["by_server"] == {
            "prefill": {"growth": {"gpu_mib": 0, "host_mib": 0}, "held": {"before_mib": 1500, "after_mib": 1500}},
            "decode": {"growth": {"gpu_mib": 120, "host_mib": 240}, "held": {"before_mib": 2000, "after_mib": 2252}},
        }
        assert soak_judge.problems_of(report) == ["252 MiB of GPU memory are held after the load and the flush, more than 32"]
