"""What a server's start takes, from its log, with a stand-in for the server."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack, nullcontext

import pytest

from nsa_backend.benchmarks.commands import capture
from nsa_backend.benchmarks.servers import gpu_memory, pairs
from nsa_backend.cli.bench import OPTIONS

LOG = """
[2026-11-22 10:00:00] Capture target prefill CUDA graph end. elapsed=5.27 s, mem usage=2.02 GB, avail mem=60.11 GB.
[2026-11-22 10:00:03] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, avail mem=60.11 GB
[10:00:06] Capture target verify CUDA graph end. bs=[1, 2, 4, 8], elapsed=3.07 s, mem usage=-0.96 GB, avail mem=61.1 GB.
[2026-11-22 10:00:06] Capture draft decode CUDA graph end. elapsed=0.41 s, mem usage=0.02 GB, avail mem=61.05 GB.
[2026-11-22 10:00:09] nsa_backend: captured whole speculative rounds of [1, 2, 4, 8] greedy requests in 0.1 s, 48 MiB
[2026-11-22 10:00:19] nsa_backend: captured whole speculative rounds of [1] sampled requests in 0.0 s, -2 MiB
[10:00:19] nsa_backend: captured whole speculative rounds of [1, 2] greedy requests with log-probabilities in 1.5 s, 512 MiB
"""
OLDER_LOG = """
Capture cuda graph end. Time elapsed: 3.20 s. mem usage=0.51 GB. avail mem=60.00 GB.
Capture draft extend cuda graph end. Time elapsed: 0.70 s. mem usage=0.06 GB. avail mem=59.94 GB.
"""


def test_a_log_tells_of_every_capture():
    assert capture.captures(LOG) == [
        {"what": "target prefill", "seconds": 5.27, "gib": 2.02},
        {"what": "target verify", "seconds": 3.07, "gib": -0.96},
        {"what": "draft decode", "seconds": 0.41, "gib": 0.02},
        {"what": "whole rounds, greedy requests", "sizes": 4, "seconds": 0.1, "gib": 0.047},
        {"what": "whole rounds, sampled requests", "sizes": 1, "seconds": 0.0, "gib": -0.002},
        {"what": "whole rounds, greedy requests with log-probabilities", "sizes": 2, "seconds": 1.5, "gib": 0.5},
    ]
    assert capture.captures(OLDER_LOG) == [
        {"what": "target", "seconds": 3.2, "gib": 0.51},
        {"what": "draft extend", "seconds": 0.7, "gib": 0.06},
    ]


class Fake(nullcontext):
    """A server that says what a real one does."""

    running, started = 0, 0

    def __init__(self, side, path, port, steps, log, *options, environment):
        super().__init__(self)
        self.pid = os.getpid()
        log.write_text(LOG if side == "ours" else "")
        Fake.running, Fake.started = Fake.running + 1, Fake.started + 1

    def __exit__(self, *exception):
        Fake.running -= 1

    def wait(self, seconds):
        assert Fake.running == 1, "another server's memory would count as what the captures take"

    def generate(self, prompts, tokens):
        """Answered."""


@pytest.fixture
def cells(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(pairs, "Server", Fake)
    monkeypatch.setattr(gpu_memory, "used", lambda: [])

    def chosen(**given) -> list:
        options = dict.fromkeys(option[2:].replace("-", "_") for option in OPTIONS) | {"quick": False}
        with ExitStack() as resources:
            return capture.cells(argparse.Namespace(**options | {"checkpoint": [str(tmp_path)]} | given), resources)

    return chosen


def test_servers_run_one_after_the_other_and_say_what_their_captures_took(cells, capsys):
    Fake.started = 0
    asked = cells(batch=[48, 64])
    assert [cell.name.rsplit(", ", 1)[1] for cell in asked] == ["ours", "three_graphs", "builtin"] * 2
    rows = [row for cell in asked for row in cell.measure()]
    assert [len(row["captures"]) for row in rows] == [6, 0, 0] * 2
    assert Fake.started == 2 * 3 + 3, "the first of each side compiles, and is not recorded"
    assert [row["requests"] for row in rows] == [48] * 3 + [64] * 3
    for row in rows:
        assert row["steps"] == 3
        assert (row["rounds_s"], row["rounds_gib"]) == ((1.6, 0.545) if row["side"] == "ours" else (0, 0))
        assert row["host_gib"] > 0
    capture.show({"rows": rows})
    shown = capsys.readouterr().out
    assert "whole rounds, greedy requests, 4 sizes" in shown
    assert "0.55" in shown
