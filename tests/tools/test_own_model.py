"""A user's checkpoint and prompts: what a prompt file may hold, and what accept lengths are told from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from nsa_backend.benchmarks.reports.accept import paired, statistics
from nsa_backend.benchmarks.servers import prompt_file

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
