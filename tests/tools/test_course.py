"""The section `course` of `bench profile`: made-up streams, read as the time per token of stretch after stretch."""

from __future__ import annotations

import argparse
import re

import pytest

from nsa_backend.benchmarks import course, servers


def streamed(*progress: list[tuple[int, float]], output_ids: tuple[int, ...] = ()) -> servers.Streamed:
    answers = [{"output_ids": list(output_ids)} for _ in progress]
    return servers.Streamed([of_one[0][1] for of_one in progress], progress[0][-1][1], answers, list(progress))


def test_a_course_follows_the_slowest_request_from_stretch_to_stretch():
    """Speculation gets past the end of a stretch; a stretch begins when the last request began it."""
    even = [(1, 1.0), (33, 1.064), *[(n, 1.064 + 0.001 * (n - 33)) for n in (65, 97, 129, 161, 193, 225, 256)]]
    late = [(3, 1.02), *[(tokens + 2, at + 0.01) for tokens, at in even[1:-1]], (256, even[-1][1])]
    found = course.stretches(streamed(even, late))
    assert len(found) == len(course.ends()) == 8
    assert course.ends()[::7] == [33, 256]
    assert found == pytest.approx([(1.074 - 1.02) / 32 * 1e3, *[1.0] * 6, (0.031 - 0.01) / 31 * 1e3])
    with pytest.raises(RuntimeError, match="ended before token 65"):
        course.stretches(streamed(even, late[:2]))
    assert course.summary([[1.0, 3.0], [2.0, 5.0], [9.0, 4.0]]) == {
        "ms_per_token": [2.0, 4.0], "min_max": [[1.0, 9.0], [3.0, 5.0]],
    }  # fmt: skip


def test_a_course_asks_both_sides_in_turns_and_prints_their_difference(monkeypatch, capsys):
    """Greedy first, where answers part; then forced ones, for which the sampler is told and not the model."""
    asked = []

    class Side:
        def __init__(self, name, us):
            self.name, self.us = name, us

        def generate(self, prompts, tokens):
            asked.append((self.name, "warm", len(prompts)))

        def streamed(self, prompts, tokens, stream_interval, logit_bias=None):
            asked.append((self.name, tokens, stream_interval, logit_bias))
            chosen = self.us if logit_bias is None else 8
            return streamed([(n, 1e-6 * self.us * n) for n in (1, *course.ends())], output_ids=(7, chosen, 9, 4))

    both = {"ours": Side("ours", 2100), "builtin": Side("builtin", 2000)}
    made = argparse.Namespace(of=lambda checkpoint, steps: both)
    greedy, forced = course.measure(made, "some/wide", 0, 2, 40000)
    assert asked[:2] == [("ours", "warm", 2), ("builtin", "warm", 2)]
    assert asked[2:8] == [("ours", 256, 32, None), ("builtin", 256, 32, None)] * 3
    assert asked[8:] == [("ours", 256, 32, {"1000": 1e4}), ("builtin", 256, 32, {"1000": 1e4})] * 3
    assert greedy["ours"]["ms_per_token"] == pytest.approx([2.1] * 8)
    assert (greedy["equal_tokens"], forced["equal_tokens"]) == (0.75, 1.0)
    course.show([greedy, forced])
    printed = capsys.readouterr().out
    assert len(re.findall(r"ours - builtin +(?:\| 100\.0 +){8}", printed)) == 2
    assert "wide, N = 0, 2 x 40000: us per token up to token ...; 75.0% of the tokens are alike" in printed
    assert "wide, N = 0, 2 x 40000, forced: us per token up to token ...; 100.0% of the tokens are alike" in printed
