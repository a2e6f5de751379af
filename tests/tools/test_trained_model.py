"""The trained model at a tiny scale on the CPU: it learns, goes on where it stopped, and comes back from its checkpoint."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nsa_backend.benchmarks import faithful_checkpoint, train_checkpoint
from nsa_backend.benchmarks.trained import corpus, distill, export, indexer, simulate
from nsa_backend.benchmarks.trained.accept import statistics
from nsa_backend.benchmarks.trained.model import TrainedModel
from nsa_backend.benchmarks.trained.optimizing import Budget
from nsa_backend.benchmarks.trained.run import Settings
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
    run = train_checkpoint.begin(folder, settings, "cpu", said.append, found=text)
    return run, said


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
    assert set(finished.results["language"]["held_out"]) == {"target", "mtp", "drafts_equal_to_target"}
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


def sharp_model(seed: int = 0) -> TrainedModel:
    model = TrainedModel(SHAPES["tiny"], torch.float32)
    model.initialize(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 6
    return model.requires_grad_(False)


def test_sparse_attention_is_dense_attention_where_everything_is_selected():
    model = sharp_model()
    ids = torch.randint(0, 512, (1, 40), generator=torch.Generator().manual_seed(2))
    dense = model.hidden(ids)
    wide = TrainedModel(replace(SHAPES["tiny"], index_topk=39), torch.float32)
    wide.load_state_dict(model.state_dict())
    torch.testing.assert_close(wide.hidden(ids, sparse=True)[:, :39], dense[:, :39])
    narrow = model.hidden(ids, sparse=True)
    torch.testing.assert_close(narrow[:, :16], dense[:, :16])  # index_topk of this shape
    assert not torch.allclose(narrow[:, 20:], dense[:, 20:], atol=1e-3)


def test_selection_takes_the_best_of_what_a_row_sees():
    scores = torch.tensor([[[9.0, 1.0, 5.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0, 5.0]]])
    found = indexer.selected(scores, torch.tensor([2, 4]), 2)
    assert found.tolist() == [[[True, False, True, False, False], [False, False, False, True, True]]]
    assert indexer.selected(scores, torch.tensor([0, 1]), 3)[0].sum(-1).tolist() == [1, 2]


def test_the_divergence_is_zero_for_the_right_scores_alone():
    rows = torch.tensor([1, 3])
    q, k = (torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    shares = indexer.attention_shares(q, k, rows, 0.5)
    expected = (q @ k.mT * 0.5).masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -torch.inf).softmax(-1).mean(1)
    torch.testing.assert_close(shares, expected[:, rows])
    assert float(indexer.divergence(shares, shares.clamp_min(1e-30).log(), rows)) == pytest.approx(0, abs=1e-6)
    other = indexer.attention_shares(k, q, rows, 0.5).clamp_min(1e-30).log()
    visible = shares > 0
    by_hand = (shares[visible] * (shares[visible].log() - other[visible])).sum() / 2
    assert float(indexer.divergence(shares, other, rows)) == pytest.approx(float(by_hand), rel=1e-4)


def greedy(model: TrainedModel, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model.lm_head(model.hidden(torch.tensor([ids]))[:, -1]).argmax()))
    return ids[len(prompt) :]


def test_drafts_are_followed_round_by_round():
    """With step by step drafting written out a second time, from nothing but the definition of the MTP layer."""
    model = sharp_model(4)
    model.shape = replace(model.shape, index_topk=200)
    prompt, steps = [7, 3, 200, 9, 411], 3
    output = greedy(model, prompt, 40)
    tokens, counts, length = prompt + output, [0] * (steps + 1), len(prompt)
    while length + steps < len(tokens):
        states = list(model.hidden(torch.tensor([tokens[:length]]))[0])
        inputs, right = tokens[1 : length + 1], 0
        for step in range(steps):
            out = model.mtp_hidden(torch.tensor([inputs]), torch.stack(states)[None])[0, -1]
            draft = int(model.lm_head(out).argmax())
            if draft != tokens[length + 1 + step]:
                break
            right, inputs, states = right + 1, [*inputs, draft], [*states, out]
        counts[right] += 1
        length += right + 1
    assert simulate.accepted(model, prompt, output, steps, "ours") == counts
    with pytest.raises(ValueError, match="beyond 30 the indexer selects"):
        model.shape = replace(model.shape, index_topk=30)
        simulate.accepted(model, prompt, output, steps, "ours")


def test_what_a_draft_step_sees_by_side():
    def seen(side: str) -> list[list[int]]:
        mask = simulate._mask(3, 1, simulate.VISIBLE[side])[0, 0].int().tolist()
        assert mask[:3] == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
        return mask[3:]

    assert seen("ours") == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert seen("shared") == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]
    assert seen("builtin") == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]


def test_accept_lengths_have_standard_errors_over_requests():
    found = statistics([[1, 1, 2], [4, 0, 0]])
    assert found["histogram"] == [5, 1, 2]
    assert found["accept"] == pytest.approx((5 + 2 + 6) / 8, abs=1e-4)
    assert found["accepted"] == [0.375, 0.25]
    assert found["accepted_if_reached"] == [0.375, 0.6667]
    deviations = (9 - 1.625 * 4, 4 - 1.625 * 4)
    assert found["standard_error"] == pytest.approx((2 * sum(d * d for d in deviations)) ** 0.5 / 8, abs=1e-4)
    assert statistics([[1, 1]])["standard_error"] is None
