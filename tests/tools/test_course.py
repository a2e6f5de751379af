"""The section `course` of `bench profile`: made-up streams, read as the time per token of stretch after stretch."""

from __future__ import annotations

import argparse
import re
from contextlib import ExitStack

import pytest

from nsa_backend.benchmarks.commands import course, course_servers, profile
from nsa_backend.benchmarks.reports import cells
from nsa_backend.benchmarks.servers import server


def streamed(*progress: list[tuple[int, float]], output_ids: tuple[int, ...] = ()) -> server.Streamed:
    answers = [{"output_ids": list(output_ids)} for _ in progress]
    return server.Streamed([of_one[0][1] for of_one in progress], progress[0][-1][1], answers, list(progress))


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


class Side:
    """A server of one speed; its greedy answers are its own, its forced ones are everybody's."""

    def __init__(self, asked, name, us):
        self.asked, self.name, self.us = asked, name, us

    def generate(self, prompts, tokens):
        self.asked.append((self.name, "warm", len(prompts)))

    def streamed(self, prompts, tokens, stream_interval, logit_bias=None):
        self.asked.append((self.name, tokens, stream_interval, logit_bias))
        chosen = self.us if logit_bias is None else 8
        return streamed([(n, 1e-6 * self.us * n) for n in (1, *course.ends())], output_ids=(7, chosen, 9, 4))


def test_a_course_asks_both_sides_in_turns_and_prints_their_difference(capsys):
    """Greedy first, where answers part; then forced ones, for which the sampler is told and not the model."""
    asked = []
    both = {"ours": Side(asked, "ours", 2100), "builtin": Side(asked, "builtin", 2000)}
    made = argparse.Namespace(of=lambda checkpoint, steps: both)
    greedy, forced = course.measure(made, "some/wide", 0, 2, 40000)
    assert asked[:2] == [("ours", "warm", 2), ("builtin", "warm", 2)]
    assert asked[2:8] == [("ours", 256, 32, None), ("builtin", 256, 32, None)] * 3
    assert asked[8:] == [("ours", 256, 32, {"1000": 1e4}), ("builtin", 256, 32, {"1000": 1e4})] * 3
    assert greedy["ours"]["ms_per_token"] == pytest.approx([2.1] * 8)
    assert (greedy["equal_tokens"], forced["equal_tokens"]) == (0.75, 1.0)
    assert "wide, N = 0, 2 x 40000: ours 2100.0 us per token, builtin 2000.0 us per token" in capsys.readouterr().err
    course.show([greedy, forced])
    printed = capsys.readouterr().out
    assert len(re.findall(r"ours - builtin +(?:\| 100\.0 +){8}", printed)) == 2
    assert "wide, N = 0, 2 x 40000: us per token up to token ...; 75.0% of the tokens are alike" in printed
    assert "wide, N = 0, 2 x 40000, forced: us per token up to token ...; 100.0% of the tokens are alike" in printed


NAMES = ["ours 1", "builtin 1", "builtin 2", "ours 2", "ours 3", "builtin 3"]


def test_servers_of_a_side_come_in_turns_and_no_side_always_first():
    assert list(server.names_of(("ours", "builtin"), 3)) == NAMES
    assert [server.side_of(name) for name in NAMES] == list(server.names_of(("ours", "builtin"), 3).values())
    assert server.names_of(("ours", "builtin"), 1) == {"ours": "ours", "builtin": "builtin"}


def test_several_servers_of_a_side_tell_the_backend_from_the_process(capsys):
    asked = []
    speeds = dict(zip(NAMES, (2100, 2000, 2070, 2160, 2130, 2020), strict=True))
    running = {name: Side(asked, name, us) for name, us in speeds.items()}
    greedy, forced = course.measure(argparse.Namespace(of=lambda checkpoint, steps: running), "some/wide", 0, 2, 4096)
    assert [who for who, what, *_ in asked if what == "warm"] == NAMES
    assert [who for who, what, *_ in asked if what != "warm"] == NAMES * 6
    assert (greedy["equal_tokens"], forced["equal_tokens"]) == (0.75, 1.0)
    assert list(forced["servers"]) == NAMES
    assert forced["servers"]["ours 2"]["ms_per_token"] == pytest.approx([2.16] * 8)
    assert forced["sides"] == {
        "us_per_token": pytest.approx(speeds),
        "mean": {"ours": 2130.0, "builtin": 2030.0},
        "difference": 100.0,
        "spread": {"ours": 60.0, "builtin": 70.0},
        "ranges_overlap": False,
    }
    line = "ours - builtin +100.0 us per token; between servers of a side 60.0 of ours, 70.0 of builtin; the ranges lie apart"
    assert f"wide, N = 0, 2 x 4096, forced: {line}\n" in capsys.readouterr().err
    course.show([greedy, forced])
    printed = capsys.readouterr().out
    assert len(re.findall(r"builtin 2 +(?:\| 2070\.0 +){9}", printed)) == 2
    assert printed.count(line) == 2


@pytest.mark.parametrize(
    ("ours", "overlap"), [((5.0, 6.0), False), ((4.0, 6.0), True), ((1.0, 6.0), True), ((0.5, 1.0), False)]
)
def test_ranges_overlap_where_one_value_could_be_of_both(ours, overlap):
    of_each = dict(zip(("ours 1", "ours 2", "builtin 1", "builtin 2"), (*ours, 2.0, 4.0), strict=True))
    found = course_servers.compared({name: {"ms_per_token": [us / 1e3, us / 1e3]} for name, us in of_each.items()}, [33, 64])
    assert found["ranges_overlap"] == overlap


def test_the_mean_of_a_course_weighs_each_stretch_by_its_tokens():
    assert course_servers.mean_us([1.0, 2.0], [33, 37]) == pytest.approx(1e3 * (32 * 1 + 4 * 2) / 36)


def test_with_more_servers_a_side_only_the_course_is_measured(monkeypatch, capsys):
    """And a report without profiles is shown."""
    made = []
    monkeypatch.setattr(
        profile, "Servers", lambda *arguments, copies: made.append(copies) or argparse.Namespace(close=lambda: None)
    )
    options = argparse.Namespace(
        checkpoint=["wide"], steps=[0], batch=[8, 32], length=[4096], servers=None, port=None, quick=False
    )

    def sections(number):
        options.servers = number
        return [cell.section for cell in profile.cells(options, ExitStack())]

    assert sections(None) == sections(1) == ["course", "course", "rows", "rows"]
    assert sections(3) == ["course", "course"]
    assert made == [1, 1, 3]
    with pytest.raises(SystemExit, match="--servers 0 leaves nothing to measure"):
        sections(0)
    profile.show(cells.run_cells([cells.Cell("x", list, "course")], 1, lambda report: None))
    assert "us per token" not in capsys.readouterr().out
