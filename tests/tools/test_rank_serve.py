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
from nsa_backend.benchmarks.commands import crowd, rank_serve, serve, vllm_rank
from nsa_backend.benchmarks.reports import rank_show
from nsa_backend.benchmarks.reports.rank_rows import by_cell
from nsa_backend.benchmarks.servers import server, sides
from nsa_backend.benchmarks.servers.parallel import ALL_REDUCE, ONE_GPU, Parallel, parsed
from nsa_backend.benchmarks.servers.stages import stages
from nsa_backend.cli.bench import add_arguments

PLANS = Path(lanes.__file__).parent / "plans"
PLANNED = [
    pytest.param(words, id=f"{path.stem} {job.name}")
    for path in sorted(PLANS.glob("ranks_*.json"))
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


@pytest.fixture
def two_h200s(monkeypatch):
    """Returns a function of a command's words to the cells that it measures on two H200s."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=139 * ranks.GIB))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with ExitStack() as resources:
        yield lambda words: serve.cells(parser.parse_args(words), resources)


def test_the_plan_of_two_ranks_measures_divided_kv_first(two_h200s):
    """A run that is cut has the number that the plan is for: ours with divided KV over ours without."""
    (job,) = (job for job in lanes.plan(PLANS / "context_two_gpus.json") if job.name == "ranks")
    found = [cell.name for cell in two_h200s(shlex.split(job.command)[4:])]
    shapes = ("1 x 300", "8 x 300", "1 x 4096", "1 x 32768", "8 x 4096", "8 x 32768")
    of_stage = [*shapes, *(f"{shape} by part" for shape in shapes)]
    stages = ("dcp2", "auto"), ("tp2", "auto"), ("tp2", "builtin")
    assert found == [f"v3.2-tp8, {where}, N = 3, {shape}, {side} on 2,5" for where, side in stages for shape in of_stage]


def test_a_rank_of_fewer_layers_fits_a_smaller_gpu(two_h200s, monkeypatch):
    """All layers of V3.2 need 87 GB of an H100's 80; 16 prompts of 128K fit 20 of them where two ranks divide their KV."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=79 * ranks.GIB))
    asked = "serve --parallel tp2 dcp2 --sides ours --steps 3 --batch 16 --length 131072 --checkpoint v3.2-tp8"
    with pytest.raises(SystemExit, match=r"--checkpoint v3.2-tp8 needs .* take fewer or shorter prompts, or a larger GPU"):
        two_h200s(shlex.split(asked))
    found = two_h200s(shlex.split(f"{asked}-20-layers --quick"))
    assert [(cell.name, cell.section) for cell in found] == [
        ("v3.2-tp8-20-layers, dcp2, N = 3, 16 x 131072, ours on 2,5", "rows"),
        ("v3.2-tp8-20-layers, tp2, 16 x 131072 does not fit", "left_out"),
    ]
    whole, part = (ranks.named(name).config for name in ("v3.2-tp8", "v3.2-tp8-20-layers"))
    assert part == whole | {"num_hidden_layers": 20}
    assert ranks.named("v3.2-tp8-layers") is None
    with pytest.raises(SystemExit, match=r"--checkpoint v3.2-tp8-62-layers has more layers than v3.2-tp8, which has 61"):
        two_h200s(shlex.split(f"{asked}-62-layers"))


def test_divided_kv_has_room_for_what_a_rank_has_not(two_h200s):
    """32 prompts of 32768 tokens: 80 GiB of KV where every rank has all of it, 45 where two divide the target's."""
    found = two_h200s(
        shlex.split("serve --checkpoint v3.2-tp8 --parallel tp2 dcp2 --sides ours --steps 3 --batch 8 32 --length 32768")
    )
    assert [cell.name for cell in found if cell.section == "left_out"] == ["v3.2-tp8, tp2, 32 x 32768 does not fit"]
    assert any(cell.name.startswith("v3.2-tp8, dcp2, N = 3, 32 x 32768, ours on") for cell in found)
    config = ranks.RANKS["v3.2-tp8"].config
    assert ranks.kv_bytes_a_token(config) == 62 * (1152 + 132)
    assert ranks.kv_bytes_a_token(config, 2) == 61 * 1152 / 2 + 1152 + 62 * 132
    of_query, of_latent = 32 * 192, 32 * 128 * 512  # of two ranks: rows of q_b_proj, values of w_kc
    copies = of_query * 1536 + 4 * (of_query // 128) * 12 + 2 * of_latent
    assert ranks.weight_bytes(config, 2) - ranks.weight_bytes(config) == 62 * copies


def test_ranks_of_dp_attention_share_the_requests(two_h200s):
    """128 prompts of 4096 tokens are too many for a GPU, and half of them fit each of two."""
    asked = "serve --checkpoint v3.2-dp8 --quick --sides auto --steps 3 --length 4096 --batch"
    two = [cell.name for cell in two_h200s(shlex.split(f"{asked} 64 --parallel dp2-ep"))]
    assert two == ["v3.2-dp8, dp2-ep, N = 3, 64 x 4096, auto on 2,5"]
    more, least = (ranks.needed_bytes("v3.2-dp8", requests * (4096 + 513) + 16384) / ranks.GIB for requests in (128, 64))
    assert least < 139 < more
    assert [cell.section for cell in two_h200s(shlex.split(f"{asked} 128 --parallel dp2-ep"))] == ["rows"]
    of_eight, alone = (SimpleNamespace(parallel=parsed(word)) for word in ("dp8-ep", "tp8"))
    assert 8 * rank_serve.pool_needed(of_eight, 256, 4096, 64) == rank_serve.pool_needed(alone, 256, 4096, 64)


@pytest.mark.parametrize("sides", [("auto",), ("ours", "auto")])
def test_a_divided_context_is_told_over_ours_undivided(capsys, sides):
    """Over `ours` where that ran, else over the side itself."""
    cell = {"checkpoint": "v3.2-tp8", "steps": 3, "batch": 1, "length": 300, "pool_tokens": 9}
    times = {("dcp2", "ours"): 13.0, ("dcp2", "auto"): 12.0, ("tp2", "ours"): 8.0, ("tp2", "auto"): 10.0}
    rank_show.show([
        cell | {"parallel": where, "side": side} | {key: {"median": ms, "min_max": [ms, ms]} for key in ("round_ms", "ttft_ms")}
        for (where, side), ms in times.items()
        if side in sides
    ])  # fmt: skip
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "dcp2" in line and "auto" in line]
    assert ("1.500" if "ours" in sides else "1.200") in line


def test_ranks_that_divide_a_context_leave_more_of_a_gpu_to_prefills():
    """A chunk has the queries and the parts of all heads there."""
    left = [1 - float(rank_serve.alone(100 * ranks.GIB, count)[1]) for count in (1, 2, 8)]
    assert left == pytest.approx([0.11, 0.12, 0.15], abs=0.005)


def test_ranks_alone_choose_their_kv_cache(two_h200s):
    found = two_h200s(shlex.split("serve --checkpoint v3.2-tp8 --quick --kv fp8_e4m3 --sides ours --steps 3 --batch 8"))
    assert [cell.name for cell in found] == ["v3.2-tp8, fp8_e4m3 KV, N = 3, 8 x 300, ours on 2"]
    with pytest.raises(SystemExit, match="--kv fp8 is none: there are bfloat16, fp8_e4m3"):
        two_h200s(shlex.split("serve --checkpoint v3.2-tp8 --kv fp8 --batch 8"))
    with pytest.raises(SystemExit, match="--kv is for ranks of released models: name one of"):
        two_h200s(shlex.split("serve --checkpoint faithful --kv fp8_e4m3"))


def test_ranks_of_one_server_sum_up_through_nccl_or_as_sglang_has_it(two_h200s):
    words = "serve --checkpoint v3.2-tp8 --quick --parallel tp2 --sides ours --steps 3 --batch 8"
    found = {way: two_h200s([*shlex.split(words), *way])[0].name for way in ((), ("--all-reduce", "sglang"))}
    assert list(found.values()) == [
        "v3.2-tp8, tp2, N = 3, 8 x 300, ours on 2,5",
        "v3.2-tp8, tp2, SGLang's all-reduce, N = 3, 8 x 300, ours on 2,5",
    ]
    nccl, sglangs = (set(sides.options_for([(8, 300)], 128, Parallel(tp=2), all_reduce=way)) for way in ALL_REDUCE)
    assert nccl - sglangs == {"--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"}
    with pytest.raises(SystemExit, match="--all-reduce ring is none: there are nccl, sglang"):
        two_h200s([*shlex.split(words), "--all-reduce", "ring"])
    with pytest.raises(SystemExit, match="--all-reduce sglang is between ranks of one server, and each has one"):
        two_h200s(shlex.split("serve --checkpoint v3.2-tp8 --quick --all-reduce sglang"))
    with pytest.raises(SystemExit, match="--all-reduce is for ranks of released models: name one of"):
        two_h200s(shlex.split("serve --checkpoint faithful --all-reduce sglang"))


def test_rows_of_both_ways_are_apart():
    row = {"checkpoint": "v3.2-tp8", "steps": 3, "batch": 1, "length": 300, "parallel": "tp8", "side": "ours"}
    nccl, sglangs = by_cell([row, row | {"all_reduce": "sglang"}])
    assert (nccl.name, sglangs.name) == ("v3.2-tp8, tp8", "v3.2-tp8, tp8, SGLang's all-reduce")


def test_stages_of_several_gpus_are_one_server_each_and_turn_around():
    two, four = Parallel(tp=2), Parallel(dcp=4)
    found = stages([(two, ["ours", "builtin"]), (four, ["ours"])], ["0", "1", "2", "3"], 2)
    assert [(turn, str(stage.parallel), str(stage)) for turn, stage in found] == [
        (0, "tp2", "ours on 0,1"),
        (0, "tp2", "builtin on 0,1"),
        (0, "dcp4", "ours on 0,1,2,3"),
        (1, "dcp4", "ours on 0,1,2,3"),
        (1, "tp2", "builtin on 0,1"),
        (1, "tp2", "ours on 0,1"),
    ]
    alone = stages([(ONE_GPU, ["ours", "builtin", "auto"])], ["0", "1"], 2)
    assert [str(stage) for _, stage in alone] == [
        "ours on 0 and builtin on 1",
        "auto on 0",
        "auto on 0 and builtin on 1",
        "ours on 0",
    ]


def test_divided_kv_is_told_over_ours_of_as_many_gpus(capsys):
    def row(parallel, side, ms, pool):
        spread = {"median": ms, "min_max": [ms, ms]}
        shape = {"checkpoint": "v3.2-tp8", "parallel": parallel, "steps": 3, "batch": 8, "length": 4096, "side": side}
        return shape | {"round_ms": spread, "ttft_ms": spread, "pool_tokens": pool}

    rows = [row("tp2", "ours", 20.0, 600), row("tp2", "builtin", 25.0, 600), row("dcp2", "ours", 22.0, 1100)]
    rank_show.show([*rows, row("dcp4", "ours", 30.0, 1900)])
    lines = [[word.strip() for word in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    told = {(line[1], line[4]): (line[6], *line[8:10]) for line in lines if line[1:2] and line[1].startswith("v3.2-tp8, ")}
    assert told == {
        ("v3.2-tp8, tp2", "ours"): ("0.800", "", "600"),
        ("v3.2-tp8, tp2", "builtin"): ("", "", "600"),
        ("v3.2-tp8, dcp2", "ours"): ("", "1.100", "1100"),
        ("v3.2-tp8, dcp4", "ours"): ("", "", "1900"),
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
    rank_show.show([*builtin, *rows])
    assert "1.100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("turns", "warm_after"),
    [
        ([(1, 2, 9), (1, 7, 9), (1, 2.1, 9.5)], 3),  # the short one compiled in the second turn
        ([(1, 2, 9), (1.05, 2.1, 8.5)], 2),
        ([(2.0**turn,) * 3 for turn in range(9)], vllm_rank.WARM_UPS),
    ],
)
def test_vllm_is_warm_once_every_generation_takes_as_long_as_before(turns, warm_after):
    """One that compiles in each of two samples alone made a round negative."""
    took, asked = iter(seconds for turn in turns for seconds in turn), []

    def generate(prompts, tokens):
        asked.append(tokens)
        return next(took), tokens, 1.0

    vllm_rank.Steady(generate, [[2]])
    assert asked == [1, vllm_rank.SHORT, vllm_rank.TOKENS] * warm_after


@pytest.mark.parametrize(
    ("compiles", "round_ms", "repeated"), [((), 11.0, 0), ((7, 9, 10), 11.0, 3), (range(6, 99), pytest.approx(11.0), 24)]
)
def test_a_generation_in_which_vllm_compiled_is_asked_for_again(compiles, round_ms, repeated):
    """Counted from the first warm-up. One that compiles every time is taken as it is, its round with it."""
    calls = iter(range(99))

    def generate(asked, tokens):
        return 0.5 + tokens * 0.011 + (5.0 if next(calls) in compiles else 0.0), tokens, 1.0

    row = vllm_rank.measured(generate, "v3.2-tp8", 0, 1, 300, samples=2)
    assert row["round_ms"]["median"] == round_ms
    assert row["repeated"] == repeated


def test_a_first_token_takes_no_verify_step():
    assert vllm_rank.tokens_a_step([0, 0], 1) == 2
    assert vllm_rank.tokens_a_step([32, 32], 128) == 4


def test_rows_have_what_the_log_says_of_what_is_served(tmp_path, capsys):
    """Once each, of every rank together; what is captured is told elsewhere."""
    log, servers = tmp_path / "log", rank_serve.RankServers(tmp_path, 1, {}, "bfloat16", 1)
    servers._found["few_experts"] = SimpleNamespace(log=log)
    active = "nsa_backend 0.1.0 is active: decode=auto, draft steps=3"
    front = "nsa_backend: the front of 61 of 61 layers is two launches"
    log.write_text(f"""[2026-11-27 03:14:21 TP0] Applied 1 hook(s) to one.of.sglang (from: plugin=nsa_backend)
[2026-11-27 03:14:21 TP0] {front}
[2026-11-27 03:14:21 TP1] {front}
[2026-11-27 03:14:22 TP0] {active}
 20%|##        | 1/5 [00:00<00:01]Capturing[2026-11-27 03:14:23] nsa_backend: captured prefills of [8] tokens whole, in 1.0 s
""")
    assert servers.news("few_experts") == [front, active]
    with log.open("a") as more:
        more.write("[2026-11-27 03:15:00] nsa_backend: experts of up to 4 tokens are")
    assert servers.news("few_experts") == []  # a line that is being written
    with log.open("a") as more:
        more.write(" two launches, 256 experts of 256\n")
    assert servers.news("few_experts") == ["nsa_backend: experts of up to 4 tokens are two launches, 256 experts of 256"]
    assert servers.news("few_experts") == []
    assert capsys.readouterr().out.splitlines()[0] == f"few_experts: {front}"


@pytest.mark.parametrize(("batch", "length", "first_tokens_alone"), [(2, 300, 6), (8, 300, 0), (1, 4096, 0)])
def test_first_tokens_of_few_tokens_have_more_samples(tmp_path, batch, length, first_tokens_alone):
    """Rounds of these wander less, and first tokens of more tokens do."""
    asked, taken = [], iter(range(20, 200, 10))

    def streamed(prompts: list[list[int]], tokens: int) -> server.Streamed:
        asked.append(tokens)
        first = next(taken) / 1e3
        answers = [{"output_ids": [0] * tokens, "meta_info": {}} for _ in prompts]
        return server.Streamed([first] * len(prompts), first + (tokens - 1) / 100, answers)

    servers = rank_serve.RankServers(tmp_path, 1, {}, "bfloat16", 1)
    servers._found["auto"] = SimpleNamespace(log=tmp_path / "log", pool_tokens=lambda: 1 << 20, streamed=streamed)
    (tmp_path / "log").write_text("")
    stage = rank_serve.Stage(ONE_GPU, (("auto", "0"),))
    servers.prepared.key, servers.ready["auto"] = ("v3.2-tp8", 0, 0, stage), 1.0
    (row,) = rank_serve.times(servers, "v3.2-tp8", 0, 0, stage, batch, length, 0, samples=3)
    assert asked == [rank_serve.TOKENS] * 4 + [1] * first_tokens_alone  # the first has warmed the server up
    assert row.get("first_samples", 3) == 3 + first_tokens_alone
    assert row["ttft_ms"]["min_max"] == [30.0, 50.0 + 10 * first_tokens_alone]
    assert row["round_ms"]["median"] == 10.0


class Crowded:
    """A server whose pool two of three requests fill, so that one of them was taken back."""

    def __init__(self, log: Path):
        self.log = log
        log.write_text("")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def wait(self, seconds: float) -> None:
        self.ready = True

    def pool_tokens(self) -> int:
        assert self.ready
        return 250

    def streamed(self, prompts: list[list[int]], tokens: int) -> server.Streamed:
        running = min(len(prompts), 2)
        with self.log.open("a") as log:
            log.write(f"Decode batch, #running-req: {running}, #token: 7\n")
            if running < len(prompts):
                log.write("KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 100\n")
        answers = [{"output_ids": [0] * tokens} for _ in prompts]
        return server.Streamed([2.0 * number for number, _ in enumerate(prompts)], 9.0, answers)


def test_a_crowd_tells_how_many_requests_ran_at_once_and_how_many_were_taken_back(tmp_path, capsys):
    words = [str(tmp_path / "out.json"), "--requests", "3", "--length", "100", "--tokens", "5"]
    rows = crowd.run(crowd.parsed(words), lambda parallel: Crowded(tmp_path / f"{parallel}.log"))
    assert [row["parallel"] for row in rows] == ["dcp2", "tp2"]
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == rows
    told = {name: rows[0][name] for name in ("pool_tokens", "answered_whole", "decoded_at_once", "retracted", "first_token_s")}
    assert told == {
        "pool_tokens": 250,
        "answered_whole": 3,
        "decoded_at_once": 2,
        "retracted": 1,
        "first_token_s": [0.0, 2.0, 4.0],
    }


def test_a_crowd_meets_servers_that_have_no_room_but_their_share(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(crowd, "Server", lambda *words: started.append(words))
    args = crowd.parsed([str(tmp_path / "out.json"), "--checkpoint", "v3.2-tp8-2-layers"])
    for word in args.parallel:
        crowd.start(args, tmp_path, parsed(word))
    assert [words[0] for words in started] == ["auto", "auto"]
    assert [words[words.index("--mem-fraction-static") + 1] for words in started] == ["0.45", "0.45"]
    assert ["--dcp-size" in words for words in started] == [True, False]
    assert not any("--max-total-tokens" in words for words in started)
