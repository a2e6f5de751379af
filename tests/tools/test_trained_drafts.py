"""Selections and drafts of a trained model: dense and sparse attention, what each side shows a draft step, accept lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa_backend.benchmarks.trained import indexer, simulate
from nsa_backend.benchmarks.trained.accept import paired, statistics
from nsa_backend.benchmarks.trained.model import TrainedModel
from nsa_backend.benchmarks.trained.optimizing import Budget
from nsa_backend.benchmarks.trained.run import Settings
from nsa_backend.benchmarks.trained.shape import SHAPES

SETTINGS = Settings(
    shape="tiny", seed=5, language=Budget(steps=6), indexer=Budget(steps=4), context=64, long_context=96, long_from=0.6,
    warmup_steps=1, batch_tokens=384, micro_tokens=192, indexer_blocks=2, indexer_rows=24,
)  # fmt: skip


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


def test_a_gain_is_known_better_than_either_side():
    easy = [10 * n for n in range(1, 9)]
    ours, builtin = [[50, n] for n in easy], [[60, n] for n in easy]
    found = paired(ours, builtin)
    accept = [statistics(one)["accept"] for one in (ours, builtin)]
    assert found["ratio"] == pytest.approx(accept[0] / accept[1], abs=1e-3)
    assert found["standard_error"] < 0.3 * statistics(ours)["standard_error"] / accept[1]
    assert paired(ours, ours) == {"ratio": 1.0, "standard_error": 0.0}
    assert paired(ours[:1], ours[:1])["standard_error"] is None
