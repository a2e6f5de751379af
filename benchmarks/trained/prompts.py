"""Prompts out of packages that the model was not trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nsa_backend.benchmarks.trained.tokens import Prepared


def windows(ids: np.ndarray, ends: np.ndarray, length: int, count: int, seed: int = 0, first: int = 0) -> list[list[int]]:
    """`count` different stretches of `length` tokens, each within one document, from anywhere in it.

    Args:
        ids: documents one after the other, each followed by an end token.
        ends: where each document ends, its end token included.
        length: tokens of a prompt.
        count: how many; stretches may overlap.
        seed: the same seed and length give the same prompts, the first ones also for another count.
        first: how many of them to leave out at the start.

    Raises:
        ValueError: no document is long enough.
    """
    starts = np.concatenate([[0], ends[:-1]])
    places = np.maximum(ends - 1 - starts - length + 1, 0)  # first tokens that a stretch may have, by document
    if places.sum() < count:
        raise ValueError(
            f"the held-out text has {places.sum()} stretches of {length} tokens, {count} are wanted: hold out more"
        )
    below, generator = np.cumsum(places), np.random.default_rng([seed, length])
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        chosen[int(generator.integers(below[-1]))] = None
    found = []
    for place in list(chosen)[first:]:
        document = int(np.searchsorted(below, place, side="right"))
        start = int(starts[document]) + place - int(below[document - 1] if document else 0)
        found.append(ids[start : start + length].tolist())
    return found


def held_out_prompts(folder: Path, length: int, count: int, seed: int = 0, first: int = 0) -> list[list[int]]:
    """Prompts of the training run in `folder`."""
    prepared = Prepared(folder / "corpus")
    if not prepared.done:
        raise FileNotFoundError(f"{prepared.folder} has no corpus: pass the folder that train_checkpoint wrote to")
    return windows(prepared.load("held_out"), np.asarray(prepared.load("held_out_ends")), length, count, seed, first)
