"""The end-to-end runs' bookkeeping, with stand-ins for the engines: partial reports, cut runs, and ties."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import replays
import reports
import run_all
import run_case
import ties
from engine_options import new_tokens
from workloads import CASES, STANDARD, WORKLOADS

ENGINE = """
import json, os, pathlib, sys
steps, tokens, workloads = {cases}[sys.argv[2]]
builtin = os.environ["NSA_BACKEND_DISABLE"] == "1"
with open({here!r} + "/calls", "a") as calls:
    print(sys.argv[2], builtin, sys.argv[sys.argv.index("--port") + 1], file=calls)
print("nsa_backend 0.1.0 is active")
if sys.argv[2] in {failing!r}:
    sys.exit(3)
out = {{}}
for name, count in workloads.items():
    ids = [[5] * tokens for _ in range(count)]
    if builtin and name == "4x3000":
        ids[1][3] = 6
    out[name] = {{"output_ids": ids, "accept": [steps + 0.97] * count, "histograms": [[0] * steps + [9]] * count,
                 "cached_tokens": [0] * count, "host_tokens": [0] * count, "storage_tokens": [0] * count,
                 "seconds": 1.0}}
pathlib.Path(sys.argv[3]).write_text(json.dumps(out))
"""
ASK = """
import json, pathlib, sys
with open({here!r} + "/calls", "a") as calls:
    print("asked", sys.argv[2], file=calls)
prompts = json.loads(pathlib.Path(sys.argv[3]).read_text())
pathlib.Path(sys.argv[4]).write_text(json.dumps([[[-1.0, 5], [-1.0 - {gap}, 6]] for _ in prompts]))
"""


@pytest.mark.parametrize(
    ("log", "problems"),
    [
        ("is active; graphs: 3; graphs: 3", []),
        ("is active; graphs: 3", ["x: the log says 'graphs: 3' 1 times, not 2"]),
        ("is active", ["x: the log says 'graphs: 3' 0 times, not 2"]),
        ("is active; graphs: 3; graphs: 3; graphs: 1", ["x: the log says 'graphs: 1', which its options forbid"]),
    ],
)
def test_what_an_engine_must_say(log, problems):
    case = run_case.Case("x", 1, ("w",), says="graphs: 3", says_times=2, never_says="graphs: 1")
    assert reports.problems_of([case], {("x", "ours"): ({"w": {"accept": [2.0]}}, log)}, []) == problems


ONE, NONE, SAMPLED = {"greedy requests": 9}, {"greedy requests": 0}, {"greedy requests": 0, "sampled requests": 7}


@pytest.mark.parametrize(
    ("states", "problems"),
    [
        ([ONE], []),
        ([ONE, SAMPLED], []),
        ([ONE, NONE], ["x: no round was one graph on DP rank 1 of 2"]),
        ([SAMPLED], ["x: no round of greedy requests was one graph, but those of sampled requests"]),
        ([None], ["x: no server says how many rounds were one graph"]),
    ],
)
def test_rounds_that_must_have_been_one_graph(states, problems, capsys):
    """By what the servers count, which the process of a case prints: rounds are captured in any case."""
    of_ranks = [{"nsa_backend_rounds": state} if state else {} for state in states]
    replays.tell({"internal_states": of_ranks})
    case = run_case.Case("x", 3, ("w",), replays="greedy requests")
    log = "is active\n" + capsys.readouterr().out
    assert reports.problems_of([case], {("x", "ours"): ({"w": {"accept": [4.0]}}, log)}, []) == problems


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Returns a function of (cases that fail, the gap at each tie) that puts stand-ins in place of both engine scripts."""

    def put(failing: tuple[str, ...] = (), gap: float = 0.03) -> Path:
        counts = {w: sum(map(len, WORKLOADS[w]())) for w in STANDARD}
        cases = {c.name: (c.steps, new_tokens(c.steps), counts) for c in CASES if c.workloads == STANDARD}
        (tmp_path / "run_case.py").write_text(ENGINE.format(cases=cases, here=str(tmp_path), failing=failing))
        (tmp_path / "next_token.py").write_text(ASK.format(here=str(tmp_path), gap=gap))
        for module in (run_all, ties):
            monkeypatch.setattr(module, "HERE", tmp_path)
        monkeypatch.setattr(run_all, "APART_SECONDS", 0.0)
        monkeypatch.setattr(run_all.faithful, "write", put_checkpoint)
        return tmp_path / "calls"

    def put_checkpoint(path: Path, shape, model) -> Path:
        path.mkdir()
        (path / "config.json").touch()
        (tmp_path / "checkpoints").open("a").write(f"{path}\n")
        return path

    return put


def run(monkeypatch, tmp_path, *options: str) -> tuple[int, dict]:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["run_all.py", str(out), "--logs", str(tmp_path / "logs"), "--jobs", "2", *options])
    return run_all.main(), json.loads(out.read_text())


class TestRuns:
    def test_ties_are_asked_for_once_an_engine(self, stand_ins, monkeypatch, tmp_path):
        calls = stand_ins()
        code, report = run(monkeypatch, tmp_path, "--cases", "n2 fa3", "n3 without CUDA graphs", "n3 chunked prefill")
        assert code == 0
        assert [row["case"] for row in report["rows"]] == ["n2 fa3", "n3 without CUDA graphs", "n3 chunked prefill"]
        assert [(d["request"], d["position"], d["tie"]) for d in report["differences"]] == [(1, 3, True)] * 3
        assert report["differences"][0]["prompt"] == "3040 tokens"
        wrote = [Path(line) for line in (tmp_path / "checkpoints").read_text().splitlines()]
        assert wrote
        assert not any(path.exists() or path.is_relative_to(tmp_path) for path in wrote)  # gigabytes beside the logs
        asked = [line for line in calls.read_text().splitlines() if line.startswith("asked")]
        assert sorted(asked) == ["asked n2 fa3", "asked n3 chunked prefill"]  # graphs and N are nothing to a prefill

    def test_a_case_is_asked_about_before_the_next_one_starts(self, stand_ins, monkeypatch, tmp_path):
        """So that a run which is cut has judged what it measured; who asks the same engine as a later case waits for it."""
        calls = stand_ins()
        cases = ("n2 fa3", "n3 chunked prefill", "n3 without CUDA graphs")
        assert run(monkeypatch, tmp_path, "--jobs", "1", "--cases", *cases)[0] == 0
        asked = [number for number, line in enumerate(calls.read_text().splitlines()) if line.startswith("asked")]
        assert asked == [4, 7]  # behind two engines of each of the first two, and behind both of the last

    def test_no_tie(self, stand_ins, monkeypatch, tmp_path):
        stand_ins(gap=0.07)
        code, report = run(monkeypatch, tmp_path, "--cases", "n2 fa3")
        assert code == 1
        assert report["problems"] == ["n2 fa3, 4x3000: request 1 differs at 3, no tie"]

    def test_a_failed_engine_leaves_the_others(self, stand_ins, monkeypatch, tmp_path):
        stand_ins(failing=("n5 fa3",))
        code, report = run(monkeypatch, tmp_path, "--cases", "n2 fa3", "n5 fa3")
        assert code == 1
        assert [(f["case"], f["backend"]) for f in report["failures"]] == [("n5 fa3", "ours"), ("n5 fa3", "builtin")]
        assert [row["case"] for row in report["rows"]] == ["n2 fa3"]
        assert {(f["exit_code"], f["ended"].partition(": ")[2].partition(",")[0]) for f in report["failures"]} == {
            (3, "its first process ended with 3")
        }
        assert report["failures"][0]["last_lines"] == {"main": ["nsa_backend 0.1.0 is active"]}
        assert report["failures"][0]["machine"].keys() <= report["machine"].keys()
        stand_ins(failing=("n2 fa3",))
        assert len(run(monkeypatch, tmp_path, "--cases", "n2 fa3")[1]["failures"]) == 2  # an old answer is no answer

    def test_engines_that_waited_for_kernels_keep_no_later_one_from_starting(self, tmp_path):
        """Two run side by side: the first two compiled, one of the next two found all compiled."""
        run = run_all.Run({}, [], SimpleNamespace(jobs=2), None)
        assert run.an_engine == 0
        run.took += [250.0, 255.0]
        assert run.an_engine == 250
        run.took += [60.0]
        assert run.an_engine == 60

    def test_no_time_left(self, stand_ins, monkeypatch, tmp_path):
        """What was measured until then is in the report."""
        stand_ins()
        seen = []
        monkeypatch.setattr(
            run_all, "write", lambda report, out: (seen.append(report["not_measured"]), reports.write(report, out))
        )
        assert run(monkeypatch, tmp_path, "--cases", "n2 fa3")[0] == 0
        assert seen == [["n2 fa3, builtin"], [], [], []]  # of two engines, of ties, and of all
        code, report = run(monkeypatch, tmp_path, "--cases", "n2 fa3", "n5 fa3", "--minutes", "0.0001")
        assert code == 1
        assert {"n5 fa3, ours", "n5 fa3, builtin"} <= set(report["not_measured"])

    @pytest.mark.parametrize(
        ("jobs", "backends", "needed"), [(1, ["ours", "builtin"], 10), (4, ["ours", "builtin"], 5), (1, ["ours"], 3)]
    )
    def test_who_gives_too_little_time_is_told_before_engines_start(self, monkeypatch, jobs, backends, needed):
        """Of two cases that are asked about apart, with engines of 1.3 minutes."""
        monkeypatch.setattr(run_all, "estimate", lambda case, backends: 1.3 * backends)
        cases = [case for case in CASES if case.name in ("n2 fa3", "n3 chunked prefill")]
        assert run_all.minutes_needed(cases, SimpleNamespace(jobs=jobs, backends=backends)) == needed

    @pytest.mark.parametrize(("backends", "started"), [(["ours", "builtin"], 1), (["ours"], 2)])
    def test_asking_about_ties_has_time_of_its_own(self, stand_ins, monkeypatch, tmp_path, backends, started):
        """Where two sides may part: the next engine is not started in it."""
        stand_ins()
        monkeypatch.setattr(run_all.Run, "left", lambda run: 130 - 100 * bool(run.results))
        words = ("--cases", "n2 fa3", "n5 fa3", "--backends", *backends, "--jobs", "1")
        _, report = run(monkeypatch, tmp_path, *words)
        assert len(report["not_measured"]) == len(backends) * 2 - started
