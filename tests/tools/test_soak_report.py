"""Soak runs that never were: the table of all sides and every problem, as `printed/` has them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import soak
import soak_judge
from printed import assert_printed
from soak_answers import Record
from soak_runs import ACTIVE, BEGAN, ENDED, RETRACT, finished, held_later, run_of, samples, steady_load, taken_back, together

SAYS = f"{ACTIVE}\n{RETRACT}\n[2026-11-20 11:16:06] Testing retraction. #retracted_reqs: 1, #new_tokens_gained: 64\n"
FAILED = Record(2, BEGAN, BEGAN + 1, "finished", "failed", message="OSError: gone")


def good(folder: Path, side: str = "ours", **fields):
    """A run without a problem; of the built-in backend, whose log says nothing of ours."""
    run = run_of(folder, steady_load() + taken_back(), SAYS, samples())
    if side == "builtin":
        run.log.write_text(SAYS.removeprefix(ACTIVE))
        run.samples = samples(gpu=lambda s: 21000 + min(s, 55))
    for name, value in ({"side": side} | fields).items():
        setattr(run, name, value)
    return run


def said_twice(run):
    """Of two servers or ranks."""
    run.log.write_text(f"{ACTIVE}\n{SAYS}")
    run.replayed = run.replayed * 2
    return run


def nothing(folder: Path):
    run = run_of(folder, [], "", [])
    run.load = (0.0, 0.0)
    return run


def bad(folder: Path):
    """Low accept lengths that fall, outputs that part, a failed request, memory that grows, and errors in the log."""
    low = [finished(end=BEGAN + s, histogram=(0, 1, 1, 18) if s > 180 else (0, 0, 9, 9), parted=(1, 9)) for s in range(240)]
    leak = samples(gpu=lambda s: 20000 + 3 * s, host=lambda s: 9000 + 3.0 * s)
    return run_of(folder, [*low, FAILED, *taken_back()], SAYS + "Traceback (most recent call last):\n" * 30, leak)


def pair(folder: Path):
    """The decode server, which starts later, grows."""
    prefill = samples(gpu=lambda s: 1500)
    both = together({"prefill": prefill, "decode": samples(gpu=lambda s: 2000 + max(s, 0), host=lambda s: 9000 + 2.0 * s)})
    both[0]["by_server"].pop("decode")
    return said_twice(good(folder, topology="pd", samples=both))


def ranks(folder: Path):
    """Each rank may hold as much; a process that is new counts whole, one that had ended before the load does not."""
    sampled = together({f"server, sglang::scheduler_DP{n}_TP{n}": samples(gpu=held_later(27)) for n in (0, 1)}, "by_process")
    sampled[0]["by_process"]["server, compiling"] = {"gpu_mib": 700, "host_mib": 1.0}
    for sample in sampled[-3:]:
        sample["by_process"]["server, new"] = {"gpu_mib": 33, "host_mib": 1.0}
    return said_twice(good(folder, topology="dp", samples=sampled))


RUNS = {
    "soak": {"ours": good, "builtin": lambda folder: good(folder, "builtin")},
    "soak of three sides": {
        "ours": good,
        "three_graphs": lambda folder: good(folder, "three_graphs", replayed=[]),
        "builtin": lambda folder: good(folder, "builtin", references={0: [5, 6, 7], 1: [5]}),
    },
    "soak without anything": {"ours": nothing, "builtin": None},
    "soak with everything wrong": {"ours": bad, "builtin": lambda folder: good(folder, "builtin")},
    "soak of a pair": {"ours": pair, "builtin": None},
    "soak of ranks": {"ours": ranks, "builtin": None},
    "soak without ours": {"ours": None, "builtin": lambda folder: good(folder, "builtin")},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_told_as_it_is_recorded_to_be(name, tmp_path, monkeypatch, capsys):
    """By `soak.py OUT.json --table`, with the problems of each side, of which only ours are the run's."""
    monkeypatch.delenv("NSA_BACKEND_ROUND_GRAPH", raising=False)
    sides = dict.fromkeys(RUNS[name])
    for side, make in RUNS[name].items():
        if make:
            report = soak_judge.summary(make(tmp_path))
            problems = soak_judge.problems_of(report, ours=side != "builtin")
            sides[side] = report | {"problems": problems, "environment": {"gpu": "NVIDIA H200"}}
    joined = soak.joined(sides, {}, 480.0)
    (tmp_path / "out.json").write_text(json.dumps(joined))
    monkeypatch.setattr(sys, "argv", ["soak.py", str(tmp_path / "out.json"), "--table"])
    assert soak.main() == 0
    minutes = [json.dumps(row) for row in (sides["ours"] or {}).get("rows", [])]
    assert_printed(name, "\n".join([capsys.readouterr().out, *joined["problems"], "", *minutes]), tmp_path)


@pytest.mark.parametrize(
    ("topology", "switch", "said", "replaying", "problem"),
    [
        ("dp", None, 2, 2, None),
        ("dp", None, 2, 1, "rounds were one graph on 1 ranks, and must be on 2"),
        ("dp", "1", 2, 1, "rounds were one graph on 1 ranks, and must be on 2"),
        ("dp", "0", 2, 0, None),
        ("dcp", None, 2, 1, None),
        ("dcp", None, 2, 0, "rounds were one graph on 0 ranks, and must be on 1"),
        ("pd-dp", "1", 4, 2, None),
        ("pd-dp", "1", 4, 1, "rounds were one graph on 1 ranks, and must be on 2"),
        ("pd-dp", None, 4, 1, None),
        ("pd-dp", "1", 3, 2, "3 lines of the log say that this package's backend is active, not 4"),
    ],
)
def test_every_rank_is_active_and_has_whole_rounds_unless_it_is_not_to(
    tmp_path, monkeypatch, topology, switch, said, replaying, problem
):
    monkeypatch.delenv("NSA_BACKEND_ROUND_GRAPH", raising=False)
    if switch:
        monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", switch)
    run = good(tmp_path, topology=topology, replayed=[{"greedy requests": 900}] * replaying + [{}])
    run.log.write_text(f"{ACTIVE}\n" * said + RETRACT)
    assert soak_judge.problems_of(soak_judge.summary(run)) == [problem] * bool(problem)


def test_warm_up_is_no_growth_and_what_was_not_sampled_is_unknown():
    assert soak_judge.growth(samples(gpu=lambda s: 20000 + min(s, 55) * 100), "gpu_mib", BEGAN, ENDED) == 0
    assert soak_judge.growth(samples(gpu=lambda s: None), "gpu_mib", BEGAN, ENDED) is None
    assert soak_judge.held(samples(), BEGAN, None)["after_mib"] is None


def test_percentiles_are_of_requests_that_finished():
    ends = [(n / 100, "finished", n / 1000) for n in range(1, 101)] + [(50.0, "aborted", None), (60.0, "failed", None)]
    found = soak_judge.latency([Record(0, 10.0, 10.0 + seconds, kind, kind, first=first) for seconds, kind, first in ends])
    assert found == {"first_token_s": {"p50": 0.05, "p99": 0.099}, "request_s": {"p50": 0.5, "p99": 0.99}}


def test_differences_that_are_ties_are_counted_and_others_kept():
    tied = {"template": 3, "tie": True, "below_best": {"reference": 0.0, "other": 0.03}}
    other = {"template": 4, "tie": False, "below_best": {"reference": 0.0, "other": None}}
    counted = {"ways": 2, "at_ties": 1, "widest_below_best": 0.03, "others": [other]}
    assert soak.compact({"differences": [tied, other]})["differences"] == counted


SUSPECT = """Traceback (most recent call last):
[2026-11-20 11:16:06] ERROR:    Exception in ASGI application
RuntimeError: CUDA error: an illegal memory access was encountered
[2026-11-20 11:16:06] Decode batch, accept len: nan
ValueError: pool memory leak detected! [full] total=57344
Received output for rid='x' but the state was deleted in TokenizerManager.
[2026-11-20 11:16:06] [http_server] Error: too long
"""
HARMLESS = f"""{ACTIVE}
{RETRACT}
server_args=ServerArgs(watchdog_timeout=300, enable_nan_detection=False, log_level='info')
Ignore import error when loading sglang.srt.models.x: No module named 'y'
"""


def test_lines_of_a_log_that_tell_of_errors():
    lines = (SUSPECT + HARMLESS).splitlines()
    assert [line for line in lines if soak_judge.SUSPECT.search(line)] == SUSPECT.splitlines()
