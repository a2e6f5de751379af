"""The trained model at a tiny scale on the CPU: it learns, goes on where it stopped, and comes back from its checkpoint."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nsa_backend.benchmarks import faithful_checkpoint, train_checkpoint
from nsa_backend.benchmarks.trained import corpus, distill, export, language
from nsa_backend.benchmarks.trained.model import TrainedModel
from nsa_backend.benchmarks.trained.optimizing import Budget
from nsa_backend.benchmarks.trained.run import Run, Settings, began_with
from nsa_backend.benchmarks.trained.shape import SHAPES, Shape, config

SETTINGS = Settings(
    shape="tiny", seed=5, language=Budget(steps=6), indexer=Budget(steps=4), context=64, long_context=96, long_from=0.6,
    warmup_steps=1, batch_tokens=384, micro_tokens=192, indexer_blocks=2, indexer_rows=24,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The same sums in the same order, whatever else runs on this machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text() -> list[corpus.Document]:
    words = random.Random(0)
    names = ["".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=words.randint(3, 9))) for _ in range(150)]
    lines = [f"    {words.choice(names)} = {words.choice(names)}({words.choice(names)}, {n % 97})\n" for n in range(36_000)]
    files = ["".join(lines[start : start + 600]) for start in range(0, len(lines), 600)]
    return [corpus.Document("a" if n % 3 else "b", Path(f"{n}.py"), file) for n, file in enumerate(files)]


def run_in(folder: Path, text: list[corpus.Document], settings: Settings = SETTINGS):
    said: list[str] = []
    prepared = train_checkpoint.corpus_of(folder, settings, said.append, found=text)
    model = train_checkpoint.model_of(settings, "cpu", said.append)
    return Run(folder, settings, prepared, model, said.append), said


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("run")
    run, _ = run_in(folder, text)
    assert train_checkpoint.train(run)
    return run


def test_losses_fall_and_everything_is_reported(finished):
    language = [row for row in finished.log if row["stage"] == "language"]
    assert [row["context"] for row in language] == [64, 64, 64, 64, 96, 96]
    assert language[-1]["target"] < language[0]["target"]
    assert language[-1]["mtp"] < language[0]["mtp"]
    assert [row["step"] for row in finished.log if row["stage"] == "indexer"] == [1, 2, 3, 4]
    held_out = finished.results["language"]["held_out"]
    assert set(held_out) == {"target", "mtp", "drafts_equal_to_target", "mtp_by_step"}
    assert held_out["mtp"] == held_out["mtp_by_step"][0]
    assert [row["layer"] for row in finished.results["indexer"]["attention_kept"]] == [0, 1, 2]
    assert set(finished.prepared.packages["held_out"]).isdisjoint(finished.prepared.packages["training"])
    assert (finished.folder / "training.json").exists()


def test_a_run_that_is_stopped_goes_on_to_the_same_losses(tmp_path, text, finished):
    for stop_in, at in (("language", 3), ("language", 5), ("indexer", 2)):
        run, _ = run_in(tmp_path, text)
        run.stop = lambda step, run=run, stage=stop_in, at=at: run.stage == stage and step == at
        assert not train_checkpoint.train(run)
        assert (run.stage, run.progress.step) == (stop_in, at)
    run, said = run_in(tmp_path, text)
    assert train_checkpoint.train(run)
    assert any("going on in stage indexer after 2 steps" in line for line in said)

    def losses(log: list[dict]) -> list[dict]:
        return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in log]

    assert losses(run.log) == losses(finished.log)
    again, before = (load_file(str(r.folder / "checkpoint" / "model.safetensors")) for r in (run, finished))
    assert all(torch.equal(again[name], before[name]) for name in before)


def test_a_bound_on_everything_leaves_the_language_stage_what_is_left(finished):
    settings = Settings(indexer=Budget(seconds=60))
    found = train_checkpoint.settings_within(400, settings, None)
    assert found == replace(settings, language=Budget(seconds=400 - 60 - train_checkpoint.ENDING))
    before = began_with(finished.folder)
    assert before == SETTINGS
    assert train_checkpoint.settings_within(10, settings, before).language == SETTINGS.language
    assert began_with(finished.folder / "corpus") is None
    with pytest.raises(SystemExit, match="leaves -30 s for the language stage"):
        train_checkpoint.settings_within(50, settings, None)


def test_warming_up_changes_no_weight(finished):
    before = {name: value.clone() for name, value in finished.model.state_dict().items()}
    said = []
    language.warm_up(finished.model, SETTINGS, said.append)
    assert all(torch.equal(value, before[name]) for name, value in finished.model.state_dict().items())
    assert all(p.grad is None for p in finished.model.parameters())
    assert [line.split(":")[0] for line in said] == ["3 x 64", "3 x 64", "2 x 96", "2 x 96"]


def test_every_step_of_drafting_takes_the_state_of_the_step_before_and_the_next_token():
    model = TrainedModel(SHAPES["tiny"], torch.float32, mtp_depth=3)
    model.initialize(1)
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(2))
    rows = 24 - 4
    state, expected = model.hidden(ids[:, :rows]), []
    for step in range(3):
        state = model.mtp_hidden(ids[:, step + 1 : step + 1 + rows], state)
        scores = model.lm_head(state).log_softmax(-1)
        predicted = ids[:, step + 2 : step + 2 + rows]
        expected.append(-scores.gather(-1, predicted[..., None]).mean())
    target, drafted = model.losses(ids)
    assert float(drafted) == pytest.approx(float(sum(expected)) / 3, rel=1e-5)
    assert float(target) == pytest.approx(float(model.losses_by_depth(ids[:, :-2], 1)[0]), rel=1e-5)
    assert len({round(float(loss), 6) for loss in expected}) == 3


def test_a_model_trained_for_three_draft_steps_is_better_at_the_third(tmp_path_factory, text):
    by_step = {}
    for depth in (1, 3):
        settings = replace(SETTINGS, mtp_depth=depth, mtp_weight=1.0, language=Budget(steps=60), indexer=Budget(steps=1))
        run, _ = run_in(tmp_path_factory.mktemp(f"depth{depth}"), text, settings)
        assert train_checkpoint.train(run)
        by_step[depth] = run.results["language"]["held_out"]["mtp_by_step"]
    assert by_step[3][2] < by_step[1][2]


def test_other_settings_do_not_go_on(finished, text):
    run, _ = run_in(finished.folder, text, replace(SETTINGS, seed=6))
    with pytest.raises(ValueError, match=r"other settings \(seed: 5 then, 6 now\)"):
        train_checkpoint.train(run)


def test_the_indexers_learn_where_attention_looks_and_nothing_else_changes(finished):
    model = TrainedModel(SHAPES["tiny"], torch.float32)
    model.load_state_dict(finished.model.state_dict())
    with torch.no_grad():  # attention as sharp as a trained one's
        for layer in model.model.layers:
            layer.self_attn.q_b_proj.weight *= 20
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run, _ = run_in(finished.folder, [])
    run.model, run.stage = model, "indexer"
    run.settings = replace(SETTINGS, indexer=Budget(steps=120))
    assert distill.train_indexers(run, [])
    losses = [row["kl"] for row in run.log]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".indexer." in name for name in changed)


def test_the_checkpoint_has_the_names_and_fields_of_one_that_sglang_serves(finished):
    shape = faithful_checkpoint.Shape(hidden=64, heads=2, layers=2, experts=4, expert_dim=32)
    served = set(faithful_checkpoint.checkpoint(0, shape))
    dense = {name.format(layer) for layer in (0, 1) for name in DENSE}
    moe = {name for name in served if name.startswith(("model.layers.0.mlp.", "model.layers.1.mlp."))}
    assert set(export.tensors(finished.model)) == (served - moe) | dense
    assert set(config(SHAPES["small"])) == set(faithful_checkpoint.config(shape))


DENSE = [f"model.layers.{{}}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]


def test_the_checkpoint_comes_back(finished):
    loaded = export.load(finished.folder / "checkpoint", "cpu", torch.float32)
    ids = torch.randint(0, 512, (1, 66), generator=torch.Generator().manual_seed(1))
    assert loaded.shape == SHAPES["tiny"]
    for found, expected in zip(loaded.losses(ids), finished.model.losses(ids), strict=True):
        assert float(found) == pytest.approx(float(expected), rel=1e-3)  # weights rounded to bfloat16
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        export.load(finished.folder, "cpu")


def test_shapes_that_sglang_would_misread_are_refused():
    with pytest.raises(ValueError, match="layers must be at least 2"):
        Shape(layers=1)
    with pytest.raises(ValueError, match="must be a multiple of expert_dim"):
        Shape(mlp=2500)
