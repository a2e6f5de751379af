"""Servers of several GPUs: how they are named, what comes to a rank, and what they hold of each GPU's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nsa_backend.__main__ import main
from nsa_backend.benchmarks.servers import gpu_memory, pairs, server, server_options, sides
from nsa_backend.benchmarks.servers.parallel import ONE_GPU, Parallel, parsed


@pytest.mark.parametrize(
    ("word", "parallel", "gpus"),
    [
        ("tp4", Parallel(tp=4), 4),
        ("dp4", Parallel(dp=4), 4),
        ("dp2-tp2", Parallel(2, 2), 4),
        ("dp2-tp4", Parallel(2, 4), 8),
        ("tp1", ONE_GPU, 1),
        ("tp2-ep", Parallel(tp=2, ep=True), 2),
        ("dp2-tp2-ep", Parallel(2, 2, ep=True), 4),
        ("cp2", Parallel(cp=2), 2),
        ("dcp2", Parallel(dcp=2), 2),
        ("pp2", Parallel(pp=2), 2),
        ("pd", Parallel(pd=True), 2),
        ("pd-dp2", Parallel(dp=2, pd=True), 4),
        ("pd-dp2-tp2-ep", Parallel(2, 2, ep=True, pd=True), 8),
    ],
)
def test_a_word_names_the_ranks_of_a_server(word, parallel, gpus):
    assert parsed(word) == parallel
    assert (str(parallel), parallel.gpus) == (word, gpus)


@pytest.mark.parametrize(
    "word",
    [
        "",
        "dp",
        "tp0",
        "tp02",
        "4",
        "tp2-dp2",
        "dp2tp2",
        "-tp2",
        "ep",
        "ep2",
        "pd2",
        "tp2-pd",
        "tp2-tp2",
        "cp2-ep",
        "dcp2-tp2",
        "pd-pp2",
    ],
)
def test_a_word_that_names_none(word):
    with pytest.raises(SystemExit, match=f"--parallel {word} is none: write tp4, dp4, dp2-tp2"):
        parsed(word)


def options(parallel: Parallel, *shapes: tuple[int, int]) -> dict[str, list[str]]:
    """A server's options, with their values."""
    found: dict[str, list[str]] = {}
    for word in sides.options_for(shapes, 256, parallel):
        if word.startswith("--"):
            values = found[word] = []
        else:
            values.append(word)
    return found


def test_a_rank_has_its_share_of_a_batch(monkeypatch):
    monkeypatch.setattr(server_options, "installed", lambda: "0.5.23")
    assert Parallel(dp=4).of_a_rank([(1, 300), (8, 300), (9, 300)]) == [(1, 300), (2, 300), (3, 300)]
    tensor, attention = (options(one, (8, 300), (256, 300)) for one in (Parallel(tp=4), Parallel(dp=4)))
    assert "256" in tensor["--cuda-graph-bs-decode"]
    assert "256" not in attention["--cuda-graph-bs-decode"]
    assert {"2", "64"} <= set(attention["--cuda-graph-bs-decode"])
    assert tensor["--max-running-requests"] == attention["--max-running-requests"] == ["256"]  # of all ranks
    tokens = [int(one["--max-total-tokens"][0]) for one in (tensor, attention)]  # of one
    assert tokens[0] > 3 * tokens[1] > 3 * 64 * (300 + 256)
    assert max(map(int, tensor["--cuda-graph-bs-prefill"])) == 8192
    assert max(map(int, attention["--cuda-graph-bs-prefill"])) == 2048  # SGLang divides its chunks by the ranks


def test_a_server_finds_what_its_deployment_needs(tmp_path, monkeypatch):
    found = []

    def start(words, env, **how):
        found.append(env)
        raise SystemExit

    monkeypatch.setattr(server.subprocess, "Popen", start)
    for parallel in (Parallel(pp=2), ONE_GPU):
        with pytest.raises(SystemExit):
            pairs.started(parallel, "builtin", tmp_path, 1, 3, tmp_path / "log")
    assert [env.get("SGLANG_ENABLE_PP_SPEC") for env in found] == ["1", None]
    assert {env["NSA_BACKEND_DISABLE"] for env in found} == {"1"}


@pytest.mark.parametrize(("visible", "asked"), [(None, []), ("2,3", ["-i", "2,3"])])
def test_only_the_gpus_of_this_process_are_asked(monkeypatch, visible, asked):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seen = []
    monkeypatch.setattr(gpu_memory.subprocess, "run", lambda words, **how: seen.extend(words) or SimpleNamespace(stdout=""))
    assert gpu_memory.used() == []
    assert seen[1 : 1 + len(asked)] == asked


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tp2", "dp4"], "--parallel dp4 takes 4 GPUs, and torch sees 2"),
        (["tp2", "pd"], "need nixl to hand over KV: pip install nixl nixl-cu13"),
    ],
)
def test_what_this_machine_lacks(monkeypatch, capsys, words, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(pairs, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "serve", "--parallel", *words])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
