"""A wave of prompts as requests over HTTP: all of them in one, or each in its own where they choose their DP ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

RANK = "routed_dp_rank"
"""What SGLang calls the rank that a request chooses; one for all requests of a batch."""


def generate(
    ask: Callable[[dict], Any], wave: list[list[int]], sampling: dict | list[dict], ranks: list[int] | None = None
) -> list[dict]:
    """Answers in the order of the prompts.

    Args:
        ask: sends a body of /generate and returns what came back.
        wave: prompts.
        sampling: parameters of all requests, or of each.
        ranks: DP rank of each request; these are then sent one by one, at once.
    """
    if ranks is None:
        return ask({"input_ids": wave, "sampling_params": sampling})
    each = sampling if isinstance(sampling, list) else [sampling] * len(wave)
    bodies = [
        {"input_ids": prompt, "sampling_params": its_own, RANK: rank}
        for prompt, its_own, rank in zip(wave, each, ranks, strict=True)
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))
