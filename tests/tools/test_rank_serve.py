"""Ranks of released models: what the plans ask of them, the weights that are drawn, and vLLM's rank beside ours."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from contextlib import ExitStack
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.benchmarks import lanes
from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.commands import rank_serve, vllm_rank
from nsa_backend.benchmarks.servers import server
from nsa_backend.cli.bench import add_arguments

PLANNED = [
    pytest.param(words, id=f"{path.stem} {job.name}")
    for path in sorted((Path(lanes.__file__).parent / "plans").glob("ranks_*.json"))
    for job in lanes.plan(path)
    if (words := shlex.split(job.command))[4] in ("serve", "profile", "capture")
]


@pytest.mark.parametrize("words", PLANNED)
def test_what_a_plan_asks_of_a_rank_is_measured_on_an_h200(monkeypatch, words):
    """Every side of every rank, with drafts and without; an H200 cannot hold one shape of each model."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=139 * ranks.GIB))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(words[4:])
    with ExitStack() as resources:
        found = import_module(f"nsa_backend.benchmarks.commands.{args.what}").cells(args, resources)
    asked = {(rank, f"N = {n}", side) for rank in args.checkpoint for n in args.steps or [3] for side in args.sides or ["ours"]}
    named = [cell.name for cell in found if cell.section == "rows"]
    assert {one for one in asked if not any(set(one) <= set(re.split(", | on 0", name)) for name in named)} <= {
        one for one in asked if one[1] == "N = 0" and one[2] in server.WITH_DRAFTS
    }
    assert {cell.name.partition(", ")[2] for cell in found if cell.section != "rows"} <= {
        "32 x 32768 does not fit",
        "128 x 4096 does not fit",
    }


def test_a_rank_is_served_with_weights_that_are_drawn(tmp_path, monkeypatch):
    """And compiles only what it meets, on every side alike."""
    rank = ranks.write(tmp_path / "rank", "glm-5.1-tp8")
    words = server.command(rank, 1, 3)
    assert words[1:3] == ["-m", "nsa_backend.benchmarks.servers.rank_server"]
    assert words[words.index("--load-format") + 1] == "dummy"
    (tmp_path / "config.json").write_text("{}")
    assert server.command(tmp_path, 1, 3)[2] == "sglang.launch_server"
    found = []
    monkeypatch.delenv("SGLANG_JIT_DEEPGEMM_PRECOMPILE", raising=False)
    monkeypatch.setattr(server.subprocess, "Popen", lambda words, env, **how: found.append(env))
    for side, checkpoint in product(("ours", "builtin"), (rank, tmp_path)):
        server.Server(side, checkpoint, 100, 3, tmp_path / "log")
    assert [env.get("SGLANG_JIT_DEEPGEMM_PRECOMPILE") for env in found] == ["0", None] * 2


def test_vllm_is_asked_for_the_same_cells_and_gives_the_same_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vllm_rank, "version", lambda name: "0.33.0")
    engines = []

    def start(folder, steps, wanted):
        engines.append((ranks.rank_in(folder), steps, vllm_rank.engine_options(folder, steps, wanted)))
        return lambda asked, tokens: (0.5 + tokens * 0.011, tokens, 1.0)

    monkeypatch.setattr(sys, "argv", ["vllm_rank", str(tmp_path / "out.json"), "--batch", "1", "8", "--length", "300"])
    rows = vllm_rank.run(vllm_rank.parsed(), start)
    assert [(name, steps) for name, steps, _ in engines] == [("v3.2-tp8", 3), ("v3.2-tp8", 0)]
    assert engines[0][2]["compilation_config"]["cudagraph_capture_sizes"] == [1, 4, 8, 32]
    assert "speculative_config" not in engines[1][2]
    assert {row["round_ms"]["median"] for row in rows} == {11.0}
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == rows
    builtin = [row | {"side": "builtin", "round_ms": {"median": 10.0, "min_max": [9.0, 11.0]}} for row in rows]
    rank_serve.show([*builtin, *rows])
    assert "1.100" in capsys.readouterr().out
