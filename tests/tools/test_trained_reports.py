"""What comes of measuring the trained checkpoint: reports put together, the figure, and a server that is another side."""

from __future__ import annotations

import pytest

from nsa_backend.benchmarks import bench_trained, servers
from nsa_backend.benchmarks.trained import serving, shared_length
from nsa_backend.benchmarks.trained.figure import trained


def report(steps: int, name: str = "run") -> dict:
    side = {"accept": 2.0, "standard_error": 0.01, "accepted": [0.6] * steps, "accepted_if_reached": [0.6] * steps,
            "histogram": [1] * (steps + 1)}  # fmt: skip
    speed = {"tokens_per_s": 100.0 * steps, "tpot_ms": {"median": 1.0}}
    head = {"steps": steps, "length": 300}
    return {
        "environment": {"gpu": "H200", "packages": {"sglang": "0"}, "date": "today"},
        "command": "command",
        "training": {"name": name},
        "problems": [],
        "accept": [head | {"temperature": t, "requests": 5, "ours": side, "builtin": side} for t in (0.0, 1.0)],
        "speed": [head | {"batch": 1, "ours": speed, "builtin": speed}],
    }


def test_partial_reports_are_put_together(capsys):
    merged = bench_trained.merged([report(3), report(2)])
    assert [row["steps"] for row in merged["accept"]] == [2, 2, 3, 3]
    assert bench_trained.best(merged, 1, "ours") == 3
    bench_trained.show(merged)
    assert "2.000 ± 0.010" in capsys.readouterr().out
    with pytest.raises(ValueError, match="measure different checkpoints"):
        bench_trained.merged([report(3), report(2, "another")])


def test_the_figure_has_a_panel_for_each_n():
    figure = trained(bench_trained.merged([report(1), report(3), report(5)]))
    assert [axis.get_title() for axis in figure.axes] == ["N = 3", "N = 5"]
    assert all(len(axis.get_lines()) == 4 for axis in figure.axes)


def test_a_server_that_is_not_the_side_it_should_be_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "wait_until_ready", lambda *arguments: None)
    server = object.__new__(serving.SideServer)  # no process is started
    vars(server).update(port=1, _process=None, log=tmp_path / "log", side="shared", steps=3)
    server.log.write_text("nsa_backend 0.1.0 is active: decode=fa3")
    with pytest.raises(RuntimeError, match="says nothing of"):
        server.wait()
    server.log.write_text(f"nsa_backend 0.1.0 is active: decode=fa3\n{shared_length.ANNOUNCEMENT}")
    server.wait()
    server.side = "builtin"
    with pytest.raises(RuntimeError, match="is active"):
        server.wait()
