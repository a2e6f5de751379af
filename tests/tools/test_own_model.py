"""A user's checkpoint and prompts: what a prompt file may hold, what is asked of servers, what is refused."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from nsa_backend.__main__ import main
from nsa_backend.benchmarks.commands import own_model, serve
from nsa_backend.benchmarks.reports.accept import paired, statistics
from nsa_backend.benchmarks.reports.cells import run_cells
from nsa_backend.benchmarks.servers import prompt_file
from nsa_backend.benchmarks.servers.server import Streamed

TEXTS = ["def function(argument):\n    return argument\n", "plain words, and more of them"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A folder with a config and a tokenizer that transformers loads."""
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v32"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS * 3, 290, show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def written(folder: Path, *lines: object, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_prompts_are_text_or_token_ids(tmp_path, checkpoint):
    path = written(tmp_path, {"input_ids": [5, 6]}, "", *({"text": text} for text in TEXTS))
    first, *texts = prompt_file.read(path, checkpoint)
    assert first == [5, 6]
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert [tokenizer.decode(ids) for ids in texts] == TEXTS
    assert prompt_file.read(written(tmp_path, *TEXTS, name="prompts.txt"), checkpoint)[2] == texts[1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], r"line 1 is no JSON .* name the file .txt"),
        ([{"input_ids": [1]}, {"text": "a", "input_ids": [1]}], "line 2 must be an object with exactly one of"),
        (["[1, 2]"], "line 1 must be an object"),
        ([{"input_ids": ["a"]}], "gives no token ids"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "has no chat template: pass prompts as"),
        ([""], "has no prompt: write one a line"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path, checkpoint, lines, message):
    with pytest.raises(SystemExit, match=message):
        prompt_file.read(written(tmp_path, *lines), checkpoint)


def test_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(SystemExit, match="is no text that can be read"):
        prompt_file.read(tmp_path / "none", tmp_path)
    with pytest.raises(SystemExit, match=r"has no tokenizer .*: pass prompts as"):
        prompt_file.read(written(tmp_path, {"text": "a"}), tmp_path)


class FakeServer:
    """Drafts are accepted by ours alone; the second of a group of prompts answers with half as much."""

    started: ClassVar[list] = []

    def __init__(self, side, checkpoint, port, steps, log, *options):
        self.side, self.steps = side, steps
        self.started.append((side, steps, options))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.started.append(f"{self.side} ends")

    def wait(self, seconds):
        pass

    def streamed(self, prompts, tokens, ignore_eos):
        assert not ignore_eos
        answers = []
        for number, _ in enumerate(prompts):
            new = tokens // (1 + number % 2)
            info = {"completion_tokens": new}
            if self.steps:
                info["spec_correct_drafts_histogram"] = [0, new // 2] if self.side == "ours" else [new, 0]
            answers.append({"meta_info": info})
        return Streamed([0.1] * len(prompts), 1.1 if self.side == "ours" else 2.1, answers)


def options(checkpoint: Path, prompts: Path, **given):
    names = ("model", "prompts", "tokens", "server", "steps", "batch", "port", "checkpoint", "length", "temperature", "top_p")
    known = dict.fromkeys(names)
    return argparse.Namespace(
        **(known | {"model": str(checkpoint), "prompts": str(prompts), "quick": False, "sides": None} | given)
    )


def test_one_side_is_served_after_the_other(tmp_path, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(FakeServer, "started", [])
    monkeypatch.setattr(own_model, "Server", FakeServer)
    path = written(tmp_path, *({"input_ids": [n] * 10} for n in range(1, 6)))
    chosen = options(checkpoint, path, steps=[0, 3], batch=[1, 2], tokens=8, server="--tp-size 8")
    with ExitStack() as resources:
        rows = [row for cell in serve.cells(chosen, resources) for row in cell.measure()]
    events = [event if isinstance(event, str) else event[:2] for event in FakeServer.started]
    assert events == [e for n in (0, 3) for side in ("ours", "builtin") for e in ((side, n), f"{side} ends")]
    assert FakeServer.started[0][2][-2:] == ("--tp-size", "8")
    assert [(r["steps"], r["batch"], r["samples"], r["length"]) for r in rows] == [
        (0, 1, 5, 10), (0, 2, 2, 10), (3, 1, 5, 10), (3, 2, 2, 10),
    ]  # fmt: skip
    last = rows[-1]
    assert last["ours"]["tokens_per_s"]["median"] == pytest.approx((8 + 4) / 1.1, abs=0.1)
    assert last["ours"]["tpot_ms"]["median"] == pytest.approx(1e3 / 7, abs=0.01)
    assert (last["ours"]["accept"], last["builtin"]["accept"]) == (2.0, 1.0)
    assert last["gain"]["ratio"] == 2.0
    assert "gain" not in rows[0]
    serve.show({"rows": rows})
    assert "2.00" in capsys.readouterr().out


def test_a_side_stays_where_the_other_found_no_time(tmp_path, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(FakeServer, "started", [])
    monkeypatch.setattr(own_model, "Server", FakeServer)
    path = written(tmp_path, *({"input_ids": [n] * 10} for n in range(1, 6)))
    with ExitStack() as resources:
        found = serve.cells(options(checkpoint, path, steps=[3], batch=[1, 2], tokens=8), resources)
        report = run_cells(found, 0.0, lambda report: None)
    assert [event[0] for event in FakeServer.started if isinstance(event, tuple)] == ["ours"]
    assert report["not_measured"] == ["checkpoint, N = 3, builtin"]
    assert [(row["batch"], row["ours"]["accept"], row["samples"]) for row in report["rows"]] == [(1, 2.0, 5), (2, 2.0, 2)]
    assert not {"builtin", "gain", "ratio", "speedup"} & set(report["rows"][0])
    serve.show(report)
    shown = capsys.readouterr().out
    assert "ours" in shown
    assert "builtin" not in shown


def test_too_few_prompts_are_refused(tmp_path, checkpoint):
    path = written(tmp_path, {"input_ids": [1]})
    with ExitStack() as resources, pytest.raises(SystemExit, match="has 1 prompts, --batch 32 needs as many"):
        serve.cells(options(checkpoint, path), resources)
    with ExitStack() as resources, pytest.raises(SystemExit, match=r"no folder with a config.json"):
        serve.cells(options(tmp_path, path), resources)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompts", "x"], "--prompts says how --model is measured: pass --model FOLDER too"),
        (["--model", "x"], "--model needs --prompts FILE"),
        (["--model", "x", "--prompts", "y", "--length", "300"], "--length does not go with --model"),
        (["--model", "x", "--prompts", "y", "--quick"], "--quick does not go with --model, whose prompts come from --prompts"),
        (
            ["--model", "x", "--prompts", "y", "--parallel", "tp8"],
            "--parallel does not go with --model, whose GPUs --server names",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "serve", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_accept_lengths_have_standard_errors_over_requests():
    found = statistics([[1, 1, 2], [4, 0, 0]])
    assert found["histogram"] == [5, 1, 2]
    assert found["accept"] == pytest.approx((5 + 2 + 6) / 8, abs=1e-4)
    assert found["accepted"] == [0.375, 0.25]
    assert found["accepted_if_reached"] == [0.375, 0.6667]
    deviations = (9 - 1.625 * 4, 4 - 1.625 * 4)
    assert found["standard_error"] == pytest.approx((2 * sum(d * d for d in deviations)) ** 0.5 / 8, abs=1e-4)
    assert statistics([[1, 1]])["standard_error"] is None


def test_a_gain_is_known_better_than_either_side():
    easy = [10 * n for n in range(1, 9)]
    ours, builtin = [[50, n] for n in easy], [[60, n] for n in easy]
    found = paired(ours, builtin)
    accept = [statistics(one)["accept"] for one in (ours, builtin)]
    assert found["ratio"] == pytest.approx(accept[0] / accept[1], abs=1e-3)
    assert found["standard_error"] < 0.3 * statistics(ours)["standard_error"] / accept[1]
    assert paired(ours, ours) == {"ratio": 1.0, "standard_error": 0.0}
    assert paired(ours[:1], ours[:1])["standard_error"] is None
