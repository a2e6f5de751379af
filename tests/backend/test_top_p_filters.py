"""What asks FlashInfer's filters for every token gets every token."""

from __future__ import annotations

import numpy as np
import pytest
from top_p_filters import bisecting, radix

from nsa_backend.kernels.round_sampling import KEEP_ALL_TOP_P

ROWS = 12


def row_of(scale: float, rng: np.random.Generator) -> np.ndarray:
    logits = rng.standard_normal(2048).astype(np.float32) * np.float32(scale)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum(dtype=np.float32)


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 20.0, 60.0])
def test_all_tokens_stay(scale):
    rng = np.random.default_rng(3)
    for _ in range(ROWS):
        row = row_of(scale, rng)
        possible = row > 0
        assert radix(row, KEEP_ALL_TOP_P, rng)[possible].all()
        assert bisecting(row, KEEP_ALL_TOP_P)[possible].all()


def test_top_p_1_loses_some():
    """In flat rows enough to be seen: of 400 tokens sampled by the same coins about five differ from those of no filter."""
    rng = np.random.default_rng(1)
    rows = [row_of(0.5, rng) for _ in range(40)]
    lost = [float(row[~radix(row, 1.0, rng)].sum()) for row in rows]
    assert max(lost) > 1e-4


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
