"""The soak run's requests, what their answers are, and the memory of servers; nothing serves."""

from types import SimpleNamespace

import pytest
import soak_server
import soak_traffic
from soak_answers import group_differences, judge_answer, judge_tie
from soak_runs import finished
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


RECORDS = [finished(0, parted=(1, 9)), finished(0, parted=(1, 9)), finished(0, parted=(2, 4)), finished(0)]


@pytest.mark.parametrize(
    ("best", "tie"),
    [
        ([[-1.0, 6, None], [-1.03, 9, None]], True),
        ([[-1.0, 3, None], [-1.03, 9, None], [-1.06, 6, None]], True),
        ([[-1.0, 6, None], [-1.07, 9, None]], False),
        ([[-1.0, 6, None], [-1.03, 8, None]], False),
    ],
)
def test_ways_in_which_outputs_part(templates, best, tie):
    first, second = group_differences(RECORDS, templates, {0: [5, 6, 7]})
    assert (first["position"], first["reference"], first["other"], first["requests"]) == (1, 6, 9, 2)
    assert (second["position"], second["reference"], second["other"], second["requests"]) == (2, 7, 4, 1)
    assert first["tie"] is None
    judge_tie(first, best)
    assert first["tie"] is tie


def test_memory_is_that_of_servers_and_of_all_that_they_started(monkeypatch):
    """By server, and by title of the processes that hold some of a GPU; alike ones are added up."""
    trees, titles = {1: [1], 2: [2, 3], 9: []}, {1: "scheduler", 2: "scheduler_TP0", 3: "scheduler_TP1"}
    on_gpus = {1: 500, 2: 40, 3: 3000, 7: 7}

    def process(pid: int) -> SimpleNamespace:
        return SimpleNamespace(pid=pid, memory_info=lambda: SimpleNamespace(rss=pid * 2**20))

    monkeypatch.setattr(soak_server, "processes", lambda pid: list(map(process, trees[pid])))
    monkeypatch.setattr(soak_server, "title", lambda process: titles[process.pid])
    monkeypatch.setattr(soak_server, "by_process_mib", lambda seconds: on_gpus)
    pids, none = {"prefill": 1, "decode": 2, "ended": 9}, {"gpu_mib": 0, "host_mib": None}
    prefill = {"gpu_mib": 500, "host_mib": 1.0}
    by_server = {"prefill": prefill, "decode": {"gpu_mib": 3040, "host_mib": 5.0}, "ended": none}
    by_process = {
        "prefill, scheduler": prefill,
        "decode, scheduler_TP0": {"gpu_mib": 40, "host_mib": 2.0},
        "decode, scheduler_TP1": {"gpu_mib": 3000, "host_mib": 3.0},
    }
    of_all = {"gpu_mib": 3540, "host_mib": 6.0}
    assert soak_server.memory(pids) == of_all | {"by_server": by_server, "by_process": by_process}
    titles[3] = titles[2]
    assert soak_server.memory(pids)["by_process"]["decode, scheduler_TP0"] == by_server["decode"]
    del on_gpus[2], on_gpus[3]
    assert [*soak_server.memory(pids)["by_process"]] == ["prefill, scheduler"]
    monkeypatch.setattr(soak_server, "by_process_mib", lambda seconds: None)
    nobody_tells = soak_server.memory(pids)
    assert nobody_tells["gpu_mib"] is nobody_tells["by_server"]["ended"]["gpu_mib"] is None
    assert nobody_tells["by_process"] == {}
    assert soak_server.memory({}) == {"gpu_mib": None, "host_mib": None, "by_server": {}, "by_process": {}}
