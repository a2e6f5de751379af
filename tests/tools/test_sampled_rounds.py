"""What the comparison of sampled rounds on a GPU calls the same, and what its requests ask."""

from __future__ import annotations

import random
from collections import Counter

import sampled_rounds
from case import Case
from run_case import measure
from workloads import WORKLOADS


def drawn(weights: dict[str, float], samples: int, seed: int) -> Counter:
    return Counter(random.Random(seed).choices(list(weights), list(weights.values()), k=samples))


WEIGHTS = {str(number): 1 / (number + 1) for number in range(200)}


def test_samples_of_one_distribution_are_the_same():
    apart = [
        sampled_rounds.by_chance(*sampled_rounds.difference(drawn(WEIGHTS, 2000, seed), drawn(WEIGHTS, 1700, seed + 1)))
        for seed in range(0, 100, 2)
    ]
    assert all(apart)


def test_samples_of_another_distribution_are_not():
    """An output that comes twice as often, or one that the other side never has."""
    plain = drawn(WEIGHTS, 2000, 1)
    for changed in (WEIGHTS | {"0": 2.0}, WEIGHTS | {"new": 0.3}):
        assert not sampled_rounds.by_chance(*sampled_rounds.difference(plain, drawn(changed, 2000, 2)))


def test_a_case_samples_as_it_says():
    """One request of a wave after the other; a case that says nothing is greedy."""
    asked = []

    def generate(wave, sampling, ranks):
        asked.append(sampling)
        return [{"output_ids": [], "meta_info": {}} for _ in wave]

    measure(generate, Case("greedy", 3, ("short",)))
    measure(generate, Case("sampled", 3, ("short",), sampling=({"temperature": 0.5}, {}, {"top_k": 4})))
    assert asked[0]["temperature"] == 0
    assert len(asked[1]) == len(WORKLOADS["short"]()[0]) == 4
    assert [(one["temperature"], one.get("top_k")) for one in asked[1]] == [(0.5, None), (0, None), (0, 4), (0.5, None)]
    assert all(one["ignore_eos"] for one in asked[1])
