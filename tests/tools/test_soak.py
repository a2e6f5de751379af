"""The soak run's requests and judgements, without a server."""

import sys
from pathlib import Path

import pytest
from soak_runs import ACTIVE, BEGAN, ENDED, RETRACT, finished, run_of, samples, steady_load, taken_back

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import soak_judge
import soak_server
import soak_traffic
from soak_answers import Record, group_differences, judge_answer, judge_tie
from soak_traffic import make_templates

TESTED = "[2026-11-20 11:16:06] Testing retraction. #retracted_reqs: 1, #new_tokens_gained: 64"


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


class TestAnswers:
    def test_equal(self):
        fields = judge_answer(3, [5, 6, 7], answer([5, 6, 7], spec_correct_drafts_histogram=[0, 1], num_retractions=2))
        assert fields == {"kind": "finished", "tokens": 3, "parted": None, "histogram": (0, 1), "retractions": 2}

    def test_one_token_has_no_histogram(self):
        assert judge_answer(1, [5], answer([5]))["histogram"] == ()

    def test_parted(self):
        assert judge_answer(3, [5, 6, 7], answer([5, 9, 8]))["parted"] == (1, 9)

    def test_taken_back(self):
        assert judge_answer(3, [5, 6, 7], answer([5], "abort"), "aborted") == {"kind": "aborted"}
        assert judge_answer(3, [5, 6, 7], None, "closed") == {"kind": "closed"}
        assert judge_answer(3, [5, 6, 7], answer([5, 6, 7]), "aborted")["kind"] == "finished"

    @pytest.mark.parametrize(
        "bad",
        [
            answer([5], "abort"),
            answer([5, 6]),
            {"output_ids": [5], "meta_info": {"finish_reason": None}},
            {"error": {"message": "too long"}},
        ],
    )
    def test_failed(self, bad):
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


class TestMinutes:
    def test_rows(self):
        rows = soak_judge.per_minute(steady_load(), samples(), BEGAN, ENDED - 30)
        assert [row["seconds"] for row in rows] == [60, 60, 60, 30]
        assert rows[0] == {
            "seconds": 60, "requests": 60, "tokens": 4800, "accept_length": 3.95, "gpu_mib": 20000, "host_mib": 9000.0,
            "clients": 8,
        }  # fmt: skip
        assert soak_judge.drift(rows) == 0

    def test_drift(self):
        worse = [r if r.end < ENDED - 60 else finished(end=r.end, histogram=(0, 1, 1, 18)) for r in steady_load()]
        assert soak_judge.drift(soak_judge.per_minute(worse, [], BEGAN, ENDED)) == pytest.approx(-0.1 / 3.95, abs=1e-3)

    def test_too_short(self):
        assert soak_judge.drift(soak_judge.per_minute(steady_load(), [], BEGAN, BEGAN + 119)) is None
        assert soak_judge.per_minute([], [], 0.0, 0.0) == []


class TestReport:
    def test_good(self, tmp_path):
        run = run_of(tmp_path, steady_load() + taken_back(), f"{ACTIVE}\n{RETRACT}\n{TESTED}\n{RETRACT}\n", samples())
        report = soak_judge.summary(run)
        assert soak_judge.problems_of(report) == []
        assert report["requests"] == {"finished": 240, "aborted": 1, "closed": 1, "failed": 0}
        assert report["retracted"]["in_log"] == 7

    @pytest.mark.parametrize(
        ("switch", "side", "ranks"), [("1", "ours", 2), (None, "ours", 2), ("0", "ours", 0), ("1", "three_graphs", 0)]
    )
    def test_every_rank_has_whole_rounds_unless_it_is_not_to(self, tmp_path, monkeypatch, switch, side, ranks):
        monkeypatch.delenv("NSA_BACKEND_ROUND_GRAPH", raising=False)
        if switch:
            monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", switch)
        run = run_of(tmp_path, steady_load() + taken_back(), f"{ACTIVE}\n{ACTIVE}\n{RETRACT}\n", samples())
        run.topology, run.side = "dp", side
        problems = soak_judge.problems_of(soak_judge.summary(run))
        assert problems == (["rounds were one graph on 1 ranks, and must be on 2"] if ranks else [])

    def test_ranks_of_a_pair(self, tmp_path, monkeypatch):
        """All are active, and the decode server's have whole rounds where they are asked for."""
        monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", "1")
        text = f"{ACTIVE}\n" * 4 + f"{RETRACT}\n"
        for log, ranks, problems in (
            (text, 2, []),
            (text.removeprefix(ACTIVE), 2, ["3 lines of the log say that this package's backend is active, not 4"]),
            (text, 1, ["rounds were one graph on 1 ranks, and must be on 2"]),
        ):
            run = run_of(tmp_path, steady_load() + taken_back(), log, samples(), ranks)
            run.topology = "pd-dp"
            assert soak_judge.problems_of(soak_judge.summary(run)) == problems
        monkeypatch.delenv("NSA_BACKEND_ROUND_GRAPH")
        assert soak_judge.problems_of(soak_judge.summary(run)) == []

    def test_nothing_happened(self, tmp_path):
        run = run_of(tmp_path, [], "", [])
        run.load = (0.0, 0.0)
        problems = "\n".join(soak_judge.problems_of(soak_judge.summary(run)))
        for part in (
            "no request was aborted",
            "no stream",
            "retracted",
            "accept length 0",
            "whole minutes",
            "0 lines",
            "gpu_mib",
        ):
            assert part in problems

    def test_bad(self, tmp_path):
        failed = Record(2, BEGAN, BEGAN + 1, "finished", "failed", message="OSError: gone")
        low = [finished(end=BEGAN + s, histogram=(0, 5, 5, 5), parted=(1, 9)) for s in range(240)]
        log = f"{ACTIVE}\n{ACTIVE}\n{RETRACT}\nTraceback (most recent call last):\n" * 30
        leak = samples(gpu=lambda s: 20000 + 3 * s, host=lambda s: 9000 + 3.0 * s)
        report = soak_judge.summary(run_of(tmp_path, [*low, failed, *taken_back()], log, leak))
        problems = "\n".join(soak_judge.problems_of(report))
        for part in ("1 requests failed", "accept length 3.0 <", "60 lines", "30 lines of the log tell", "gpu_mib grew by 360"):
            assert part in problems
        assert "host_mib grew by 360" in problems
        assert "MiB of GPU memory are held after the load and the flush, more than 32" in problems
        assert "template 0 differs at 1 in 240 requests, nobody asked" in problems
        assert len(report["suspect_lines"]["first"]) == 20

    @pytest.mark.parametrize(
        "line",
        [
            "Traceback (most recent call last):",
            "[2026-11-20 11:16:06] ERROR:    Exception in ASGI application",
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "[2026-11-20 11:16:06] Decode batch, accept len: nan",
            "ValueError: pool memory leak detected! [full] total=57344",
            "Received output for rid='x' but the state was deleted in TokenizerManager.",
            "[2026-11-20 11:16:06] [http_server] Error: too long",
        ],
    )
    def test_suspect(self, line):
        assert soak_judge.SUSPECT.search(line)

    @pytest.mark.parametrize(
        "line",
        [
            ACTIVE,
            RETRACT,
            "server_args=ServerArgs(watchdog_timeout=300, enable_nan_detection=False, log_level='info')",
            "Ignore import error when loading sglang.srt.models.x: No module named 'y'",
        ],
    )
    def test_not_suspect(self, line):
        assert not soak_judge.SUSPECT.search(line)
