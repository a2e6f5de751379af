"""The trained checkpoint's servers: their commands, the side with one length, cells that are measured, the figure."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from nsa_backend import registration
from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks import bench_trained
from nsa_backend.benchmarks.servers import Streamed
from nsa_backend.benchmarks.trained import measure, serving, shared_length
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
        self.pid = 10 * steps + len(side)  # asked for alone: `bench` stops nobody

    def sampled(self, prompts, tokens, temperature):
        self.asked.append((len(prompts), temperature))
        return [{"meta_info": {"spec_correct_drafts_histogram": [10, 10 + prompt[0] % 7]}} for prompt in prompts]

    def streamed(self, prompts, tokens, temperature, top_p=1.0):
        seconds = (0.1 if self.side == "ours" else 0.2) * (1 + temperature)
        assert (top_p == 1.0) == (temperature == 0), "a greedy answer has no top-p, a sampled one has"
        return Streamed([0.05] * len(prompts), 0.05 + seconds, self.sampled(prompts, tokens, temperature))


def numbered(length: int, first: int, count: int) -> list[list[int]]:
    return [[n] for n in range(first, first + count)]


def test_the_cell_that_is_known_worst_is_measured_next():
    servers = [FakeServer("ours", 1), FakeServer("builtin", 1)]
    cells = [measure.AcceptCell(1, 300, t) for t in (0.0, 1.0)]
    kept = []
    measure.measure_accept(
        servers, cells, numbered, tokens=8, error=0.002, most=10_000,
        deadline=float("inf"), keep=lambda: kept.append([c.requests for c in cells]), say=lambda text: None,
    )  # fmt: skip
    assert all(cell.error <= 0.002 for cell in cells)
    assert kept[0] == [measure.FIRST, 0]
    assert kept[1] == [measure.FIRST, measure.FIRST]
    assert sum(kept[2]) == 2 * measure.FIRST + measure.WAVE
    assert servers[0].asked == servers[1].asked
    row = cells[0].row(8)
    assert row["requests"] == cells[0].requests
    assert row["ours"] == row["builtin"]
    assert row["gain"] == {"ratio": 1.0, "standard_error": 0.0}


def test_time_and_requests_bound_a_cell():
    def run(**bounds) -> int:
        cell = measure.AcceptCell(1, 300, 0.0)
        options = {"tokens": 8, "error": 0.0, "most": 300, "deadline": float("inf")} | bounds
        measure.measure_accept([FakeServer("ours", 1)], [cell], numbered, **options, keep=lambda: None, say=lambda text: None)
        return cell.requests

    assert run() == measure.FIRST + measure.WAVE
    assert run(deadline=0.0) == 0


class Dying(FakeServer):
    """Answers the first wave and the speed, then no more."""

    def sampled(self, prompts, tokens, temperature):
        if len(prompts) == measure.WAVE:
            time.sleep(0.1)
            raise ConnectionResetError("the server has ended")
        return super().sampled(prompts, tokens, temperature)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """`bench_trained` over servers that are not there.

    What it is to start goes to `asked`, within how many seconds to `patience`, what stood still to `stopped`.
    """
    (tmp_path / "training.json").write_text(json.dumps({"packages": {"held_out": {"a": 1}}, "log": [], "seed": 0}))
    asked, stopped = [], []

    def run(servers, *words: str, problems: tuple[str, ...] = ()) -> tuple[int, dict]:
        def started(stack, folder, wanted, port, logs, say, seconds):
            asked[:], run.patience = wanted, seconds
            return serving.Started(servers, list(problems))

        @contextmanager
        def paused(pids):
            stopped.append(list(pids))
            yield

        monkeypatch.setattr(bench_trained, "started", started)
        monkeypatch.setattr(bench_trained, "paused", paused)
        monkeypatch.setattr(
            bench_trained, "held_out_prompts", lambda run, length, count, first: [[n] for n in range(first, count)]
        )
        monkeypatch.setattr(sys, "argv", ["bench_trained", str(tmp_path), "--out", str(tmp_path / "out.json"), *words])
        code = bench_trained.main()
        return code, json.loads((tmp_path / "out.json").read_text())

    run.asked, run.stopped = asked, stopped
    return run


def test_everything_of_every_n_is_measured(bench):
    servers = [FakeServer(side, n) for n in (0, 1, 3) for side in (("ours", "builtin") if n < 3 else serving.SIDES)]
    code, found = bench(servers, "--steps", "0", "1", "3", "--error", "0.01")
    assert code == 0
    assert bench.asked == [(server.side, server.steps) for server in servers]
    assert {(r["steps"], r["length"], r["temperature"]) for r in found["accept"]} == {
        (n, length, t) for n in (1, 3) for length in (300, 1500, 3500) for t in (0.0, 0.7, 1.0)
    }
    assert all(r[side]["standard_error"] <= 0.01 for r in found["accept"] for side in ("ours", "builtin"))
    assert [(r["steps"], r["batch"]) for r in found["speed"]] == [(n, batch) for n in (0, 3, 1) for batch in (1, 8, 32)]
    assert bench.stopped == [[s.pid for s in servers if s.steps != n] for n in (0, 3, 1)]
    assert bench.patience == serving.START_SECONDS
    assert found["speed"][0]["ours"]["tokens_per_s"] == pytest.approx(256 / 0.15, rel=1e-3)
    assert found["speed"][0]["ours"]["round_ms"]["median"] < found["speed"][0]["builtin"]["round_ms"]["median"]


def test_speeds_of_sampled_answers_alone(bench):
    servers = [FakeServer(side, 3) for side in ("ours", "builtin")]
    options = ("--steps", "3", "--sides", "ours", "builtin", "--length", "--speed-temperature", "0", "1", "--batch", "1", "8")
    code, found = bench(servers, *options)
    assert code == 0
    assert found["accept"] == []
    assert [(r["temperature"], r["batch"]) for r in found["speed"]] == [(t, batch) for t in (0.0, 1.0) for batch in (1, 8)]
    assert {temperature for _, temperature in servers[0].asked} == {0.0, 1.0}
    greedy, _, sampled, _ = (r["ours"]["tokens_per_s"] for r in found["speed"])
    assert greedy == pytest.approx(256 / 0.15, rel=1e-3)
    assert sampled == pytest.approx(256 / 0.25, rel=1e-3)


def test_greedy_speeds_of_every_n_come_before_sampled_ones(bench):
    """So that what is cut off by the time given is not one N's greedy row, and N = 0 and 3 are there first."""
    servers = [FakeServer(side, n) for n in (1, 0, 7, 4, 3) for side in ("ours", "builtin")]
    options = ("--steps", "1", "0", "7", "4", "3", "--sides", "ours", "builtin", "--length", "--speed-temperature", "0", "1")
    _, found = bench(servers, *options, "--batch", "8", "--minutes", "4")
    order = (0, 3, 1, 7, 4)
    assert [(r["temperature"], r["steps"]) for r in found["speed"]] == [(t, n) for t in (0.0, 1.0) for n in order]
    assert bench.stopped == 2 * [[s.pid for s in servers if s.steps != n] for n in order]
    assert bench.patience == 120, "half of the minutes are left to measure, whatever does not start"


def test_what_fails_is_named_and_the_rest_is_measured(bench):
    servers = [FakeServer("ours", 1), FakeServer("builtin", 1), Dying("ours", 3), FakeServer("builtin", 3)]
    code, found = bench(
        servers, "--steps", "1", "3", "--error", "0.002", "--batch", "8", problems=("shared, N = 3: no memory",)
    )
    assert code == 1
    assert found["problems"] == [
        "shared, N = 3: no memory",
        "accept lengths of N = 3: ConnectionResetError: the server has ended",
    ]
    requests = {n: {r["requests"] for r in found["accept"] if r["steps"] == n} for n in (1, 3)}
    assert requests[3] == {measure.FIRST}
    assert min(requests[1]) > measure.FIRST
    assert len(found["speed"]) == 2


def test_time_that_is_up_is_named(bench):
    code, found = bench([FakeServer("ours", 1)], "--steps", "1", "--minutes", "0", "--batch", "1", "8")
    assert code == 1
    assert found["problems"] == [f"speed of N = 1, batch {batch}, T = 0: no time was left" for batch in (1, 8)]
