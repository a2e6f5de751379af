"""`python -m nsa_backend bench`: cells under a time bound, reports, exit codes, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa_backend import __main__ as command
from nsa_backend.benchmarks.calls import timing
from nsa_backend.benchmarks.commands import attention
from nsa_backend.benchmarks.reports import cells
from nsa_backend.cli import bench

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """Stands in for `time`: moves when a cell says so."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cells, "time", clock)
    return clock


def timed_cells(clock: Clock, *seconds: float) -> list[cells.Cell]:
    def measure(index: int, took: float) -> list[dict]:
        clock.now += took
        return [{"cell": index}]

    return [cells.Cell(f"cell {i}", lambda i=i, s=s: measure(i, s), "rows" if i else "first") for i, s in enumerate(seconds)]


def lose() -> list[dict]:
    raise cells.LostCellError("a trace ends early")


def test_a_lost_cell_costs_no_other_one(clock):
    first, second, third = timed_cells(clock, 10, 10, 10)
    report = cells.run_cells([first, replace(second, measure=lose), third], 60, lambda r: None)
    assert [row["cell"] for row in report["first"] + report["rows"]] == [0, 2]
    assert report["lost"] == ["cell 1: a trace ends early"]
    assert report["not_measured"] == []


@pytest.mark.parametrize(
    ("bound", "measured"),
    [(50, [0, 1, 2]), (49, [0, 1]), (20, [0, 1]), (19, [0]), (1, [0])],
)
def test_a_cell_starts_only_where_the_longest_so_far_would_end_in_time(clock, bound, measured):
    kept = []
    report = cells.run_cells(timed_cells(clock, 10, 20, 10), bound, lambda r: kept.append(json.loads(json.dumps(r))))
    assert [row["cell"] for row in report["first"] + report["rows"]] == measured
    assert report["not_measured"] == [f"cell {i}" for i in range(3) if i not in measured]
    assert len(kept) == len(measured)
    assert kept[-1]["rows"] == report["rows"]
    assert kept[0]["not_measured"] == ["cell 1", "cell 2"]  # if it is cut now


def test_a_first_cell_that_compiles_does_not_stop_the_short_ones_after_it(clock):
    report = cells.run_cells(timed_cells(clock, 100, 10, 80, 10, 10), 205, lambda _: None)
    assert [row["cell"] for row in report["rows"]] == [1, 2]
    assert report["not_measured"] == ["cell 3", "cell 4"]


@pytest.mark.parametrize(
    ("starts", "seconds", "measured"),
    [
        ((100, 100, 100), 150, 3),
        ((100, 100, 100), 255, 5),
        ((500, 60, 60), 670, 6),  # what the first start compiled stands: another one is given the 140 seconds that are left
        ((500, 60, 60), 680, 6),  # and from then on a start takes what the second one did
    ],
)
def test_the_start_of_a_server_counts_for_cells_that_start_one(clock, starts, seconds, measured):
    """Every third cell starts a server; every cell measures for 10 seconds."""
    servers = cells.Prepared()

    def measure(number: int) -> list[dict]:
        if servers.key != number // 3:
            servers.key, servers.seconds = number // 3, servers.seconds + starts[number // 3]
            clock.now += starts[number // 3]
        clock.now += 10
        return [{"cell": number}]

    made = [cells.Cell(f"{n}", lambda n=n: measure(n), prepared=servers, key=n // 3) for n in range(9)]
    assert [row["cell"] for row in cells.run_cells(made, seconds, lambda _: None)["rows"]] == list(range(measured))


def test_a_long_kind_of_cell_does_not_stop_a_short_one(clock):
    def measure(number: int, seconds: int) -> list[dict]:
        clock.now += seconds
        return [{"cell": number}]

    kinds = [("", 10), ("", 10), ("by part", 100), ("", 10), ("by part", 100)]
    made = [cells.Cell(f"{n}", lambda n=n, s=s: measure(n, s), kind=kind) for n, (kind, s) in enumerate(kinds)]
    assert [row["cell"] for row in cells.run_cells(made, 140, lambda _: None)["rows"]] == [0, 1, 2, 3]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        command.main(["bench", "serve"])
    assert stop.value.code == 2
    assert "bench needs an NVIDIA GPU" in capsys.readouterr().err


OWN = ["serve", "--model", "x", "--prompts", "y"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["attention", "--length", "5"], "bench attention does not take --length: it takes --batch --heads --section"),
        (["memory", "--steps", "5"], "bench memory does not take --steps: it takes none of"),
        (["serve", "--port", "1", "2"], "unrecognized arguments: 2"),
        (["metadata", "--checkpoint", "x"], "bench metadata does not take --checkpoint"),
        (["metadata", "--minutes", "0"], "must be above 0"),
        (["draft", "--temperature", "1"], "bench draft does not take --temperature"),
        (["serve", "--top-p", "0.9"], "--top-p is for requests that sample: pass --temperature above 0 too"),
        (["serve", "--top-p", "0.9", "--temperature", "0"], "pass --temperature above 0 too"),
        (["metadata", "--steps", "-1"], "must be at least 0"),
        (["serve", "--prompts", "x"], "--prompts says how --model is measured: pass --model FOLDER too"),
        (["serve", "--model", "x"], "--model needs --prompts FILE"),
        ([*OWN, "--length", "300"], "--length does not go with --model"),
        ([*OWN, "--quick"], "--quick does not go with --model, whose prompts come from --prompts"),
        ([*OWN, "--parallel", "tp8"], "--parallel does not go with --model, whose GPUs --server names"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_bad_arguments(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["bench", *arguments])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("minutes", "code"), [("1", 0), ("0.2", 1)])
def test_exit_code_file_and_json(monkeypatch, capsys, tmp_path, clock, minutes, code):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    asked = []
    made = SimpleNamespace(cells=lambda options, resources: asked.append(options) or timed_cells(clock, 10, 10), show=None)
    monkeypatch.setattr(bench, "import_module", lambda name: made)
    out = tmp_path / "x.json"
    assert command.main(["bench", "draft", "--steps", "3", "5", "--json", "--minutes", minutes, "--out", str(out)]) == code
    printed = capsys.readouterr()
    report = json.loads(out.read_text())
    assert json.loads(printed.out) == report
    assert report["command"] == f"python -m nsa_backend bench draft --steps 3 5 --json --minutes {minutes} --out {out}"
    assert report["environment"]["gpu"] == "NVIDIA H200"
    assert report["not_measured"] == ["cell 1"] * code
    assert ("not measured within 0.2 minutes: cell 1" in printed.err) == bool(code)
    assert asked[0].steps == [3, 5]


def test_a_lost_cell_is_told_and_the_exit_code_says_so(monkeypatch, capsys, clock):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    made = SimpleNamespace(cells=lambda *_: [replace(timed_cells(clock, 10)[0], measure=lose)], show=lambda report: None)
    monkeypatch.setattr(bench, "import_module", lambda name: made)
    assert command.main(["bench", "draft"]) == 1
    assert "lost: cell 0: a trace ends early" in capsys.readouterr().err


def test_a_sigterm_closes_what_the_cells_opened_and_keeps_what_was_measured(monkeypatch, tmp_path, clock):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    open_servers, out, before = ["a server"], tmp_path / "x.json", signal.getsignal(signal.SIGTERM)

    def made(options, resources):
        resources.callback(open_servers.clear)
        ended = cells.Cell("ended", lambda: os.kill(os.getpid(), signal.SIGTERM))
        return [*timed_cells(clock, 1, 1), ended, *timed_cells(clock, 1)]

    monkeypatch.setattr(bench, "import_module", lambda name: SimpleNamespace(cells=made, show=None))
    with pytest.raises(SystemExit) as stop:
        command.main(["bench", "draft", "--out", str(out)])
    assert stop.value.code == 143
    assert open_servers == []
    assert [json.loads(out.read_text())[section] for section in ("first", "rows")] == [[{"cell": 0}], [{"cell": 1}]]
    assert signal.getsignal(signal.SIGTERM) == before


def test_attention_measures_the_sections_that_are_asked_for():
    made = [cells.Cell(section, list, section) for section in ("decode", "by_rows", "decode")]
    assert attention.of_sections(made, None) == attention.of_sections(made, ["by_rows", "decode"]) == made
    assert attention.of_sections(made, ["by_rows"]) == [made[1]]
    with pytest.raises(SystemExit, match="no section wrapper here: choose among decode, by_rows"):
        attention.of_sections(made, ["wrapper"])


def test_a_way_that_is_wrong_or_raises_is_named_and_not_timed():
    def raises() -> float:
        raise ValueError("no such tile\nand more")

    ways = {"near": lambda: 0.001, "far": lambda: 0.5, "no number": lambda: float("nan"), "none": raises}
    right, wrong = timing.right_ones(ways, lambda way: way(), 1e-2, "SGLang's")
    assert list(right) == ["near"]
    assert wrong == {
        "far": "relative distance from SGLang's 5.0e-01",
        "no number": "relative distance from SGLang's nan",
        "none": "no such tile",
    }
