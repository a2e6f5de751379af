"""What asks FlashInfer's filters for every token gets every token."""

from __future__ import annotations

import numpy as np
import pytest
from top_p_filters import bisecting, radix

from nsa_backend.kernels.round_tensors import KEEP_ALL_TOP_P

ROWS, VOCABULARY = 12, 2048


def row_of(scale: float, rng: np.random.Generator, top_k: int = VOCABULARY) -> np.ndarray:
    """Probabilities of random logits, of the `top_k` likeliest tokens alone."""
    logits = rng.standard_normal(VOCABULARY).astype(np.float32) * np.float32(scale)
    weights = np.exp(logits - logits.max())
    weights[np.argsort(-weights)[top_k:]] = 0
    return weights / weights.sum(dtype=np.float32)


@pytest.mark.parametrize("top_k", [1, 3, 20, VOCABULARY])
@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 20.0, 60.0])
def test_all_tokens_stay(scale, top_k):
    rng = np.random.default_rng(3)
    for _ in range(ROWS):
        row = row_of(scale, rng, top_k)
        possible = row > 0
        assert radix(row, KEEP_ALL_TOP_P, rng)[possible].all()
        assert bisecting(row, KEEP_ALL_TOP_P)[possible].all()


def test_top_p_1_loses_some():
    """In flat rows enough to be seen: of 400 tokens sampled by the same coins about five differ from those of no filter."""
    rng = np.random.default_rng(1)
    rows = [row_of(0.5, rng) for _ in range(40)]
    lost = [float(row[~radix(row, 1.0, rng)].sum()) for row in rows]
    assert max(lost) > 1e-4


def test_top_p_1_loses_much_of_few_tokens():
    """Of the twenty likeliest tokens two that are nearly as likely as one another may be one step of a pass."""
    rng = np.random.default_rng(7)
    rows = [row_of(0.5, rng, 20) for _ in range(200)]
    lost = [float(row[~radix(row, 1.0, rng)].sum()) for row in rows]
    assert max(lost) > 0.01
    assert np.mean(lost) < 0.01


@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.95])
def test_the_stand_ins_filter(top_p):
    """Both keep the fewest of the likeliest tokens that reach top-p."""
    rng = np.random.default_rng(5)
    row = row_of(2.0, rng)
    order = np.argsort(-row)
    before = np.cumsum(row[order]) - row[order]
    kept = np.zeros(len(row), dtype=bool)
    kept[order[before < top_p]] = True
    assert (radix(row, top_p, rng) == kept).all()
    assert (bisecting(row, top_p) == kept).all()
