"""When rounds are captured, what they may take, and what a failed capture leaves: rounds of three graphs, with right tokens.

Graphs are recorded on the CPU; how much memory is free and what other ranks answer are stated.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from round_sides import Side, on_the_cpu, same, scheduler_of, two_sides
from round_stand_in import SIZES, VOCABULARY, D, Recorded, StandInWorker, decode_batch, finished_prefill
from sglang.srt.managers.io_struct import GetInternalStateReqOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import get_context

from nsa_backend.adapters.dsa.rounds import capture, served, worker
from nsa_backend.adapters.dsa.rounds.by_release import OneGraph, release
from nsa_backend.adapters.dsa.rounds.own_round import thresholds
from nsa_backend.adapters.dsa.rounds.served import SAMPLED_SWITCH, SWITCH
from nsa_backend.round_graph.graphs import RoundGraphs

pytestmark = pytest.mark.usefixtures("sampled_rounds")
GREEDY, SAMPLED = "greedy requests", "sampled requests"


def captured(caplog) -> list[tuple[str, str]]:
    """Sizes and kind of each capture that the log tells of, and empties it."""
    said = [message.partition("captured whole speculative rounds of ")[2] for message in caplog.messages]
    caplog.clear()
    return [tuple(message.partition(" in ")[0].split("] ")) for message in said if message]


def rounds_match(sides: tuple[Side, Side], replayed: int, kinds: tuple[bool, ...] = (True, False)) -> None:
    """Rounds of both kinds: the same tokens on both sides, so many of ours in one graph."""
    theirs, ours = sides
    before = ours.replays
    for greedy in kinds:
        batch = decode_batch([2, 4], greedy=greedy)
        same(ours.run(batch()), theirs.run(batch()), 2)
    assert ours.replays - before == replayed


@pytest.mark.parametrize("shared", [False, True])
def test_all_kinds_are_captured_before_a_scheduler_is_ready_and_nothing_is_in_traffic(caplog, monkeypatch, shared):
    """Before the first prefill, when SGLang's FutureMap has no tensors of drafts yet, and the cheap ones first."""
    caplog.set_level("INFO", "nsa_backend")
    monkeypatch.setenv(SWITCH, "1")
    side = Side(with_graphs=True)
    side.worker.draft_worker.seed_dsa_topk_from_draft_extend = shared
    side.start()
    assert [message for message in caplog.messages if "capturing whole speculative rounds of sampled requests:" in message]
    sizes = str(SIZES)[:-1]
    with_logprobs = [f"{kind} with log-probabilities" for kind in (GREEDY, SAMPLED)]
    assert captured(caplog) == [(sizes, kind) for kind in (GREEDY, with_logprobs[0], SAMPLED, with_logprobs[1])]
    finished_prefill(side.future_map, seed=7, shared=shared)
    theirs = Side(with_graphs=False)
    theirs.worker.draft_worker.seed_dsa_topk_from_draft_extend = shared
    finished_prefill(theirs.future_map, seed=7, shared=shared)
    monkeypatch.setattr(Recorded, "record", mock.Mock(side_effect=AssertionError("captured in traffic")))
    for greedy in (True, False) * 2:
        batch = decode_batch([3, 5], greedy=greedy, shared=shared)
        same(side.run(batch()), theirs.run(batch()), 2)
    assert side.replays == 4
    assert captured(caplog) == []


def test_a_scheduler_says_that_it_is_ready_once_rounds_are_captured(caplog):
    """SGLang's own scheduler, whichever way a server was started: its process sends what `get_init_info` returns."""
    caplog.set_level("INFO", "nsa_backend")
    side, ready = Side(with_graphs=True), []
    scheduler = scheduler_of(side.worker, side.future_map)
    scheduler.get_init_info = lambda: ready.append(captured(caplog)) or {}
    with on_the_cpu():
        for _ in range(2):
            worker._before_ready(lambda scheduler: scheduler.get_init_info(), scheduler)
    assert [len(found) for found in ready] == [2, 0]
    without = SimpleNamespace(draft_worker=None)
    assert worker._before_ready(lambda scheduler: "plain", without) == "plain"
    assert Scheduler.get_init_info.__wrapped__ is not None  # hooked, and under the name by which SGLang calls it


def test_captures_run_on_the_forward_stream_without_garbage_collection_or_gradients(monkeypatch):
    side, seen = Side(with_graphs=True), []
    record = Recorded.record

    def recorded(self, function):
        seen.append((gc.isenabled(), torch.is_grad_enabled(), stream.__enter__.called, stream.__exit__.called))
        return record(self, function)

    monkeypatch.setattr(Recorded, "record", recorded)
    scheduler = scheduler_of(side.worker, side.future_map)
    scheduler.forward_stream_ctx = stream = mock.MagicMock()
    with mock.patch.object(torch.Tensor, "record_stream", mock.Mock()):
        side.worker.rounds.start(scheduler)
    gc.freeze()  # as before: SGLang has let go of all that stays, and every later collection would walk it
    assert set(seen) == {(False, False, True, False)}
    assert gc.isenabled()


@pytest.mark.parametrize("shape", ["topk_p", "topk_index", "hidden_states", "dsa_topk_indices", "bonus_tokens"])
def test_tensors_that_padding_needs_are_those_that_a_round_leaves(shape):
    """SGLang makes its FutureMap's of what comes first, so that they must be those of a prefill and of a round."""
    side = Side(with_graphs=True)
    side.worker.draft_worker.seed_dsa_topk_from_draft_extend = True
    side.start()
    name = "output_tokens_buf" if shape == "bonus_tokens" else f"{shape}_buf"
    ours = getattr(side.future_map, name)
    other = Side(with_graphs=False)
    finished_prefill(other.future_map, seed=1, shared=True)
    theirs = getattr(other.future_map, name)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


# Memory


@pytest.mark.parametrize(("switch", "share"), [("1", 2), (None, 8)])
def test_sampled_rounds_take_their_share_of_what_is_free(monkeypatch, caplog, switch, share):
    monkeypatch.setattr(served, "release", lambda: replace(release(), sampled=OneGraph.BY_DEFAULT))
    if switch is None:
        monkeypatch.delenv(SAMPLED_SWITCH)
    room_for_two = share * 2 * 3 * D * VOCABULARY * 4
    for name in ("free_bytes", "settled_free_bytes"):
        monkeypatch.setattr(capture, name, lambda device: room_for_two)
    sides = two_sides()
    for slots, greedy, one in (([2, 4], False, 1), ([2, 4, 5], False, 0), ([2, 4, 5], True, 1)):
        before = sides[1].replays
        batch = decode_batch(slots, greedy=greedy)
        same(sides[1].run(batch()), sides[0].run(batch()), len(slots))
        assert sides[1].replays - before == one
    assert len([message for message in caplog.messages if f"rounds of more than 2 {SAMPLED}" in message]) == 1


def test_what_graphs_take_counts_and_the_largest_rounds_go_first(monkeypatch, caplog):
    """Every graph takes a quarter of what is free, and half of it has to stay: two graphs, of the sizes most in use."""
    caplog.set_level("INFO", "nsa_backend")
    graphs, init = weakref.WeakSet(), RoundGraphs.__init__

    def counted(self, *args, **options):
        init(self, *args, **options)
        graphs.add(self)

    def free(device):
        return 1000 - 250 * sum(len(one._rounds) for one in graphs)

    monkeypatch.setattr(RoundGraphs, "__init__", counted)
    monkeypatch.setattr(capture, "free_bytes", free)
    monkeypatch.setattr(capture, "settled_free_bytes", free)
    monkeypatch.setenv(SAMPLED_SWITCH, "0")
    sides = two_sides()
    rounds_match(sides, 1, (True,))
    assert captured(caplog) == [("[1, 2", GREEDY)]
    batch = decode_batch([2, 4, 9])
    same(sides[1].run(batch()), sides[0].run(batch()), 3)
    assert sides[1].sizes == [2]


# Failures

STEPS = {
    "what a kind's graphs share": (RoundGraphs, "__init__"),
    "the first round": (RoundGraphs, "warm_up"),
    "the recording": (Recorded, "record"),
    "what is recorded": (capture, "run_on"),
}


FULL_GPU, ANY_ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried more"), ValueError()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("which", "error"), [(0, FULL_GPU), (3, ANY_ERROR)])
def test_a_capture_that_fails_leaves_three_graphs_and_right_tokens(monkeypatch, caplog, step, which, error):
    """Of one kind, at any step, at its first call there or a later one; other kinds and the server go on."""
    owner, name = STEPS[step]
    original, calls = getattr(owner, name), []

    def failing(*args, **options):
        calls.append(name)
        if len(calls) == which + 1:
            raise error
        return original(*args, **options)

    monkeypatch.setattr(owner, name, failing)
    sides = two_sides()
    sides[1].start()
    expected = 2 if which >= len(calls) else 1
    rounds_match(sides, expected)
    rounds_match(sides, expected)
    said = [message for message in caplog.messages if "because their capture failed" in message]
    assert len(said) == 2 - expected
    assert all(type(error).__name__ in message and "MiB were free" in message for message in said)


class OfTwo:
    """The answers of two ranks that run forwards together, of which the other one's are stated."""

    def __init__(self, monkeypatch, *others: int):
        self.others, self.asked = list(others), []
        monkeypatch.setattr(capture, "least_of_ranks", self)
        monkeypatch.setattr(capture, "get_parallel", lambda: SimpleNamespace(tp_group=SimpleNamespace(world_size=2)))

    def __call__(self, value: int) -> int:
        self.asked.append(int(value))
        return min(value, self.others.pop(0)) if self.others else value


CAN, FREE, ALLOCATED, DONE, FULL, FAILED = 1, 2**40, 2, 2, 1, 0


@pytest.mark.parametrize("here", [False, True])
def test_a_capture_that_fails_on_one_of_two_ranks_fails_on_both(monkeypatch, caplog, here):
    monkeypatch.setenv(SAMPLED_SWITCH, "0")
    if here:
        monkeypatch.setattr(Recorded, "record", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    of_two = OfTwo(monkeypatch, CAN, FREE, ALLOCATED, DONE if here else FAILED)
    sides = two_sides()
    rounds_match(sides, 0)
    assert of_two.asked == [CAN, FREE, ALLOCATED, FAILED if here else DONE]
    (said,) = [message for message in caplog.messages if "because their capture failed" in message]
    assert ("OutOfMemoryError: CUDA out of memory" if here else "on another rank") in said


def test_a_rank_that_cannot_even_allocate_keeps_the_other_from_waiting_for_its_first_round(monkeypatch):
    """That round is run by all ranks together, with collectives inside SGLang's graphs."""
    monkeypatch.setenv(SAMPLED_SWITCH, "0")
    of_two = OfTwo(monkeypatch, CAN, FREE, FAILED)
    monkeypatch.setattr(RoundGraphs, "warm_up", mock.Mock(side_effect=AssertionError("the other rank does not come here")))
    rounds_match(two_sides(), 0)
    assert of_two.asked == [CAN, FREE, ALLOCATED]


def test_a_first_round_that_fails_among_ranks_ends_the_start(monkeypatch):
    """Others wait for this rank in a collective, as when one of SGLang's own captures fails."""
    OfTwo(monkeypatch)
    full = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(RoundGraphs, "warm_up", mock.Mock(side_effect=full))
    side = Side(with_graphs=True)
    with pytest.raises(capture.UnevenRanksError) as raised:
        side.start()
    assert raised.value.__cause__ is full


def test_a_rank_with_less_memory_decides_for_both(monkeypatch, caplog):
    caplog.set_level("INFO", "nsa_backend")
    monkeypatch.setenv(SAMPLED_SWITCH, "0")
    OfTwo(monkeypatch, CAN, FREE, ALLOCATED, FULL, ALLOCATED, DONE)
    side = Side(with_graphs=True)
    side.start()
    assert captured(caplog) == [("[1, 2", GREEDY)]


def test_a_worker_that_can_have_none_decides_for_all_ranks(monkeypatch, caplog):
    """SGLang times forwards on one of them alone; the others must not ask for what this one never will."""
    caplog.set_level("INFO")
    of_two = OfTwo(monkeypatch, 0)
    rounds_match(two_sides(), 0)
    assert of_two.asked == [CAN]
    assert [message for message in caplog.messages if "because another rank can have none" in message]


# Exchanges


class Exchanging(StandInWorker):
    """Looks, when it captures anew, whether copies of its old graphs still take memory."""

    copies = ()

    def capture_anew(self) -> None:
        gc.collect()
        self.copies = [one for one in self.copies if one() is not None]
        super().capture_anew()


def test_graphs_that_sglang_captures_anew_are_joined_anew(caplog):
    """As it does where /update_weights_from_disk asks for it: before the next batch, and without the memory of our copies."""
    caplog.set_level("INFO", "nsa_backend")
    sides = two_sides(Exchanging)
    ours = sides[1]
    rounds_match(sides, 2)
    assert [kind for _, kind in captured(caplog)] == [GREEDY, SAMPLED]
    ours.worker.copies = [weakref.ref(one.graphs) for one in ours.worker.rounds._captured.values()]
    ours.exchange()
    assert ours.worker.copies == []
    assert [kind for _, kind in captured(caplog)] == [GREEDY, SAMPLED]
    rounds_match(sides, 2)
    assert captured(caplog) == []


@pytest.mark.parametrize("none_left", [False, True])
def test_graphs_that_were_exchanged_behind_our_back_are_not_replayed(caplog, none_left):
    """Rounds are three graphs then, whatever their kind."""
    caplog.set_level("INFO", "nsa_backend")
    sides = two_sides()
    rounds_match(sides, 2)
    if none_left:
        sides[1].worker.target_worker.model_runner.decode_cuda_graph_runner = None
    else:
        sides[1].worker.capture_anew()
    rounds_match(sides, 0)
    assert len([m for m in caplog.messages if "SGLang has other graphs than rounds were captured with" in m]) == 1


def test_sampled_sizes_follow_an_exchange_and_are_not_empty_for_ever(monkeypatch, caplog):
    caplog.set_level("INFO", "nsa_backend")
    with mock.patch.multiple(capture, free_bytes=lambda device: 64, settled_free_bytes=lambda device: 64):
        sides = two_sides()
        rounds_match(sides, 1)
    sides[1].exchange()
    rounds_match(sides, 2)


def test_sglangs_graphs_are_not_kept_alive():
    """They must be gone before SGLang captures others: there may be no memory for both."""
    _, ours = two_sides()
    ours.start()
    gone = []
    weakref.finalize(ours.worker.draft_worker.cuda_graph_runner_for_draft_extend, gone.append, "draft-extend")
    ours.worker.draft_worker.cuda_graph_runner_for_draft_extend = None
    assert gone == ["draft-extend"]


def test_server_info_counts_the_rounds_that_were_one_graph():
    sides = two_sides()
    sides[1].start()
    scheduler = scheduler_of(sides[1].worker, sides[1].future_map)

    def counts(scheduler) -> dict:
        """In SGLang's own answer."""
        answer = GetInternalStateReqOutput(internal_state={"theirs": 1})
        return worker._with_counts(lambda scheduler, request: answer, scheduler, None).internal_state

    rounds_match(sides, 0, ())
    assert set(counts(scheduler)["nsa_backend_rounds"].values()) == {0}
    rounds_match(sides, 2)
    rounds_match(sides, 1, (True,))
    of_kinds = counts(scheduler)["nsa_backend_rounds"]
    assert (of_kinds[GREEDY], of_kinds[SAMPLED], sum(of_kinds.values())) == (2, 1, 3)
    assert counts(SimpleNamespace(draft_worker=None)) == {"theirs": 1}


def test_thresholds_of_acceptance_that_change_while_it_serves(caplog):
    """By /set_internal_state; they are numbers in a captured launch, and greedy rounds have none."""
    caplog.set_level("INFO", "nsa_backend")
    sides = two_sides()
    rounds_match(sides, 2)
    captured(caplog)
    before, context = thresholds(), get_context()
    scheduler = scheduler_of(sides[1].worker, sides[1].future_map)

    def change(scheduler, value):
        context.override("test", speculative_accept_threshold_single=value)
        return "answered"

    try:
        change(scheduler, 0.25)  # by another way: not replayed with the old ones
        rounds_match(sides, 1)
        with on_the_cpu():
            assert worker._with_other_thresholds(change, scheduler, 0.5) == "answered"
        assert captured(caplog) == [(str(SIZES)[:-1], SAMPLED)]
        rounds_match(sides, 2)
        worker._with_other_thresholds(change, scheduler, 0.5)
        assert captured(caplog) == []
    finally:
        change(scheduler, before[0])


def test_an_exchange_whose_capture_fails_leaves_three_graphs(monkeypatch, caplog):
    sides = two_sides()
    rounds_match(sides, 2)
    monkeypatch.setattr(Recorded, "record", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    sides[1].exchange()
    rounds_match(sides, 0)
    assert len([message for message in caplog.messages if "because their capture failed" in message]) == 2
