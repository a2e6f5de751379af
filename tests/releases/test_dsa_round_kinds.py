"""Rounds of greedy and of sampled batches have graphs of their own, and which batches have one by default."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest
import torch
from round_sides import two_sides
from round_stand_in import decode_batch

from nsa_backend.adapters.dsa.rounds import served
from nsa_backend.adapters.dsa.rounds.by_release import OneGraph, release
from nsa_backend.adapters.dsa.rounds.served import SAMPLED_SWITCH

pytestmark = pytest.mark.usefixtures("sampled_rounds")


def test_filters_are_in_every_graph_and_not_in_every_round_of_sglang():
    """SGLang leaves a filter out where no request asks for it; a graph has both, and the batch stays as it was."""
    _, ours = two_sides()
    nothing_asked = decode_batch([4], greedy=False)
    batch = nothing_asked()
    ours.run(batch)
    assert set(ours.worker.filters) == {(True, True)}
    assert not batch.sampling_info.need_top_p_sampling
    ours.worker.filters.clear()
    ours.run(nothing_asked(has_grammar=True))
    assert ours.worker.filters == [(False, False)]


@pytest.mark.parametrize(("switch", "default", "replays"), [("0", True, 0), ("1", False, 2), (None, True, 2), (None, False, 0)])
def test_the_switch_of_sampled_rounds(monkeypatch, switch, default, replays):
    when = OneGraph.BY_DEFAULT if default else OneGraph.WHERE_ASKED
    monkeypatch.setattr(served, "release", lambda: replace(release(), sampled=when))
    monkeypatch.delenv(SAMPLED_SWITCH) if switch is None else monkeypatch.setenv(SAMPLED_SWITCH, switch)
    _, ours = two_sides()
    for greedy in (True, True, False, False):
        ours.run(decode_batch([2, 4], greedy=greedy)())
    assert ours.replays == 2 + replays


def test_no_round_reads_the_version_of_sglang(monkeypatch):
    """It is in a file; a millisecond of every round that says nothing of the switch."""
    monkeypatch.delenv(SAMPLED_SWITCH)
    served.batch_problem(decode_batch([2, 4], greedy=False)())  # which may read it once
    monkeypatch.setattr(importlib.metadata, "version", lambda name: pytest.fail(f"the version of {name} was read"))
    monkeypatch.setattr("nsa_backend.releases.version", importlib.metadata.version)
    served.batch_problem(decode_batch([2, 4], greedy=False)())


def test_a_batch_with_seeds_of_its_own():
    _, ours = two_sides()
    for _ in range(2):
        batch = decode_batch([2, 4], greedy=False)()
        batch.sampling_info.sampling_seed = torch.tensor([1, 2])
        ours.run(batch)
    assert ours.replays == 0


@pytest.mark.parametrize(
    ("where", "name", "value", "why"),
    [
        ("sglang.srt.speculative.spec_utils", "SIMULATE_ACC_LEN", 2.5, "draws accept lengths on the host"),
        ("sglang.srt.debug_utils.dumper._Dumper", "may_enable", True, "DUMPER_ENABLE or DUMPER_SERVER_PORT"),
    ],
)
def test_what_sglang_does_on_the_host_in_every_round(monkeypatch, caplog, where, name, value, why):
    """A graph would repeat what was drawn or counted while it was captured."""
    from sglang.srt.debug_utils.dumper import dumper

    owner = type(dumper) if where.endswith("_Dumper") else where
    monkeypatch.setattr(owner, name, value) if owner is not where else monkeypatch.setattr(f"{where}.{name}", value)
    caplog.set_level("INFO")
    _, ours = two_sides()
    for greedy in (True, False):
        ours.run(decode_batch([2, 4], greedy=greedy)())
    assert ours.replays == 0
    assert len([message for message in caplog.messages if why in message]) == 1
