"""The report that joins both sides of a soak run, and its table."""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import soak
import soak_judge
from soak_answers import Record


def test_percentiles_are_of_requests_that_finished():
    def record(kind: str, seconds: float, first: float | None) -> Record:
        return Record(0, 10.0, 10.0 + seconds, kind, kind, first=first)

    records = [record("finished", n / 100, n / 1000) for n in range(1, 101)]
    found = soak_judge.latency([*records, record("aborted", 50.0, None), record("failed", 60.0, None)])
    assert found == {"first_token_s": {"p50": 0.05, "p99": 0.099}, "request_s": {"p50": 0.5, "p99": 0.99}}
    assert soak_judge.latency([]) == {"first_token_s": None, "request_s": None}


def side(**fields) -> dict:
    times = {"p50": 0.5, "p99": 1.25}
    return {
        "references": 80,
        "problems": [],
        "load_minutes": 7.5,
        "requests": {"finished": 750, "aborted": 2, "closed": 3, "failed": 0},
        "retracted": {"in_log": 5},
        "latency": {"first_token_s": times, "request_s": times},
        "accept_length": 3.93,
        "drift": -0.001,
        "suspect_lines": {"count": 0},
        "differences": [],
        "growth": {"gpu_mib": 80, "host_mib": 7.8},
        "held": {"before_mib": 3976, "after_mib": 3978},
        "environment": {"gpu": "NVIDIA H200"},
    } | fields


TIED = {"template": 3, "tie": True, "below_best": {"reference": 0.0, "other": 0.03}}
NO_TIE = {"template": 4, "tie": False, "below_best": {"reference": 0.0, "other": None}}


class TestJoined:
    def test_the_built_in_is_reported_and_not_judged(self):
        both = {"ours": side(), "builtin": side(problems=["3 requests failed"], differences=[TIED, NO_TIE])}
        report = soak.joined(both, {}, 480.0)
        assert report["problems"] == []
        assert report["sides"]["builtin"]["problems"] == ["3 requests failed"]
        assert report["sides"]["builtin"]["differences"] == {
            "ways": 2, "at_ties": 1, "widest_below_best": 0.03, "others": [NO_TIE],
        }  # fmt: skip

    def test_ours_is_judged(self):
        report = soak.joined({"ours": side(problems=["3 requests failed"]), "builtin": side()}, {}, 480.0)
        assert report["problems"] == ["ours: 3 requests failed"]

    def test_every_side_of_ours_is_judged(self):
        """Each by its name, and a third column in the table."""
        asked = {"ours": side(), "three_graphs": side(problems=["3 requests failed"]), "builtin": side(problems=["another"])}
        report = soak.joined(asked, {}, 480.0)
        assert report["problems"] == ["three_graphs: 3 requests failed"]
        assert soak.table(report).splitlines()[0] == "| | ours | ours, a round in three graphs | built-in |"

    def test_other_traffic(self):
        report = soak.joined({"ours": side(), "builtin": side(references=71)}, {}, 480.0)
        asked = "80 of ours, 71 of builtin"
        assert report["problems"] == [
            f"the sides were not asked the same: of their templates {asked} had a reference when the load began"
        ]

    def test_a_side_without_a_report(self):
        report = soak.joined({"ours": None, "builtin": side()}, {}, 480.0)
        assert report["problems"] == ["ours: it left no report"]
        assert "| retracted | - | 5 |" in soak.table(report)
        assert soak.joined({"ours": side(), "builtin": None}, {}, 480.0)["problems"] == []

    def test_the_servers_of_a_pair_have_rows_of_their_own(self):
        """Where each side has several; a side without a report has none of them."""
        prefill = {"growth": {"gpu_mib": 0, "host_mib": 1.6}, "held": {"before_mib": 1700, "after_mib": 1700}}
        decode = {"growth": {"gpu_mib": 80, "host_mib": 6.2}, "held": {"before_mib": 2276, "after_mib": None}}
        pair = side(by_server={"prefill": prefill, "decode": decode})
        rows = soak.table(soak.joined({"ours": pair, "builtin": None}, {}, 480.0)).splitlines()
        assert rows[-7:] == [
            "| prefill server alone: GPU memory during the load, growth after warm-up | +0 MiB | - |",
            "| prefill server alone: GPU memory held before the load / after it and a flush, MiB | 1700 / 1700 | - |",
            "| prefill server alone: host memory, growth after warm-up | +2 MiB | - |",
            "| decode server alone: GPU memory during the load, growth after warm-up | +80 MiB | - |",
            "| decode server alone: GPU memory held before the load / after it and a flush, MiB | 2276 / - | - |",
            "| decode server alone: host memory, growth after warm-up | +6 MiB | - |",
            "| problems | 0 | - |",
        ]
        ranks = side(by_server={"server": decode}, by_process={"server, sglang::scheduler_DP1_TP1": prefill})
        rows = soak.table(
            soak.joined({"ours": ranks, "builtin": side(by_server={"server": decode}, by_process={})}, {}, 480.0)
        ).splitlines()
        label = "server, sglang::scheduler_DP1_TP1 alone: GPU memory held before the load / after it and a flush, MiB"
        assert rows[-3] == f"| {label} | 1700 / 1700 | - |"
        alone = side(by_server={"server": decode})
        assert not any("alone" in row for row in soak.table(soak.joined({"ours": alone}, {}, 480.0)).splitlines())

    def test_every_row_of_the_table_has_both_columns(self):
        slow = {"first_token_s": None, "request_s": {"p50": 2.0, "p99": 9.0}}
        rows = soak.table(soak.joined({"ours": side(), "builtin": side(latency=slow, drift=None)}, {}, 480.0)).splitlines()
        assert {row.count("|") for row in rows} == {4}
        for row in (
            "| requests finished / aborted / closed / failed | 750 / 2 / 3 / 0 | 750 / 2 / 3 / 0 |",
            "| requests finished in a minute of the load | 100 | 100 |",
            "| to the first token, s, p50 / p99 | 0.50 / 1.25 | - |",
            "| whole request, s, p50 / p99 | 0.50 / 1.25 | 2.00 / 9.00 |",
            "| accept length, last whole minute over the first, less one | -0.1 % | - |",
            "| GPU memory held before the load / after it and a flush, MiB | 3976 / 3978 | 3976 / 3978 |",
        ):
            assert row in rows


def test_the_table_is_printed(tmp_path):
    out = tmp_path / "out.json"
    report = soak.joined({"ours": side(), "builtin": side()}, {}, 480.0)
    out.write_text(json.dumps(report))
    shown = subprocess.run([sys.executable, soak.__file__, str(out), "--table"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == soak.table(report)
