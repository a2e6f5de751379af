"""What `python -m nsa_backend bench` prints, and what servers it starts and asks, of runs with stand-ins for servers.

Each run is a file of `printed/`: the servers' transcript, then what the command printed.
"""

from __future__ import annotations

import json
import os
import shlex
from types import SimpleNamespace

import pytest
import stand_in_bench
import torch
from printed import assert_printed

from nsa_backend.__main__ import main
from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.commands import capture, own_model, rank_serve
from nsa_backend.benchmarks.reports import report
from nsa_backend.benchmarks.servers import gpu_memory, pairs, server_options, sides

RUNS = {
    "a rank on one GPU": "serve --checkpoint v3.2-tp8 --steps 3 --batch 1 8 --length 300 --parts 8 --samples 2",
    "turns of chats": "serve --checkpoint v3.2-tp8 --steps 3 --batch 1 2 --length 300 --cached 0 8192 --parts 1 --quick",
    "a rank on two GPUs": "serve --checkpoint v3.2-tp8 --steps 0 --batch 1 --length 300 --sides ours builtin three_graphs",
    "two ranks on two GPUs": "serve --checkpoint v3.2-tp8 --parallel dcp2 tp2 --quick --steps 3 --batch 8 --parts 8",
    "a rank with another option": "serve --checkpoint v3.2-tp8 --steps 0 --batch 1 --length 300 --quick --sides auto builtin "
    "--server '--moe-runner-backend deep_gemm'",
    "a rank by part": "profile --checkpoint v3.2-tp8 --steps 3 --batch 1 --length 300",
    "what does not fit": "serve --checkpoint v3.2-tp8 --steps 0 --batch 32 --length 300 32768 --quick",
    "sides in order": "serve --checkpoint SMALL --sides builtin three_graphs ours auto --steps 3 0 --batch 8 --length 300",
    "long prompts": "serve --checkpoint SMALL --steps 3 --batch 32 --length 32768 --quick --temperature 0.6 --top-p 0.9",
    "two GPUs a server": "serve --checkpoint SMALL --parallel tp2 dp2 --steps 3 --batch 4 8 --length 300 --samples 2",
    "own model and prompts": "serve --model SMALL --prompts PROMPTS --steps 0 3 --batch 1 2 --tokens 8 --server '--tp-size 8'",
    "no time for a second side": "serve --model SMALL --prompts PROMPTS --steps 3 --batch 1 --tokens 8 --minutes 1e-9",
    "captures": "capture --checkpoint SMALL --batch 48 64",
    "kernels": "profile --checkpoint SMALL --steps 3 0 --batch 1 --length 300",
    "rounds": "draft --checkpoint SMALL --steps 3 --batch 1 --length 300 --quick",
}


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Returns a function of a command's words and the names of GPUs: (exit code, transcript, what was printed, report)."""
    for module in (pairs, rank_serve, own_model):
        monkeypatch.setattr(module, "Server", stand_in_bench.Server)
    monkeypatch.setattr(stand_in_bench.Server, "seen", [])
    monkeypatch.setattr(stand_in_bench, "HELD", held := [1024, 1024])
    told = SimpleNamespace(run=lambda *words, **how: SimpleNamespace(stdout="\n".join(map(str, held))), SubprocessError=OSError)
    monkeypatch.setattr(gpu_memory, "subprocess", told)
    for name in ("APART_SECONDS", "STILL_SECONDS", "MOST_SECONDS"):
        monkeypatch.setattr(gpu_memory, name, 0.01)
    for module in (sides, rank_serve):
        monkeypatch.setattr(module, "APART_SECONDS", 0.0)
    monkeypatch.setattr(capture, "host_gib", lambda pid: 1.5 * (pid == os.getpid()))
    monkeypatch.setattr(report, "environment", lambda gpus: {"gpu": f"{gpus} x NVIDIA H200"})
    for name, value in {"is_available": True, "device_count": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(server_options, "installed", lambda: "0.5.23")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    small, prompts = tmp_path / "small", tmp_path / "prompts.jsonl"
    small.mkdir()
    (small / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    prompts.write_text("\n".join(json.dumps({"input_ids": [n] * 10}) for n in range(1, 6)))

    def run(words: str, gpus: str = "3", gib: int = 139) -> tuple[int, list[str], str, dict]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        there = SimpleNamespace(total_memory=gib * ranks.GIB)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there)
        words = words.replace("SMALL", str(small)).replace("PROMPTS", str(prompts))
        code = main(["bench", *shlex.split(words), "--out", str(tmp_path / "out.json")])
        assert held == [1024, 1024], "every server has ended"
        assert not list(tmp_path.glob("nsa-*")), "and no folder is left behind"
        printed = capsys.readouterr()
        shown = printed.out + "".join(line for line in printed.err.splitlines(True) if line.startswith("not measured"))
        return code, stand_in_bench.Server.seen, shown, json.loads((tmp_path / "out.json").read_text())

    return run


@pytest.mark.parametrize("name", RUNS)
def test_a_run_prints_what_it_is_recorded_to(bench, name, tmp_path):
    code, seen, shown, _ = bench(RUNS[name], "0,1" if "two GPUs" in name else "3")
    assert_printed(name, "\n".join([f"$ bench {RUNS[name]}", *seen, f"exit code {code}", "", shown]), tmp_path)


def test_the_first_row_of_a_server_has_what_it_captured(bench):
    *_, report = bench(RUNS["a rank on one GPU"])
    rows = [row for row in report["rows"] if "ttft_ms" in row]
    told = [(row["side"], row["turn"]) for row in rows if "captures" in row]
    assert sorted(told) == sorted({(row["side"], row["turn"]) for row in rows})
    assert {"what": "target prefill", "seconds": 5.27, "gib": 2.02} in rows[0]["captures"]


def test_a_quick_run_of_captures_starts_no_server_that_compiles(bench):
    def servers(words: str) -> int:
        stand_in_bench.Server.seen.clear()
        _, seen, _, report = bench(f"capture --checkpoint SMALL --batch 48 --sides ours{words}")
        assert len(report["rows"]) == 1
        return sum("starts" in line for line in seen)

    assert (servers(""), servers(" --quick")) == (2, 1)


TOO_SMALL = r"v3.2-tp8 needs \d+\.\d GiB, 82\.3 of them for weights and \d+\.\d for \d+ tokens, .* has 80\.0 GiB"
REFUSED = {
    "serve --checkpoint v3.2-tp8": TOO_SMALL,
    "profile --checkpoint v3.2-tp8": TOO_SMALL,
    "capture --checkpoint v3.2-tp8": TOO_SMALL,
    "serve --checkpoint wide glm-5.2-tp8": "glm-5.2-tp8 fills a GPU and wide shares one: measure them in two",
    "profile --checkpoint wide --sides auto": "--sides is for ranks of released models here",
    "serve --checkpoint v3.2-tp8 --parallel tp2 dp2": "--parallel dp2 is no part of the 8 ranks .*: write tp2, tp4, tp8, dcp2",
    "serve --checkpoint v3.2-tp8 --parallel tp1": "--parallel tp1 is no part of the 8 ranks that --checkpoint v3.2-tp8 is one",
    "serve --checkpoint v3.2-dp8 --parallel tp2": "--parallel tp2 is no part of the 8 ranks .*: write dp2-ep, dp4-ep,",
    "serve --checkpoint v3.2-tp8 --parallel tp2": TOO_SMALL,
    "serve --checkpoint v3.2-tp8 --parallel dcp2 --sides builtin": "dcp2 is nothing that builtin serves.* name ours in",
    "serve --checkpoint SMALL --parallel tp2 dcp2 --sides builtin": "dcp2 is nothing that builtin serves.* name ours in",
    "serve --checkpoint SMALL --server '--tp-size 8'": "--server is for ranks of released models and for --model: name one",
    "serve --checkpoint SMALL --cached 640": "--cached is for ranks of released models: name one of v3.2-tp8",
    "serve --checkpoint narrow --steps 3": "neither faithful or wide or .*or deep or .*v3.2-tp8 or .* nor a folder",
    "serve --checkpoint SMALL --sides ours theirs": "--sides theirs is none: there are ours, builtin, three_graphs, auto",
    "serve --model SMALL --prompts PROMPTS": "has 5 prompts, --batch 32 needs as many",
    "serve --model PROMPTS --prompts PROMPTS": "no folder with a config.json",
    "draft --steps 0": "bench draft measures speculative rounds: --steps must be at least 1",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_measured_ends_before_a_server_starts(bench, words):
    with pytest.raises(SystemExit, match=REFUSED[words]):
        bench(words, gib=80)
    assert stand_in_bench.Server.seen == []


def test_ranks_of_more_gpus_than_there_are_end_before_anything_is_written(bench, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench("serve --checkpoint v3.2-tp8 --parallel tp4", "0,1")
    assert "--parallel tp4 takes 4 GPUs, and torch sees 2" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_a_side_that_cannot_serve_a_deployment_has_no_server_there(bench):
    _, seen, _, report = bench(
        "serve --checkpoint SMALL --parallel tp2 dcp2 --steps 0 --batch 1 --length 300 --samples 1", "0,1"
    )
    assert [line.split(" starts")[0] for line in seen if "starts" in line] == ["ours", "builtin", "ours"]
    assert [(row["parallel"], "builtin" in row) for row in report["rows"]] == [("tp2", True), ("dcp2", False)]


def test_a_pool_without_room_for_a_batch_is_told_and_not_timed(bench, monkeypatch):
    """Its requests would wait for one another, and their rounds be those of a smaller batch."""
    monkeypatch.setattr(stand_in_bench, "POOL", 20_000)
    words = "serve --checkpoint v3.2-tp8 --parallel dcp2 tp2 --sides ours --quick --steps 3 --batch 8 --length 4096 --parts 8"
    code, seen, shown, report = bench(words, "0,1")
    assert code == 0
    assert [row.get("needs_tokens") for row in report["rows"] if "parts" not in row] == [None, 8 * (4096 + 128)]
    assert [row["parallel"] for row in report["rows"] if "parts" in row] == ["dcp2"]
    assert "v3.2-tp8, tp2, N = 3, 8 x 4096, ours: a pool of 20000 tokens has no room for 33792" in shown
    assert sum("8 x 4096" in line for line in seen) == 1 + 3 + 2


@pytest.mark.parametrize("what", ["serve", "profile", "capture"])
def test_another_release_would_serve_another_model(bench, what, monkeypatch):
    from sglang.srt.configs import model_config

    monkeypatch.delattr(model_config, "dsa_layer_skips_topk", raising=False)
    with pytest.raises(SystemExit, match=r"glm-5.2-tp8 has indexers .* SGLang 0.5.17 or newer"):
        bench(f"{what} --checkpoint glm-5.2-tp8")
