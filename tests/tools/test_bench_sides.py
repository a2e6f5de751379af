"""The sides of a comparison of servers: which there are, in which order they start, and what is compared with what."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.commands import serve
from nsa_backend.benchmarks.servers import generation, pairs, server, sides


def test_sides_start_in_the_order_they_are_named_in(tmp_path, monkeypatch):
    """And without drafts there are no rounds to put in one graph."""
    started = []

    class Fake(nullcontext):
        def __init__(self, backend, path, port, steps, log, *options, environment):
            super().__init__(self)
            started.append((backend, port))

        def wait(self):
            """Ready at once."""

    monkeypatch.setattr(pairs, "Server", Fake)
    monkeypatch.setattr(sides.time, "sleep", lambda seconds: None)
    (tmp_path / "config.json").write_text("{}")
    order = ["builtin", "three_graphs", "ours"]
    running = sides.Servers(tmp_path, 100, [(8, 300)], 256, order)
    assert list(running.of(str(tmp_path), 3)) == order
    assert list(running.of(str(tmp_path), 0)) == ["builtin", "ours"]
    assert started == [("builtin", 100), ("three_graphs", 150), ("ours", 200), ("builtin", 100), ("ours", 150)]


def test_a_side_that_there_is_not():
    named = "ours, builtin, three_graphs, auto, front, verify"
    with pytest.raises(SystemExit, match=f"--sides theirs is none: there are {named}"):
        sides.sides_of(["ours", "theirs"])


def test_a_side_that_is_told_by_an_option(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(
        server.subprocess, "Popen", lambda words, **how: found.append((words, how["env"]["NSA_BACKEND_DISABLE"]))
    )
    for side in ("verify", "ours"):
        server.Server(side, tmp_path, 100, 3, tmp_path / "log", "--tp-size", "2")
    (verify, ours), switches = zip(*found, strict=True)
    assert switches == ("0", "0")
    assert [word for word in verify if word not in ours] == ["sparse_verify"]
    assert verify[-2:] == ours[-2:] == ["--tp-size", "2"]


def test_a_rank_compiles_what_it_meets_on_every_side(tmp_path, monkeypatch):
    found = []
    monkeypatch.delenv("SGLANG_JIT_DEEPGEMM_PRECOMPILE", raising=False)
    monkeypatch.setattr(server.subprocess, "Popen", lambda words, env, **how: found.append(env))
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    for checkpoint in (ranks.write(tmp_path / "rank", "v3.2-tp8"), tmp_path / "small"):
        for side in ("ours", "builtin"):
            server.Server(side, checkpoint, 100, 3, tmp_path / "log")
    assert [env.get("SGLANG_JIT_DEEPGEMM_PRECOMPILE") for env in found] == ["0", "0", None, None]


def test_ours_with_a_switch_is_compared_with_ours(capsys):
    def found(seconds: float) -> list:
        return [generation.Sample(seconds, 0.5, 257, 8, 64, 4.0)] * 2

    sides = {"ours": found(1.5), "builtin": found(2.5), "three_graphs": found(1.0), "auto": found(1.2)}
    row = serve.compared(sides)
    assert row["speedup"] == pytest.approx(2.5 / 1.5, abs=1e-3)
    assert row["three_graphs_over_ours"]["speedup"] == 1.5
    assert row["three_graphs_over_ours"]["ratio"]["round_ms"] == 0.5
    assert row["auto_over_ours"]["speedup"] == 1.25
    assert "ratio" not in serve.compared({name: sides[name] for name in ("ours", "three_graphs")})
    head = {"checkpoint": "faithful", "steps": 3, "batch": 8, "length": 300}
    serve.show({"rows": [head | {side: serve.summary(of_one) for side, of_one in sides.items()} | row]})
    shown = capsys.readouterr().out
    assert "three_graphs / ours" in shown
    assert "auto / ours" in shown


def test_a_cell_warms_up_with_a_batch_that_is_not_too_long(monkeypatch):
    """And both sides answer in turns, each time by the same sampling parameters."""
    asked, wanted = [], {}

    class Fake:
        def __init__(self, name, seconds):
            self.name, self.seconds = name, seconds

        def streamed(self, prompts, tokens, **sampling):
            asked.append((self.name, len(prompts)))
            assert sampling == wanted
            answers = [{"meta_info": {"spec_correct_drafts_histogram": [0, 0, 0, 64]}}] * len(prompts)
            return server.Streamed([0.1, *[0.5] * (len(prompts) - 1)], self.seconds, answers)

    both = {"ours": Fake("ours", 1.5), "builtin": Fake("builtin", 2.5)}
    found = generation.in_turns(both, 32, 32768, 257, 2)
    assert asked == [("ours", 4), ("builtin", 4)] + [("ours", 32), ("builtin", 32)] * 2
    wanted |= {"temperature": 0.6, "top_p": 0.95}
    generation.in_turns(both, 32, 32768, 257, 1, **wanted)
    assert asked[6:] == [("ours", 4), ("builtin", 4), ("ours", 32), ("builtin", 32)]
    row = serve.summary(found["ours"]) | serve.compared(found)
    assert row["ttft_ms"]["median"] == 500
    assert row["round_ms"] == {"median": 15.625, "min_max": [15.625, 15.625]}
    assert row["speedup"] == pytest.approx(2.5 / 1.5, abs=1e-3)
    assert row["ratio"] == {"ttft_ms": 1.0, "tpot_ms": 0.5, "round_ms": 0.5}
