"""The soak run's requests, what their answers are, and the memory of servers; nothing serves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from soak_runs import finished

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import soak_server
import soak_traffic
from soak_answers import group_differences, judge_answer, judge_tie
from soak_traffic import make_templates


def answer(ids: list[int], reason: str = "length", **meta) -> dict:
    return {"output_ids": ids, "meta_info": {"finish_reason": {"type": reason, "message": "Aborted"}, **meta}}


@pytest.fixture(scope="module")
def templates():
    return make_templates(0)


class TestTemplates:
    def test_same_seed_same_templates(self, templates):
        assert make_templates(0) == templates
        assert make_templates(1) != templates

    @pytest.mark.parametrize("seed", range(3))
    def test_within_bounds(self, seed):
        templates = make_templates(seed)
        assert [t.index for t in templates] == list(range(80))
        for template in templates:
            assert 1 <= len(template.prompt) <= soak_traffic.LONGEST_PROMPT
            assert 1 <= template.new_tokens <= soak_traffic.LONGEST_OUTPUT
            assert all(2 <= token < soak_traffic.VOCAB for token in template.prompt)
        sizes = {(len(t.prompt), t.new_tokens) for t in templates}
        assert sizes >= set(soak_traffic.EXTREMES)
        # the pool must hold the longest request, with what a round of four drafts allocates ahead
        assert max(map(sum, sizes)) + 64 < min(soak_server.POOL_TOKENS, 16384)

    def test_a_third_share_prefixes(self, templates):
        sharing = {t.index for t in templates if t.index % 3 == 0}
        for size, first in zip(soak_traffic.PREFIXES, (0, 3, 6, 9), strict=True):
            same = {t.index for t in templates if t.prompt[:size] == templates[first].prompt[:size]}
            assert same == set(range(first, 80, 12))
            sharing -= same
        assert not sharing

    def test_clients_repeat_every_minute(self):
        counts = [soak_traffic.clients_at(second) for second in range(60)]
        assert (min(counts), max(counts)) == (1, 64)
        assert counts == [soak_traffic.clients_at(60 + second) for second in range(60)]

    def test_no_rid_begins_another(self):
        rids = [soak_traffic.request_body([1], 1, f"soak-{number:010d}")["rid"] for number in (1, 10, 100)]
        assert not any(a != b and b.startswith(a) for a in rids for b in rids)


ENDED = {"kind": "finished", "tokens": 3, "parted": None, "histogram": (), "retractions": 0}


@pytest.mark.parametrize(
    ("given", "wanted", "found"),
    [
        (
            answer([5, 6, 7], spec_correct_drafts_histogram=[0, 1], num_retractions=2),
            "finished",
            ENDED | {"histogram": (0, 1), "retractions": 2},
        ),
        (answer([5, 9, 8]), "finished", ENDED | {"parted": (1, 9)}),
        (answer([5], "abort"), "aborted", {"kind": "aborted"}),
        (answer([5, 6, 7]), "aborted", ENDED),
        (None, "closed", {"kind": "closed"}),
    ],
)
def test_what_an_answer_is_worth(given, wanted, found):
    assert judge_answer(3, [5, 6, 7], given, wanted) == found


@pytest.mark.parametrize(
    "bad",
    [
        answer([5], "abort"),
        answer([5, 6]),
        {"output_ids": [5], "meta_info": {"finish_reason": None}},
        {"error": {"message": "too long"}},
    ],
)
def test_an_answer_that_is_none(bad):
    fields = judge_answer(3, [5, 6, 7], bad)
    assert fields["kind"] == "failed"
    assert fields["message"]


class TestDifferences:
    RECORDS = (finished(0, parted=(1, 9)), finished(0, parted=(1, 9)), finished(0, parted=(2, 4)), finished(0))

    def test_grouped(self, templates):
        first, second = group_differences(list(self.RECORDS), templates, {0: [5, 6, 7]})
        assert (first["position"], first["reference"], first["other"], first["requests"]) == (1, 6, 9, 2)
        assert (second["position"], second["reference"], second["other"], second["requests"]) == (2, 7, 4, 1)
        assert first["tie"] is None

    @pytest.mark.parametrize(
        ("best", "tie"),
        [
            ([[-1.0, 6, None], [-1.03, 9, None]], True),
            ([[-1.0, 3, None], [-1.03, 9, None], [-1.06, 6, None]], True),
            ([[-1.0, 6, None], [-1.07, 9, None]], False),
            ([[-1.0, 6, None], [-1.03, 8, None]], False),
        ],
    )
    def test_tie(self, templates, best, tie):
        difference = group_differences(list(self.RECORDS), templates, {0: [5, 6, 7]})[0]
        judge_tie(difference, best)
        assert difference["tie"] is tie


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
        titles = {pids["prefill"]: "sglang::scheduler", pids["decode"]: "scheduler_TP0", child: "scheduler_TP1"}
        monkeypatch.setattr(soak_server, "title", lambda process: titles[process.pid])
        on_gpus = {pids["prefill"]: 500, pids["decode"]: 40, child: 3000}
        monkeypatch.setattr(soak_server, "by_process_mib", lambda seconds: on_gpus)

        def held() -> dict[str, int]:
            return {name: of_one["gpu_mib"] for name, of_one in soak_server.memory(pids)["by_process"].items()}

        prefill = {"prefill, sglang::scheduler": 500}
        assert held() == prefill | {"decode, scheduler_TP0": 40, "decode, scheduler_TP1": 3000}
        titles[child] = titles[pids["decode"]]
        assert held() == prefill | {"decode, scheduler_TP0": 3040}
        del on_gpus[pids["decode"]], on_gpus[child]
        assert held() == prefill

    def test_one_that_has_ended_holds_nothing(self, servers, monkeypatch):
        monkeypatch.setattr(soak_server, "by_process_mib", lambda seconds: {servers[0]["prefill"]: 500})
        found = soak_server.memory({"prefill": servers[0]["prefill"], "decode": 2**22 + 1})  # no process has that number
        assert found["by_server"]["decode"] == {"gpu_mib": 0, "host_mib": None}
        assert (found["gpu_mib"], found["host_mib"]) == tuple(found["by_server"]["prefill"].values())

    def test_nobody_tells(self, servers, monkeypatch):
        monkeypatch.setattr(soak_server, "by_process_mib", lambda seconds: None)
        found = soak_server.memory(servers[0])
        assert found["gpu_mib"] is None
        assert [of_one["gpu_mib"] for of_one in found["by_server"].values()] == [None, None]
        assert found["by_process"] == {}
        assert soak_server.memory({}) == {"gpu_mib": None, "host_mib": None, "by_server": {}, "by_process": {}}
