"""The memory of a soak run's servers: sampled together, by server and by process; what is held is judged of each allocator."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
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
        """Two processes, the second of which has started another: (name to pid, pid of that one). All hold memory."""
        begun = "print('begun', flush=True)"
        sleeping = [sys.executable, "-c", f"import time; {begun}; time.sleep(60)"]
        starting = f"""import subprocess
child = subprocess.Popen({sleeping}, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()"""
        first = subprocess.Popen(sleeping, stdout=subprocess.PIPE)
        second = subprocess.Popen([sys.executable, "-c", starting], stdout=subprocess.PIPE, text=True)
        first.stdout.readline()
        child = int(second.stdout.readline())
        yield {"prefill": first.pid, "decode": second.pid}, child
        os.kill(child, signal.SIGKILL)
        for process in (first, second):
            process.kill()
            process.wait()
            process.stdout.close()

    def test_each_has_what_it_and_its_processes_hold(self, servers, monkeypatch):
        pids, child = servers
        on_gpus = {pids["prefill"]: 500, pids["decode"]: 40, child: 3000, os.getpid(): 7}
        monkeypatch.setattr(soak_server, "by_process_mib", lambda seconds: on_gpus)
        found = soak_server.memory(pids)
        prefill, decode = found["by_server"]["prefill"], found["by_server"]["decode"]
        assert (prefill["gpu_mib"], decode["gpu_mib"], found["gpu_mib"]) == (500, 3040, 3540)
        assert 0 < prefill["host_mib"] < decode["host_mib"]
        assert found["host_mib"] == pytest.approx(prefill["host_mib"] + decode["host_mib"])

    def test_processes_on_a_gpu_have_their_titles_and_alike_ones_are_added_up(self, servers, monkeypatch):
        pids, child = servers
        titles = {
            pids["prefill"]: "sglang::scheduler",
            pids["decode"]: "sglang::scheduler_DP0_TP0",
            child: "sglang::scheduler_DP1_TP1",
        }
        monkeypatch.setattr(soak_server, "title", lambda process: titles[process.pid])
        on_gpus = {pids["prefill"]: 500, pids["decode"]: 40, child: 3000}
        monkeypatch.setattr(soak_server, "by_process_mib", lambda seconds: on_gpus)
        found = soak_server.memory(pids)["by_process"]
        assert {name: of_one["gpu_mib"] for name, of_one in found.items()} == {
            "prefill, sglang::scheduler": 500,
            "decode, sglang::scheduler_DP0_TP0": 40,
            "decode, sglang::scheduler_DP1_TP1": 3000,
        }
        assert all(of_one["host_mib"] > 0 for of_one in found.values())
        titles[child] = titles[pids["decode"]]
        assert soak_server.memory(pids)["by_process"]["decode, sglang::scheduler_DP0_TP0"]["gpu_mib"] == 3040
        del on_gpus[pids["decode"]], on_gpus[child]
        assert list(soak_server.memory(pids)["by_process"]) == ["prefill, sglang::scheduler"]

    def test_a_process_is_called_what_it_calls_itself(self, servers):
        assert soak_server.title(psutil.Process(servers[0]["prefill"])) == sys.executable

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
        assert found["by_process"] == {}
        assert soak_server.memory({}) == {"gpu_mib": None, "host_mib": None, "by_server": {}, "by_process": {}}

    def test_a_report_says_which_of_a_pair_grew(self, tmp_path):
        """The bounds on growth are on both together, that on what is held is on each."""
        prefill, decode = samples(gpu=lambda s: 1500), samples(gpu=lambda s: 2000 + max(s, 0), host=lambda s: 9000 + 2.0 * s)
        both = together({"prefill": prefill, "decode": decode})
        both[0]["by_server"].pop("decode")  # it had not started yet
        report = report_of(tmp_path, "pd", both)
        assert report["growth"] == {"gpu_mib": 120, "host_mib": 240}
        assert report["held"] == {"before_mib": 3500, "after_mib": 3752}
        assert report["by_server"] == {
            "prefill": {"growth": {"gpu_mib": 0, "host_mib": 0}, "held": {"before_mib": 1500, "after_mib": 1500}},
            "decode": {"growth": {"gpu_mib": 120, "host_mib": 240}, "held": {"before_mib": 2000, "after_mib": 2252}},
        }
        assert soak_judge.problems_of(report) == [
            "252 MiB of GPU memory are held by the decode server after the load and the flush, more than 32"
        ]

    @pytest.mark.parametrize(("more", "problems"), [((27, 27), []), ((32, 33), [33]), ((40, -40), [40]), ((54, 0), [54])])
    def test_each_of_a_pair_may_hold_what_one_server_may(self, tmp_path, more, problems):
        """And none what another gave back."""
        pair = {name: samples(gpu=held_later(mib)) for name, mib in zip(("prefill", "decode"), more, strict=True)}
        found = soak_judge.problems_of(report_of(tmp_path, "pd", together(pair)))
        assert [int(problem.split()[0]) for problem in found] == problems

    def test_each_rank_of_dp_attention_may_hold_as_much(self, tmp_path):
        """A process that is new counts whole; what had ended before the load does not count."""
        ranks = {f"server, sglang::scheduler_DP{n}_TP{n}": samples(gpu=held_later(27)) for n in (0, 1)}
        sampled = together(ranks, "by_process")
        report = report_of(tmp_path, "dp", sampled)
        assert report["held"] == {"before_mib": 40000, "after_mib": 40054}
        assert list(report["by_process"]) == list(ranks)
        assert [of_one["held"]["after_mib"] for of_one in report["by_process"].values()] == [20027] * 2
        assert soak_judge.problems_of(report) == []
        sampled[0]["by_process"]["server, compiling"] = {"gpu_mib": 700, "host_mib": 1.0}
        for sample in sampled[-3:]:
            sample["by_process"]["server, new"] = {"gpu_mib": 33, "host_mib": 1.0}
        report = report_of(tmp_path, "dp", sampled)
        assert list(report["by_process"]) == [*ranks, "server, new"]
        assert soak_judge.problems_of(report) == [
            "33 MiB of GPU memory are held by server, new after the load and the flush, more than 32"
        ]

    def test_one_server_is_judged_without_a_name(self, tmp_path):
        report = report_of(tmp_path, "one", samples(gpu=held_later(33)), active=1)
        assert report["by_process"] == {}
        assert soak_judge.problems_of(report) == ["33 MiB of GPU memory are held after the load and the flush, more than 32"]


def held_later(mib: int):
    """Of a server that holds so many MiB more once it has flushed its cache."""
    return lambda second: 20000 if second < ENDED - BEGAN else 20000 + mib


def together(each: dict[str, list[dict]], which: str = "by_server") -> list[dict]:
    """Samples of servers, or of the processes of one server."""
    found = []
    for at_once in zip(*each.values(), strict=True):
        total = {key: sum(sample[key] for sample in at_once) for key in ("gpu_mib", "host_mib")}
        of_each = {name: sample["by_server"]["server"] for name, sample in zip(each, at_once, strict=True)}
        found.append(at_once[0] | total | {"by_server": {"server": total}} | {which: of_each})
    return found


def report_of(tmp_path: Path, topology: str, sampled: list[dict], active: int = 2) -> dict:
    run = run_of(tmp_path, steady_load() + taken_back(), f"{ACTIVE}\n" * active + f"{RETRACT}\n", sampled, active)
    run.topology = topology
    return soak_judge.summary(run)
