"""The sides of a comparison of servers: which there are, in which order they start, and what is compared with what."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from nsa_backend.benchmarks import bench_serve, generation, servers


def test_sides_start_in_the_order_they_are_named_in(tmp_path, monkeypatch):
    """And without drafts there are no rounds to put in one graph."""
    started = []

    class Fake(nullcontext):
        def __init__(self, backend, path, port, steps, log, *options):
            super().__init__(self)
            started.append((backend, port))

        def wait(self):
            """Ready at once."""

    monkeypatch.setattr(generation, "Server", Fake)
    monkeypatch.setattr(generation.time, "sleep", lambda seconds: None)
    (tmp_path / "config.json").write_text("{}")
    sides = ["builtin", "three_graphs", "ours"]
    servers_ = generation.Servers(tmp_path, 100, [(8, 300)], 256, sides)
    assert list(servers_.of(str(tmp_path), 3)) == sides
    assert list(servers_.of(str(tmp_path), 0)) == ["builtin", "ours"]
    assert started == [("builtin", 100), ("three_graphs", 150), ("ours", 200), ("builtin", 100), ("ours", 150)]


def test_a_side_that_there_is_not():
    with pytest.raises(SystemExit, match="--sides theirs is none: there are ours, builtin, three_graphs, auto"):
        generation.sides_of(["ours", "theirs"])


def test_a_side_is_told_from_the_others_by_its_environment():
    assert servers.ENVIRONMENTS["builtin"] == {"NSA_BACKEND_DISABLE": "1"}
    assert servers.ENVIRONMENTS["three_graphs"] == {"NSA_BACKEND_DISABLE": "0", "NSA_BACKEND_ROUND_GRAPH": "0"}
    assert servers.ENVIRONMENTS["auto"] == {"NSA_BACKEND_DISABLE": "0", "NSA_BACKEND_AUTO_DECODE": "1"}


def test_ours_with_a_switch_is_compared_with_ours(capsys):
    def found(seconds: float) -> list:
        return [generation.Sample(seconds, 0.5, 257, 8, 64, 4.0)] * 2

    sides = {"ours": found(1.5), "builtin": found(2.5), "three_graphs": found(1.0), "auto": found(1.2)}
    row = bench_serve.compared(sides)
    assert row["speedup"] == pytest.approx(2.5 / 1.5, abs=1e-3)
    assert row["three_graphs_over_ours"]["speedup"] == 1.5
    assert row["three_graphs_over_ours"]["ratio"]["round_ms"] == 0.5
    assert row["auto_over_ours"]["speedup"] == 1.25
    assert "ratio" not in bench_serve.compared({name: sides[name] for name in ("ours", "three_graphs")})
    head = {"checkpoint": "faithful", "steps": 3, "batch": 8, "length": 300}
    bench_serve.show({"rows": [head | {side: bench_serve.summary(of_one) for side, of_one in sides.items()} | row]})
    shown = capsys.readouterr().out
    assert "three_graphs / ours" in shown
    assert "auto / ours" in shown
