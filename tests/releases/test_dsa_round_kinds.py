"""Rounds of greedy and of sampled batches have graphs of their own: when they are captured, and what keeps SGLang's path."""

from __future__ import annotations

import importlib.metadata
import weakref
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from round_sides import same, two_sides
from round_stand_in import SIZES, VOCABULARY, D, Graphs, decode_batch
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative import spec_utils
from sglang.srt.utils import common

from nsa_backend.adapters.dsa.rounds import rule, sizes
from nsa_backend.adapters.dsa.rounds.own_round import thresholds
from nsa_backend.adapters.dsa.rounds.release import names
from nsa_backend.adapters.dsa.rounds.rule import SAMPLED_SWITCH

pytestmark = pytest.mark.usefixtures("sampled_rounds")


def test_kinds_of_batches_in_turns():
    """What one kind leaves, the other and SGLang's own path take up; each has graphs of its own."""
    theirs, ours = two_sides()
    asked = ({}, {"greedy": False}, {"has_grammar": True})
    for number in range(12):
        options = asked[number % 3]
        batch = decode_batch([2, 4, 9, 5][: 1 + number % 4], greedy=options.get("greedy", True))
        fields = {name: value for name, value in options.items() if name != "greedy"}
        mine, other = (side.run(batch(**fields)) for side in (ours, theirs))
        same(mine, other, 1 + number % 4)
    assert ours.replays == 6  # of four greedy and four sampled batches, all but the first of each kind


def test_the_first_sampled_round_compiles_what_graphs_record():
    """SGLang leaves a filter out where no request asks for it; a graph has both, and must not be the first to run one."""
    _, ours = two_sides()
    nothing_asked = [4]  # neither top-p nor top-k
    batches = [decode_batch(nothing_asked, greedy=False)() for _ in range(3)]
    assert not batches[0].sampling_info.need_top_p_sampling
    assert not batches[0].sampling_info.need_top_k_sampling
    ours.run(batches[0])
    assert (ours.replays, ours.worker.filters) == (0, [(True, True)])
    assert not batches[0].sampling_info.need_top_p_sampling  # the scheduler's own is as it was
    for batch in batches[1:]:
        ours.run(batch)
    assert ours.replays == 2
    assert set(ours.worker.filters) == {(True, True)}


def test_sglangs_own_path_goes_on_leaving_filters_out():
    _, ours = two_sides()
    for _ in range(2):
        ours.run(decode_batch([4], greedy=False)())
    ours.worker.filters.clear()
    ours.run(decode_batch([4], greedy=False)(has_grammar=True))
    assert ours.worker.filters == [(False, False)]


@pytest.mark.parametrize(("switch", "share"), [("1", 2), (None, 8)])
def test_sampled_rounds_that_find_no_memory_are_three_graphs(monkeypatch, caplog, switch, share):
    monkeypatch.setattr(rule, "names", lambda: replace(names(), samples_alike=True))
    if switch is None:
        monkeypatch.delenv(SAMPLED_SWITCH)
    _, ours = two_sides()
    room_for_two = share * 2 * 3 * D * VOCABULARY * 4
    monkeypatch.setattr(sizes, "least_free_bytes", lambda device: room_for_two)
    for slots in ([2, 4], [2, 4], [2, 4, 5], [2]):
        ours.run(decode_batch(slots, greedy=False)())
    assert ours.replays == 2
    for _ in range(2):
        ours.run(decode_batch([2, 4, 5])())
    assert ours.replays == 3  # greedy rounds have no such need
    assert len([message for message in caplog.messages if "rounds of more than 2 sampled requests" in message]) == 1


@pytest.mark.parametrize(
    ("greedy", "way_out"),
    [
        (True, "NSA_BACKEND_ROUND_GRAPH=0 leaves rounds three CUDA graphs, under EAGLE in place of NAIVE_EAGLE"),
        (False, "NSA_BACKEND_SAMPLED_ROUNDS=0 leaves sampled rounds three CUDA graphs"),
    ],
)
def test_a_capture_that_fails_says_what_a_server_can_do_without_it(monkeypatch, greedy, way_out):
    _, ours = two_sides()
    ours.run(decode_batch([2], greedy=greedy)())
    full = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(ours.rounds[0], "_record", Mock(side_effect=full))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        ours.run(decode_batch([2], greedy=greedy)())
    assert raised.value is full
    (note,) = full.__notes__
    assert note.startswith("nsa_backend: while capturing whole speculative rounds, with 0 MiB free at first: lower --mem-")
    assert note.endswith(way_out)


@pytest.mark.parametrize(("switch", "default", "served"), [("0", True, 0), ("1", False, 1), (None, True, 1), (None, False, 0)])
def test_the_switch_of_sampled_rounds(monkeypatch, switch, default, served):
    monkeypatch.setattr(rule, "names", lambda: replace(names(), samples_alike=default))
    if switch is None:
        monkeypatch.delenv(SAMPLED_SWITCH)
    else:
        monkeypatch.setenv(SAMPLED_SWITCH, switch)
    _, ours = two_sides()
    for greedy in (True, True, False, False):
        ours.run(decode_batch([2, 4], greedy=greedy)())
    assert ours.replays == 1 + served


def test_ranks_of_one_batch_have_graphs_or_none(monkeypatch, caplog):
    """SGLang times forwards on one of them alone; the other must not ask for what this one never will."""
    _, ours = two_sides()
    caplog.set_level("INFO")
    asked = []
    monkeypatch.setattr(sizes, "least_of_batch", lambda value: asked.append(value) or 0)  # the other one's answer is 0
    monkeypatch.setattr(sizes, "least_free_bytes", lambda device: pytest.fail("the other rank does not come here"))
    for greedy in (True, True, False, False):
        ours.run(decode_batch([2, 4], greedy=greedy)())
    assert (ours.replays, asked) == (0, [True])
    assert [
        message for message in caplog.messages if "because another rank that has the same requests can have none" in message
    ]


def test_no_round_reads_the_version_of_sglang(monkeypatch):
    """It is in a file; a millisecond of every round that says nothing of the switch."""
    monkeypatch.delenv(SAMPLED_SWITCH)
    rule.batch_problem(decode_batch([2, 4], greedy=False)())  # which may read it once
    monkeypatch.setattr(importlib.metadata, "version", lambda name: pytest.fail(f"the version of {name} was read"))
    monkeypatch.setattr("nsa_backend.releases.version", importlib.metadata.version)
    rule.batch_problem(decode_batch([2, 4], greedy=False)())


def test_a_batch_with_seeds_of_its_own():
    _, ours = two_sides()
    for _ in range(3):
        batch = decode_batch([2, 4], greedy=False)()
        batch.sampling_info.sampling_seed = torch.tensor([1, 2])
        ours.run(batch)
    assert ours.replays == 0


def test_the_log_says_what_was_captured(caplog):
    caplog.set_level("INFO")
    _, ours = two_sides()
    for greedy in (True, False) * 2:
        ours.run(decode_batch([2, 4], greedy=greedy)())
    said = [message for message in caplog.messages if "captured whole" in message]
    assert [message.split(" in ")[0] for message in said] == [
        f"nsa_backend: captured whole speculative rounds of {SIZES} {kind} requests" for kind in ("greedy", "sampled")
    ]


@pytest.mark.parametrize(
    ("holder", "name", "value", "reason"),
    [
        # A graph would repeat the one that was drawn while it was captured.
        (spec_utils, "SIMULATE_ACC_LEN", 2.5, "SGLang draws accept lengths on the host (SGLANG_SIMULATE_ACC_LEN)"),
        (common, "is_confidential_compute", lambda: True, rule.CONFIDENTIAL),
    ],
)
def test_servers_whose_rounds_are_three_graphs(monkeypatch, caplog, holder, name, value, reason):
    monkeypatch.setattr(holder, name, value, raising=False)
    caplog.set_level("INFO")
    _, ours = two_sides()
    for greedy in (True, False) * 2:
        ours.run(decode_batch([2, 4], greedy=greedy)())
    assert ours.replays == 0
    assert [message for message in caplog.messages if reason in message]


def captures(caplog) -> list[str]:
    """The kind of rounds of each capture so far."""
    return [message.split(" requests in ")[0].split()[-1] for message in caplog.messages if "captured whole" in message]


def test_graphs_that_sglang_captures_anew_are_joined_anew(caplog):
    """As it does where /update_weights_from_disk asks for it: a round must not replay a copy of graphs whose memory is free."""
    caplog.set_level("INFO")
    theirs, ours = two_sides()
    for number in range(8):
        batch = decode_batch([2, 4], greedy=number % 2 == 0)
        same(*(side.run(batch()) for side in (ours, theirs)), 2)
    assert captures(caplog) == ["greedy", "sampled"]
    ours.worker.target_worker.model_runner.decode_cuda_graph_runner = Graphs(capture_bs=SIZES, require_mlp_tp_gather=False)
    for number in range(4):
        batch = decode_batch([2, 4], greedy=number % 2 == 0)
        same(*(side.run(batch()) for side in (ours, theirs)), 2)
    assert captures(caplog) == ["greedy", "sampled"] * 2
    assert ours.replays == 10  # all but the first of each kind


def test_graphs_that_sglang_has_no_more(caplog):
    _, ours = two_sides()
    caplog.set_level("INFO")
    for _ in range(3):
        ours.run(decode_batch([2, 4])())
    ours.worker.target_worker.model_runner.decode_cuda_graph_runner = None
    for _ in range(3):
        ours.run(decode_batch([2, 4])())
    assert ours.replays == 2
    assert [message for message in caplog.messages if "because SGLang captured no graph of target-verify" in message]


def test_sglangs_graphs_are_not_kept_alive():
    """They must be gone before SGLang captures others: there may be no memory for both."""
    _, ours = two_sides()
    for _ in range(3):
        ours.run(decode_batch([2, 4])())
    runner, gone = ours.worker.target_worker.model_runner, []
    weakref.finalize(ours.worker.draft_worker.cuda_graph_runner_for_draft_extend, gone.append, "draft-extend")
    ours.worker.draft_worker.cuda_graph_runner_for_draft_extend = None
    assert gone == ["draft-extend"]
    assert runner.decode_cuda_graph_runner is not None


def test_thresholds_of_acceptance_that_change_while_it_serves(caplog):
    """By /set_internal_state; they are numbers in a captured launch, and greedy rounds have none."""
    caplog.set_level("INFO")
    _, ours = two_sides()
    for greedy in (True, False) * 3:
        ours.run(decode_batch([2, 4], greedy=greedy)())
    assert captures(caplog) == ["greedy", "sampled"]
    before = thresholds()
    context = get_context()
    try:
        context.override("test", speculative_accept_threshold_single=0.25)
        assert thresholds() == (0.25, before[1])
        for greedy in (True, False) * 3:
            ours.run(decode_batch([2, 4], greedy=greedy)())
    finally:
        context.override("test", speculative_accept_threshold_single=before[0])
    assert captures(caplog) == ["greedy", "sampled", "sampled"]


def test_sglangs_dumper_counts_forwards(monkeypatch, caplog):
    """Tensors are named by the number of the forward, which SGLang's model runner counts on the host."""
    from sglang.srt.debug_utils.dumper import dumper

    monkeypatch.setattr(type(dumper), "may_enable", True)
    caplog.set_level("INFO")
    _, ours = two_sides()
    for _ in range(3):
        ours.run(decode_batch([2, 4])())
    assert ours.replays == 0
    assert [message for message in caplog.messages if "DUMPER_ENABLE or DUMPER_SERVER_PORT" in message]
