"""Rounds in one graph on a rank of DP attention: what it replays beside ranks that have more, less, or nothing to do.

The worker is a stand-in that computes tokens from all that it is given; that SGLang's own replays the same graphs either way is
in `test_dsa_round_ranks_worker.py`.
"""

from __future__ import annotations

import bisect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import tried
from round_sides import same, two_sides
from round_stand_in import POOL, SIZES, Graphs, StandInWorker, decode_batch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftInput

from nsa_backend.adapters.dsa.rounds import served
from nsa_backend.adapters.dsa.rounds.by_release import RELEASES
from nsa_backend.adapters.dsa.rounds.capture import captured_sizes
from nsa_backend.adapters.dsa.rounds.served import Kind

pytestmark = pytest.mark.usefixtures("sampled_rounds")

KEPT = ("output_tokens_buf", "topk_p_buf", "topk_index_buf", "hidden_states_buf", "new_seq_lens_buf")
CAN = {"can_run_decode_cuda_graph": True, "can_run_dp_draft_cuda_graph": True}


class RankWorker(StandInWorker):
    """A rank's: its graphs are of the size that holds the rank with the most requests."""

    gathers = True
    told = CAN | {"global_num_tokens": [0, 0], "global_num_tokens_for_logprob": [0, 0]}  # by two idle ranks

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[int, list[int]]] = []  # by forward, requests of this rank and of all

    def forward_batch_generation(self, batch, on_publish=None):
        self.seen.append((len(batch.seq_lens), batch.global_num_tokens))
        if not batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish)
        none = torch.zeros(0, dtype=torch.int32)
        drafts = EagleDraftInput(bonus_tokens=none, topk_p=none, topk_index=none, hidden_states=none)
        return GenerationBatchResult(logits_output=None, next_token_ids=none, accept_lens=none, next_draft_input=drafts)


def told(slots: list[int], most: int, *, greedy: bool = True, **fields):
    """A rank's batch of the requests in these rows, beside one with `most`; an idle one where it has none."""
    counts = [len(slots), most]
    fields = CAN | {"global_num_tokens": counts, "global_num_tokens_for_logprob": counts} | fields
    if not slots:
        fields = {"forward_mode": ForwardMode.IDLE, "spec_info": None, "seq_lens": torch.zeros(0, dtype=torch.int64)} | fields
    batch = decode_batch(slots, greedy=greedy)(**fields)
    batch.req_pool_indices = batch.req_pool_indices.long()
    return batch


def smallest(most: int) -> int:
    return SIZES[bisect.bisect_left(SIZES, most)]


ROUNDS = st.lists(
    st.tuples(
        st.lists(st.integers(1, POOL - 1), max_size=SIZES[-1], unique=True),  # rows of this rank's requests
        st.integers(1, SIZES[-1] + 2),  # requests of the other
        st.sampled_from(["greedy", "sampled", "grammar"]),
    ),
    min_size=1,
    max_size=10,
)


@given(rounds=ROUNDS)
@tried(60)
def test_a_rank_in_any_sequence_of_rounds_leaves_what_sglang_leaves(rounds):
    theirs, ours = two_sides(RankWorker)
    replayed = []
    for slots, other, kind in rounds:
        most, sampled = max(len(slots), other), kind == "sampled"
        fields = {"has_grammar": True} if kind == "grammar" else {}
        batches = [told(slots, most, greedy=not sampled, **fields) for _ in range(2)]
        sampled = not batches[0].sampling_info.is_all_greedy
        results = [side.run(batch) for side, batch in zip((theirs, ours), batches, strict=True)]
        same(results[1], results[0], len(slots))
        assert len(results[1].accept_lens) == len(slots)
        for name in KEPT:
            assert torch.equal(*(getattr(side.future_map, name)[1:] for side in (theirs, ours))), name
        if most > SIZES[-1]:
            continue
        if kind != "grammar" or not slots:
            replayed.append(smallest(most))
    assert ours.sizes == replayed


def test_a_round_is_captured_as_one_of_ranks_that_have_as_much():
    """Then SGLang's graphs in it are of the round's own size, whatever the ranks had when it was captured."""
    _, ours = two_sides(RankWorker)
    ours.start()
    warmed, captured = ours.worker.seen[: len(SIZES)], ours.worker.seen[len(SIZES) : 2 * len(SIZES)]
    assert warmed == [(size, [size, size]) for size in SIZES]
    assert captured == warmed[::-1]


def test_an_idle_rank_replays_padding_alone():
    _, ours = two_sides(RankWorker)
    ours.run(told([], 1))
    ours.run(told([3, 5], 2))
    before = {name: getattr(ours.future_map, name)[1:].clone() for name in KEPT}
    armed, ours.future_map._publish_fresh = ours.future_map.publish_ready, False
    for most in (1, 3, 8):
        result = ours.run(told([], most))
        assert (len(result.next_token_ids), len(result.accept_lens)) == (0, 0)
    assert ours.sizes == [1, 2, 1, 4, 8]
    assert all(torch.equal(getattr(ours.future_map, name)[1:], kept) for name, kept in before.items())
    assert ours.future_map.publish_ready is armed
    assert not ours.future_map._publish_fresh  # no length was published


def test_an_idle_rank_takes_what_it_has_captured():
    _, ours = two_sides(RankWorker)
    ours.start()
    del ours.worker.rounds._captured[Kind()]
    for slots, most, greedy in (([4, 5], 2, False), ([], 4, True), ([4, 5], 2, True)):
        ours.run(told(slots, most, greedy=greedy))
    assert ours.sizes == [2, 4]


@pytest.mark.parametrize(
    "fields",
    [
        {"global_num_tokens": None},
        {"can_run_decode_cuda_graph": False},
        {"can_run_dp_draft_cuda_graph": False},
        {"is_extend_in_batch": True},
    ],
)
@pytest.mark.parametrize("slots", [[2, 4], []])
def test_rounds_that_sglang_runs_itself(slots, fields):
    theirs, ours = two_sides(RankWorker)
    ours.run(told([2, 4], 2)), theirs.run(told([2, 4], 2))
    same(ours.run(told(slots, 2, **fields)), theirs.run(told(slots, 2, **fields)), len(slots))
    assert ours.sizes == [2]


def test_the_other_rank_is_above_the_captured_sizes():
    _, ours = two_sides(RankWorker)
    for most in (2, 2, SIZES[-1] + 1, SIZES[-1]):
        ours.run(told([2], most))
        ours.run(told([], most))
    assert ours.sizes == [2, 2, 2, 2, 8, 8]


def test_graphs_that_go_by_this_rank_alone():
    """As with DeepEP, a dense TP size and an LM head of each rank together: graphs of two ranks then have different sizes."""
    _, ours = two_sides(type("Alone", (RankWorker,), {"gathers": False}))
    for _ in range(3):
        ours.run(told([2, 4], 5))
        ours.run(told([], 5))
    assert ours.sizes == []


CAPTURED = ([1, 2, 3, 4, 6, 8], [2, 4, 8], [1, 2, 3, 4, 6, 8, 12])


def worker_of(captured: tuple, gathers: bool) -> SimpleNamespace:
    """Runners that have captured these sizes of target-verify, draft steps and draft-extend."""
    verify, draft, extend = (Graphs(capture_bs=sizes, require_mlp_tp_gather=gathers) for sizes in captured)
    return SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(decode_cuda_graph_runner=verify)),
        draft_worker=SimpleNamespace(cuda_graph_runner=draft, cuda_graph_runner_for_draft_extend=extend),
    )


def test_every_graph_of_a_round_is_the_one_that_a_rank_with_three_takes():
    """With attention TP 2 the draft steps are captured for even sizes alone; SGLang pads each of its graphs for itself."""
    rounds = captured_sizes(worker_of(CAPTURED, gathers=True))
    assert rounds == [1, 2, 3, 4, 6, 8]
    for most in range(1, rounds[-1] + 1):
        of_the_round = rounds[bisect.bisect_left(rounds, most)]
        for sizes in CAPTURED:
            taken = [sizes[bisect.bisect_left(sizes, requests)] for requests in (most, of_the_round)]
            assert taken[0] == taken[1], (most, sizes)
    assert captured_sizes(worker_of(CAPTURED, gathers=False)) == [2, 4, 8]


@pytest.mark.parametrize(
    ("switch", "counts", "one"), [("1", [2, 2], True), ("0", None, False), (None, None, True), (None, [2, 2], False)]
)
def test_sampled_rounds_under_dp_attention_are_asked_for(monkeypatch, switch, counts, one):
    """No GPU run has shown that they sample alike there; greedy ones are one graph without being asked."""
    monkeypatch.delenv(served.SAMPLED_SWITCH, raising=False)
    if switch:
        monkeypatch.setenv(served.SAMPLED_SWITCH, switch)
    sampled, greedy = (decode_batch([2, 4], greedy=greedy)(global_num_tokens=counts) for greedy in (False, True))
    assert (served.batch_problem(sampled) is None) is one
    assert served.batch_problem(greedy) is None


@pytest.mark.parametrize(("ranks", "skips", "named"), [(2, "1", True), (2, "0", False), (1, "1", False)])
def test_ranks_that_tell_one_another_nothing(monkeypatch, ranks, skips, named):
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", skips)
    found = served.switches_on(SimpleNamespace(enable_dp_attention=False, attn_dp_size=ranks))
    assert ("SGLANG_SCHEDULER_SKIP_ALL_GATHER" in found) is named


@pytest.mark.parametrize("switch", ["1", None])
def test_releases_whose_ranks_were_not_read(monkeypatch, arguments, switch):
    monkeypatch.delenv(served.SWITCH, raising=False)
    if switch:
        monkeypatch.setenv(served.SWITCH, switch)
    server = arguments(speculative_algorithm="EAGLE", attn_dp_size=2)
    assert served.options_to_change(server) == []
    monkeypatch.setattr(served, "release", lambda: RELEASES["0.5.17"])
    assert served.options_to_change(server) == ["drop --enable-dp-attention or --attn-dp-size"]


@pytest.mark.parametrize("graphs_too", ["1", "0"])
def test_memory_that_is_given_back_with_graphs_in_it(monkeypatch, arguments, graphs_too):
    """Rounds were seen to go on after it came back, beside graphs that were given back as well."""
    monkeypatch.delenv(served.SWITCH, raising=False)
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", graphs_too)
    monkeypatch.setattr(served, "release", lambda: RELEASES["0.5.23"])
    server = arguments(speculative_algorithm="EAGLE", enable_memory_saver=True)
    assert served.changes_needed(server) == []
    monkeypatch.setenv(served.SWITCH, "1")
    assert served.changes_needed(server) == []
