"""Accept lengths with their standard errors, out of SGLang's histograms of correct drafts."""

from __future__ import annotations

import math
from itertools import pairwise, zip_longest

from nsa_backend.benchmarks.bench_common import accept_length


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
    accept, rounds, n = accept_length(total), sum(total), len(histograms)
    squares = 0.0
    for histogram in histograms:
        tokens = sum((drafts + 1) * count for drafts, count in enumerate(histogram))
        squares += (tokens - accept * sum(histogram)) ** 2
    error = math.sqrt(n / (n - 1) * squares) / rounds if n > 1 else math.inf
    at_least = [sum(total[drafts:]) for drafts in range(len(total))]
    return {
        "accept": round(accept, 4),
        "standard_error": round(error, 4) if math.isfinite(error) else None,
        "accepted": [round(count / rounds, 4) for count in at_least[1:]],
        "accepted_if_reached": [round(count / before, 4) if before else None for before, count in pairwise(at_least)],
        "histogram": total,
    }
