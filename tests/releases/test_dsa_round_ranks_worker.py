"""Ranks of DP attention: SGLang's own workers replay the same graphs whether a round is one graph or three.

That is what lets each rank choose for itself: all collectives between ranks are inside these graphs.
"""

from __future__ import annotations

from unittest import mock

import pytest
from fake_gpu import fake_gpu
from ranks_on_fake_gpu import RANKS, FakeRank, exchanged
from sampling_kernels import check_sampling, sampling_kernels
from sglang.srt.layers import dp_attention
from sglang.srt.runtime_context import get_parallel

from nsa_backend.adapters.dsa.rounds import worker as round_worker
from nsa_backend.adapters.dsa.rounds.own_round import run_on, template_of
from nsa_backend.adapters.dsa.rounds.rule import SWITCH
from nsa_backend.round_graph import graphs
from nsa_backend.round_graph.graphs import RoundInputs

pytestmark = pytest.mark.usefixtures("sampled_rounds")
SIZES = [1, 2, 3, 4, 8]
EVEN = [2, 4, 8]
"""What SGLang captures of the draft steps with attention TP 2."""
COUNTS_OF_ROUNDS = ((1, 1), (1, 1), (3, 1), (5, 0), (1, 4), (0, 2), (7, 3), (1, 8), (0, 1), (3, 3))


@pytest.fixture
def crossings(monkeypatch):
    monkeypatch.setattr(round_worker, "free_bytes", lambda device: 0)
    for name in ("fill_round_inputs", "fill_sampled_round_inputs", "store_round_results"):
        monkeypatch.setattr(graphs, name, mock.Mock())
    with fake_gpu() as found:
        yield found
    round_worker._ROUNDS.clear()


@pytest.mark.parametrize("draft_sizes", [SIZES, EVEN], ids=["one GPU a rank", "two GPUs a rank"])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_ranks_with_one_graph_and_with_three_meet_in_the_same_collectives(crossings, num_steps, draft_sizes):
    three, one = (
        [FakeRank(num_steps, SIZES, one_graph=one, draft_sizes=draft_sizes) for _ in range(RANKS)] for one in (False, True)
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
    # But the first round of a rank's requests.
    assert [rank.graphs.rounds for rank in one] == [len(COUNTS_OF_ROUNDS) - 1] * RANKS


def run(ranks: list[FakeRank], batches: list) -> list[list[tuple[str, int]]]:
    """What each rank replays for its batch of one iteration."""
    return [rank.run(batch) for rank, batch in zip(ranks, exchanged(ranks, batches), strict=True)]


def two(crossings, num_steps: int = 3) -> list[FakeRank]:
    """Both have run a round of requests, which compiles."""
    ranks = [FakeRank(num_steps, SIZES, one_graph=True) for _ in range(RANKS)]
    run(ranks, [rank.decode(1) for rank in ranks])
    return ranks


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
    monkeypatch.setattr(dp_attention, "is_dp_attention_enabled", lambda: True)
    kernels = sampling_kernels(mock.Mock(side_effect=check_sampling), ranks=2)
    with kernels as of_one_batch, get_parallel().override(tp_group=everyone, tp_size=4, moe_tp_size=4, attn_dp_size=2):
        ranks = two(crossings)
        for _ in range(2):
            replayed = run(ranks, [ranks[0].decode(2, sampled=True), ranks[1].decode(4)])
            assert replayed[0] == replayed[1] == [("draft", 4), ("verify", 4), ("draft-extend", 4)]
    assert [rank.graphs.rounds for rank in ranks] == [1, 2]
    rounds = 1 + len(SIZES)  # SGLang's own first one, and one that is captured of each size
    called = [call[0] for call in of_one_batch.mock_calls]
    assert [name for name in called if not name.startswith("cpu_group.")] == ["broadcast"] * 3 * rounds
    assert called.count("cpu_group.allreduce") == RANKS  # once each, before anything is captured: whether both can
    assert everyone.mock_calls == []


def test_a_rank_without_a_request_replays_the_only_kind_that_it_has(crossings, monkeypatch):
    """Rounds with log-probabilities, of which its own scheduler reads none."""
    monkeypatch.setenv(SWITCH, "1")
    ranks = [FakeRank(3, SIZES, one_graph=True) for _ in range(RANKS)]
    asked = {"return_logprob": True, "top_logprobs_nums": [0, 0], "token_ids_logprobs": [None, None]}
    for _ in range(2):  # the first compiles
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
    run(ranks, [rank.decode(1) for rank in ranks])
    batches = exchanged(ranks, [rank.decode(n) for rank, n in zip(ranks, counts, strict=True)])
    assert [rank.takes(batch) for rank, batch in zip(ranks, batches, strict=True)] == [None, None]


@pytest.mark.parametrize("num_steps", [1, 3])
def test_what_the_ranks_have_is_not_copied_from_the_host_in_a_capture(crossings, num_steps):
    """A graph would read again, in every round, where SGLang had the counts when it was captured."""
    rank, _ = ranks = two(crossings, num_steps)
    inputs, rounds = RoundInputs.allocate(4, "cuda"), rank.worker.rounds
    template = template_of(exchanged(ranks, [each.decode(2) for each in ranks])[0])
    round_worker._ROUNDS[:] = rank.rounds
    crossings.found.clear()
    rounds._record(inputs, template, rank.future_map)
    assert crossings.found == []
    round_worker._ROUNDS.clear()
    run_on(inputs, template, rank.future_map, rounds._forward)  # as outside a capture
    assert crossings.found == ["aten._to_copy.default"] * 2 * 3
