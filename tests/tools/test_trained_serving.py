"""The trained checkpoint's servers: their commands, the side with one length, cells that are measured, the figure."""

from __future__ import annotations

import argparse
import runpy
from types import SimpleNamespace

import pytest
import torch

from nsa_backend import registration
from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks import bench_trained
from nsa_backend.benchmarks.trained import measure, serving, shared_length
from nsa_backend.cli.plot_trained import trained
from nsa_backend.demo.engine import Engine
from nsa_backend.demo.speculative import SpeculativeDecoder
from nsa_backend.multi_step import NativeSparseAttnMultiStepBackend


def test_sides_differ_in_the_module_alone(tmp_path):
    commands = {side: serving.command(side, tmp_path, 1234, 3) for side in serving.SIDES}
    assert commands["ours"] == commands["builtin"]
    assert [word for word in commands["shared"] if word not in commands["ours"]] == [shared_length.__name__]
    assert "--speculative-num-steps" not in serving.command("ours", tmp_path, 1234, 0)


def test_the_installed_release_takes_every_option(tmp_path):
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    words = serving.command("builtin", tmp_path, 1234, 3)[3:]
    assert getattr(parser.parse_args(words), adapter.DECODE_ATTRIBUTE) == "fa3"


def test_draft_steps_with_one_length_accept_less_than_with_their_own():
    prompts = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(1)).tolist() for n in (37, 66)]
    own, one = (
        SpeculativeDecoder(Engine(prompts, num_steps=3, multi_step=multi_step))
        for multi_step in (None, shared_length.OneLengthMultiStepBackend)
    )
    (right, accepted), (text, fewer) = own.decode(16), one.decode(16)
    assert text == right
    assert set(accepted) == {4}
    assert sum(fewer) / len(fewer) < 4
    lengths = [step.forward_metadata.nsa_cache_seqlens_int32.tolist() for step in one.worker.draft_attn_backend.attn_backends]
    assert lengths[0] == lengths[1]


def test_only_a_process_whose_main_module_it_is_is_spoiled(monkeypatch):
    """A server spawns its scheduler, and the child imports the parent's main module under the name __mp_main__."""
    right = NativeSparseAttnMultiStepBackend
    monkeypatch.setattr(registration, right.__name__, right)
    runpy.run_module(shared_length.__name__, run_name="other")
    assert registration.NativeSparseAttnMultiStepBackend is right
    runpy.run_module(shared_length.__name__, run_name="__mp_main__")
    assert registration.NativeSparseAttnMultiStepBackend.__name__ == "OneLengthMultiStepBackend"


class FakeServer:
    """Accepts more drafts of prompts that begin with a larger number."""

    def __init__(self, side: str, steps: int):
        self.side, self.steps, self.asked = side, steps, []

    def sampled(self, prompts, tokens, temperature):
        self.asked.append((len(prompts), temperature))
        return [{"meta_info": {"spec_correct_drafts_histogram": [10, 10 + prompt[0] % 7]}} for prompt in prompts]


def test_the_cell_that_is_known_worst_is_measured_next():
    servers = [FakeServer("ours", 1), FakeServer("builtin", 1)]
    cells = [measure.AcceptCell(1, 300, t) for t in (0.0, 1.0)]
    kept = []
    measure.measure_accept(
        servers, cells, lambda length, count: [[n] for n in range(count)], tokens=8, error=0.008, most=10_000,
        deadline=float("inf"), keep=lambda: kept.append([c.requests for c in cells]), say=lambda text: None,
    )  # fmt: skip
    assert all(cell.error <= 0.008 for cell in cells)
    assert kept[0] == [32, 0]
    assert kept[1] == [32, 32]
    assert servers[0].asked == servers[1].asked
    row = cells[0].row(8)
    assert row["requests"] == cells[0].requests
    assert row["ours"] == row["builtin"]


def test_time_and_requests_bound_a_cell():
    def run(**bounds) -> int:
        cell = measure.AcceptCell(1, 300, 0.0)
        options = {"tokens": 8, "error": 0.0, "most": 64, "deadline": float("inf")} | bounds
        prompts = lambda length, count: [[n] for n in range(count)]  # noqa: E731
        measure.measure_accept([FakeServer("ours", 1)], [cell], prompts, **options, keep=lambda: None, say=lambda text: None)
        return cell.requests

    assert run() == 64
    assert run(deadline=0.0) == 0


def report(steps: int, name: str = "run") -> dict:
    side = {"accept": 2.0, "standard_error": 0.01, "accepted": [0.6] * steps, "accepted_if_reached": [0.6] * steps,
            "histogram": [1] * (steps + 1)}  # fmt: skip
    speed = {"tokens_per_s": 100.0 * steps, "tpot_ms": {"median": 1.0}}
    head = {"steps": steps, "length": 300}
    return {
        "environment": {"gpu": "H200", "packages": {"sglang": "0"}, "date": "today"},
        "command": "command",
        "training": {"name": name},
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
    monkeypatch.setattr(serving, "wait_until_ready", lambda *arguments: None)
    server = SimpleNamespace(port=1, _process=None, log=tmp_path / "log", side="shared", steps=3)
    server.log.write_text("nsa_backend 0.1.0 is active: decode=fa3")
    with pytest.raises(RuntimeError, match="says nothing of"):
        serving.SideServer.wait(server)
    server.log.write_text(f"nsa_backend 0.1.0 is active: decode=fa3\n{shared_length.ANNOUNCEMENT}")
    serving.SideServer.wait(server)
    server.side = "builtin"
    with pytest.raises(RuntimeError, match="is active"):
        serving.SideServer.wait(server)
