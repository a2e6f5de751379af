"""Log-probabilities that a server tells of the tokens it has chosen: whose they are, and how far two sides are apart."""

from __future__ import annotations

from statistics import fmean

MOST_APART, MOST_OF_ONE = 0.05, 1.0
"""Distances of two sides that may still be rounding, in the mean and of any token: guesses, until a run has measured them."""


def told(answers: list[dict]) -> list[list[float]]:
    """Of each answer, those of its tokens.

    Raises:
        RuntimeError: they are of other tokens, or of more or fewer.
    """
    found = []
    for answer in answers:
        pairs = answer["meta_info"]["output_token_logprobs"]
        if [pair[1] for pair in pairs] != answer["output_ids"]:
            raise RuntimeError(f"log-probabilities of {len(pairs)} tokens are not those of {len(answer['output_ids'])}")
        found.append([pair[0] for pair in pairs])
    return found


def apart(one: dict, other: dict) -> dict:
    """How far two sides are apart on a workload, where both have chosen the same tokens so far.

    `positions` were compared; `mean` and `largest` are of the distances.
    """
    distances = []
    for ids, others, mine, theirs in zip(
        one["output_ids"], other["output_ids"], one["logprobs"], other["logprobs"], strict=True
    ):
        for token, its, here, there in zip(ids, others, mine, theirs, strict=True):
            if token != its:
                break
            distances.append(abs(here - there))
    if not distances:
        return {"positions": 0, "mean": None, "largest": None}
    return {"positions": len(distances), "mean": round(fmean(distances), 5), "largest": round(max(distances), 5)}


def far_apart(row: dict) -> list[str]:
    """Sentences about a report's row whose log-probabilities are not those of both sides."""
    bad = []
    for workload, found in row.get("logprobs", {}).items():
        if not found["positions"]:
            bad.append(f"{row['case']}, {workload}: no log-probability could be compared, for no request has a token in common")
        elif found["mean"] > MOST_APART or found["largest"] > MOST_OF_ONE:
            said = f"{found['mean']} apart in the mean and {found['largest']} at most"
            bad.append(f"{row['case']}, {workload}: log-probabilities are {said}, above {MOST_APART} or {MOST_OF_ONE}")
    return bad
