"""Accept lengths with their standard errors, out of SGLang's histograms of correct drafts."""

from __future__ import annotations

import math
from itertools import pairwise, zip_longest

from nsa_backend.benchmarks.servers.generation import accept_length


def statistics(histograms: list[list[int]]) -> dict:
    """Accept length, its standard error over requests, and how often each draft is accepted.

    Args:
        histograms: by request, rounds by correct drafts.

    Returns:
        accept: tokens a round (accepted drafts and the bonus), all requests together.
        standard_error: of that ratio, with requests as the units; infinite below two requests.
        accepted: by draft position, the share of all rounds that accept it.
        accepted_if_reached: the same among the rounds that accept every draft before it.
        histogram: rounds by correct drafts.
    """
    total = [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]
    accept, rounds = accept_length(total), sum(total)
    error = _error(_deviations(histograms))
    at_least = [sum(total[drafts:]) for drafts in range(len(total))]
    return {
        "accept": round(accept, 4),
        "standard_error": round(error, 4) if math.isfinite(error) else None,
        "accepted": [round(count / rounds, 4) for count in at_least[1:]],
        "accepted_if_reached": [round(count / before, 4) if before else None for before, count in pairwise(at_least)],
        "histogram": total,
    }


def paired(ours: list[list[int]], builtin: list[list[int]]) -> dict:
    """Ours over the built-in's accept length on the same prompts, with its standard error.

    A prompt that is easy for one side is easy for the other: the ratio is known better than either accept length.
    """
    sides = [accept_length([sum(counts) for counts in zip_longest(*found, fillvalue=0)]) for found in (ours, builtin)]
    deviations = [[d / accept for d in _deviations(found)] for found, accept in zip((ours, builtin), sides, strict=True)]
    error = _error([a - b for a, b in zip(*deviations, strict=True)])
    ratio = sides[0] / sides[1]
    return {"ratio": round(ratio, 4), "standard_error": round(ratio * error, 4) if math.isfinite(error) else None}


def _deviations(histograms: list[list[int]]) -> list[float]:
    """What each request adds to the error of the accept length of all: they sum up to 0."""
    total = [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]
    accept, rounds = accept_length(total), sum(total)
    found = []
    for histogram in histograms:
        tokens = sum((drafts + 1) * count for drafts, count in enumerate(histogram))
        found.append((tokens - accept * sum(histogram)) / rounds)
    return found


def _error(deviations: list[float]) -> float:
    """Standard error of a ratio with these deviations, requests being the units; infinite below two."""
    n = len(deviations)
    return math.sqrt(n / (n - 1) * sum(d * d for d in deviations)) if n > 1 else math.inf
