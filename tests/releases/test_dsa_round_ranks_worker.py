"""Ranks of DP attention: SGLang's own workers replay the same graphs whether a round is one graph or three.

That is what lets each rank choose for itself: all collectives between ranks are inside these graphs.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from fake_gpu import fake_gpu
from ranks_on_fake_gpu import RANKS, FakeRank, captures_on_fake_gpu, exchanged, started
from round_sides import scheduler_of
from sampling_kernels import check_sampling, sampling_kernels
from sglang.srt.layers import dp_attention
from sglang.srt.runtime_context import get_parallel

from nsa_backend.adapters.dsa.rounds import capture
from nsa_backend.adapters.dsa.rounds.own_round import run_on, template_of
from nsa_backend.adapters.dsa.rounds.served import SWITCH, Kind
from nsa_backend.kernels.round_tensors import RoundInputs

pytestmark = pytest.mark.usefixtures("sampled_rounds")
SIZES = [1, 2, 3, 4, 8]
EVEN = [2, 4, 8]
"""What SGLang captures of the draft steps with attention TP 2."""
COUNTS_OF_ROUNDS = ((1, 1), (1, 1), (3, 1), (5, 0), (1, 4), (0, 2), (7, 3), (1, 8), (0, 1), (3, 3))


@pytest.fixture
def crossings():
    with fake_gpu() as found, captures_on_fake_gpu():
        yield found


@pytest.mark.parametrize("draft_sizes", [SIZES, EVEN], ids=["one GPU a rank", "two GPUs a rank"])
@pytest.mark.parametrize("num_steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_ranks_with_one_graph_and_with_three_meet_in_the_same_collectives(crossings, num_steps, draft_sizes):
    three, one = (
        started([FakeRank(num_steps, SIZES, one_graph=one, draft_sizes=draft_sizes) for _ in range(RANKS)])
        for one in (False, True)
    )
    for counts in COUNTS_OF_ROUNDS:
        replayed = []
        for ranks in (three, one):
            batches = exchanged(ranks, [rank.decode(n) for rank, n in zip(ranks, counts, strict=True)])
            assert [batch.global_num_tokens for batch in batches] == [list(counts)] * RANKS
            replayed += [rank.run(batch) for rank, batch in zip(ranks, batches, strict=True)]
        assert replayed == [replayed[0]] * len(replayed)
        assert [name for name, _ in replayed[0]] == (["draft"] if num_steps > 1 else []) + ["verify", "draft-extend"]
    assert [rank.graphs.rounds for rank in three] == [0, 0]
    assert [rank.graphs.rounds for rank in one] == [len(COUNTS_OF_ROUNDS)] * RANKS


def run(ranks: list[FakeRank], batches: list) -> list[list[tuple[str, int]]]:
    """What each rank replays for its batch of one iteration."""
    return [rank.run(batch) for rank, batch in zip(ranks, exchanged(ranks, batches), strict=True)]


def two(crossings, num_steps: int = 3) -> list[FakeRank]:
    """Both ready."""
    return started([FakeRank(num_steps, SIZES, one_graph=True) for _ in range(RANKS)])


def test_a_rank_whose_request_asks_for_more_takes_three_beside_one(crossings):
    ranks = two(crossings)
    batches = [rank.decode(3) for rank in ranks]
    batches[1].sampling_info.has_custom_logit_processor = True
    replayed = run(ranks, batches)
    assert replayed[0] == replayed[1] == [("draft", 3), ("verify", 3), ("draft-extend", 3)]
    assert [rank.graphs.rounds for rank in ranks] == [1, 0]


def test_a_sampling_rank_beside_a_greedy_one(crossings, monkeypatch):
    """What was sampled goes to the ranks of the same requests, in the round; no rank with other requests is asked."""
    everyone = mock.Mock(world_size=4)
    monkeypatch.setattr(capture, "least_of_ranks", lambda value: value)
    monkeypatch.setattr(dp_attention, "is_dp_attention_enabled", lambda: True)
    kernels = sampling_kernels(mock.Mock(side_effect=check_sampling), ranks=2)
    with kernels as of_one_batch, get_parallel().override(tp_group=everyone, tp_size=4, moe_tp_size=4, attn_dp_size=2):
        ranks = two(crossings)
        for _ in range(2):
            replayed = run(ranks, [ranks[0].decode(2, sampled=True), ranks[1].decode(4)])
            assert replayed[0] == replayed[1] == [("draft", 4), ("verify", 4), ("draft-extend", 4)]
    assert [rank.graphs.rounds for rank in ranks] == [2, 2]
    rounds = 2 * RANKS * len(SIZES)  # each rank runs and captures one of each size
    called = [call[0] for call in of_one_batch.mock_calls]
    assert [name for name in called if not name.startswith("cpu_group.")] == ["broadcast"] * 3 * rounds
    assert everyone.mock_calls == []


def test_a_rank_without_a_request_replays_the_only_kind_that_it_has(crossings, monkeypatch):
    """Rounds with log-probabilities, of which its own scheduler reads none."""
    monkeypatch.setenv(SWITCH, "1")
    ranks = two(crossings)
    for rank in ranks:
        del rank.worker.rounds._captured[Kind()]
    asked = {"return_logprob": True, "top_logprobs_nums": [0, 0], "token_ids_logprobs": [None, None]}
    run(ranks, [rank.decode(2, **asked) for rank in ranks])
    replayed = run(ranks, [ranks[0].decode(2, **asked), None])
    assert replayed[0] == replayed[1] == [("draft", 2), ("verify", 2), ("draft-extend", 2)]
    assert [rank.graphs.rounds for rank in ranks] == [2, 2]
    assert [len(rank.result.accept_lens) for rank in ranks] == [2, 0]
    assert ranks[0].result.logits_output.next_token_logprobs.shape == (2, 4)


def test_no_rank_has_a_round_while_one_prefills(crossings):
    ranks = two(crossings)
    batches = exchanged(ranks, [ranks[0].prefill(5), None])
    assert [batch.is_extend_in_batch for batch in batches] == [True, True]
    assert [rank.takes(batch) for rank, batch in zip(ranks, batches, strict=True)] == [None, None]


@pytest.mark.parametrize("counts", [(9, 1), (1, 9), (9, 0), (0, 9)])
def test_no_rank_has_one_above_the_captured_sizes(crossings, counts):
    ranks = two(crossings)
    batches = exchanged(ranks, [rank.decode(n) for rank, n in zip(ranks, counts, strict=True)])
    assert [rank.takes(batch) for rank, batch in zip(ranks, batches, strict=True)] == [None, None]


@pytest.mark.parametrize("failing", range(RANKS))
def test_a_capture_that_fails_on_one_rank_leaves_three_graphs_on_all(crossings, monkeypatch, failing):
    """One after the other, what each rank answers being known to the next; then both replay the same graphs."""
    answers: list[list[int]] = []

    def start(rank: FakeRank, number: int, others: list[int]) -> list[int]:
        mine = []
        monkeypatch.setattr(capture, "least_of_ranks", lambda value: mine.append(value) or min(value, others.pop(0)))
        if number == failing:
            rank.worker.rounds._capture_kind._new_recorder = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
        idle = rank.idle_told
        rank.worker.rounds.start(scheduler_of(rank.worker, rank.future_map, lambda: idle))
        rank.graphs.replayed.clear()
        return mine

    ranks = [FakeRank(3, SIZES, one_graph=True) for _ in range(RANKS)]
    for rank, idle in zip(ranks, exchanged(ranks, [rank.idle() for rank in ranks]), strict=True):
        rank.idle_told = idle
    failed = [1, 2**40, 0]  # what the failing rank answers of a kind; the other has allocated
    answers = [start(rank, number, [1] + failed[1:] * 2) for number, rank in enumerate(ranks)]
    assert [answer[2] for answer in answers] == [0 if number == failing else 2 for number in range(RANKS)]
    replayed = run(ranks, [rank.decode(2) for rank in ranks])
    assert replayed[0] == replayed[1] == [("draft", 2), ("verify", 2), ("draft-extend", 2)]
    assert [rank.graphs.rounds for rank in ranks] == [0, 0]


@pytest.mark.parametrize("num_steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_what_the_ranks_have_is_not_copied_from_the_host_in_a_capture(crossings, num_steps):
    """A graph would read again, in every round, where SGLang had the counts when it was captured."""
    rank, _ = ranks = two(crossings, num_steps)
    inputs, forward = RoundInputs.allocate(4, "cuda"), rank.worker.rounds._capture_kind._forward
    batch = exchanged(ranks, [each.decode(2) for each in ranks])[0]
    template, future_map = template_of(batch, Kind(), rank.worker), rank.fake.future_map()
    crossings.found.clear()
    run_on(inputs, template, future_map, forward)
    assert crossings.found == []
    with mock.patch("nsa_backend.adapters.dsa.rounds.own_round.without_copies_from_host", contextlib.nullcontext):
        run_on(inputs, template, future_map, forward)  # as outside a capture
    assert crossings.found == ["aten._to_copy.default"] * 2 * 3
