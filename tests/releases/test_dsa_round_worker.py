"""Whole rounds behind SGLang's own FutureMap: the same tokens, lengths and drafts as its own path leaves, whatever comes.

A stand-in for the worker's round computes tokens from all that it is given, so a row gathered or scattered wrong shows. The
graphs of these tests are recorded on the CPU, where a replay runs the recorded round again on its static tensors.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import tried
from round_sides import Side, same, two_sides
from round_stand_in import POOL, SIZES, D, decode_batch, finished_prefill
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from nsa_backend.adapters.dsa import draft
from nsa_backend.adapters.dsa.rounds import samplers
from nsa_backend.adapters.dsa.rounds import worker as round_worker
from nsa_backend.adapters.dsa.rounds.by_release import release

pytestmark = pytest.mark.usefixtures("sampled_rounds")

BATCHES = st.lists(
    st.tuples(st.lists(st.integers(1, POOL - 1), min_size=1, max_size=SIZES[-1] + 2, unique=True), st.booleans()),
    min_size=1,
    max_size=8,
)


@given(batches=BATCHES)
@tried(40)
def test_any_sequence_of_batches_leaves_what_sglang_leaves(batches):
    theirs, ours = two_sides()
    for slots, greedy in batches:
        batch = decode_batch(slots, greedy=greedy)
        results = [side.run(batch()) for side in (theirs, ours)]
        same(results[1], results[0], len(slots))
        for name in ("output_tokens_buf", "topk_p_buf", "topk_index_buf", "hidden_states_buf", "new_seq_lens_buf"):
            left = [getattr(side.future_map, name)[1:] for side in (theirs, ours)]
            assert torch.equal(*left), name
    served = [slots for slots, _ in batches if len(slots) <= SIZES[-1]]
    assert ours.replays == len(served)


def test_greedy_requests_that_are_left_of_a_sampled_batch_get_what_a_greedy_batch_gets():
    theirs, ours = two_sides()
    batch, left = decode_batch([3, 5, 9])(), decode_batch([3, 5, 9])()
    left.sampling_info.is_all_greedy = False  # as SGLang leaves it
    same(ours.run(left), theirs.run(batch), 3)
    assert ours.replays == 1


def test_padding_never_reaches_a_request_and_stays_short():
    """Many rounds of one request in graphs of two: the padding row's length does not grow from round to round."""
    _, ours = two_sides()
    lengths = []
    for _ in range(12):
        ours.run(decode_batch([3, 5, 9])())
        lengths.append(int(ours.future_map.new_seq_lens_buf[0]))
    assert ours.replays == 12
    assert max(lengths[1:]) <= 1 + D


def test_results_stay_until_they_are_read():
    """The overlap scheduler reads a round's results after it has launched the next one."""
    theirs, ours = two_sides()
    batch = decode_batch([2, 4])
    pairs = [(ours.run(batch()), theirs.run(batch())) for _ in range(3)]
    for mine, other in pairs[1:]:
        same(mine, other, 2)


FIELDS = {
    "has_grammar": True,
    "return_logprob": True,
    "return_hidden_states": True,
    "is_extend_in_batch": True,
    "beam_tail": object(),
    "global_num_tokens": [3, 0],
    "multimodal_inputs": [None, object()],
}
WISHES = ("logit_bias", "has_custom_logit_processor", "has_watermark_candidates")


@pytest.mark.parametrize(("field", "value"), [item for item in FIELDS.items() if item[0] not in release().lacks])
def test_what_sglangs_own_path_runs(caplog, field, value):
    """The log says why, once; a prefill is no round."""
    caplog.set_level("INFO", "nsa_backend")
    theirs, ours = two_sides()
    batch = decode_batch([2, 4])
    same(ours.run(batch()), theirs.run(batch()), 2)
    caplog.clear()
    for _ in range(2):
        same(ours.run(batch(**{field: value})), theirs.run(batch(**{field: value})), 2)
    assert ours.replays == 1
    said = [
        message for message in caplog.messages if "three CUDA graphs instead of one for the rounds of some batches" in message
    ]
    assert len(said) == (field != "is_extend_in_batch")


@pytest.mark.parametrize("name", [name for name in WISHES if name not in release().lacks])
def test_a_request_with_a_wish_of_its_own(name):
    _, ours = two_sides()
    for _ in range(3):
        batch = decode_batch([2, 4])()
        setattr(batch.sampling_info, name, True)
        ours.run(batch)
    assert ours.replays == 0


def test_drafts_that_share_a_selection_get_it_from_round_to_round():
    sides = Side(with_graphs=False), Side(with_graphs=True)
    for side in sides:
        finished_prefill(side.future_map, seed=3, shared=True)
        side.worker.draft_worker.seed_dsa_topk_from_draft_extend = True
    for slots in ([2, 4], [4], [9, 2, 4], [4, 2]):
        theirs, ours = (side.run(decode_batch(slots, shared=True)()) for side in sides)
        same(ours, theirs, len(slots))
        assert ours.next_draft_input.dsa_topk_indices is not None  # the scheduler looks for it
        assert torch.equal(*(side.future_map.dsa_topk_indices_buf[1:] for side in sides))
    assert sides[1].replays == 4


def test_drafts_that_share_a_selection_need_one(caplog):
    caplog.set_level("INFO", "nsa_backend")
    _, ours = two_sides()
    ours.worker.draft_worker.seed_dsa_topk_from_draft_extend = True
    for _ in range(3):
        ours.run(decode_batch([2, 4])())
    assert ours.replays == 0
    assert (
        len([message for message in caplog.messages if "its drafts have no selection yet that all steps share" in message]) == 1
    )


def test_a_batch_of_more_requests_than_the_largest_captured_round(caplog):
    caplog.set_level("INFO", "nsa_backend")
    _, ours = two_sides()
    for requests in (SIZES[-1] + 1, SIZES[-1], SIZES[-1] + 2):
        ours.run(decode_batch(list(range(1, requests + 1)))())
    assert ours.sizes == [SIZES[-1]]
    why = f"it has more requests than the {SIZES[-1]} of the largest one captured of greedy requests"
    assert [message for message in caplog.messages if "of some batches" in message] == [
        f"nsa_backend: three CUDA graphs instead of one for the rounds of some batches: {why}"
    ]


@pytest.mark.parametrize(("switch", "level"), [(None, "INFO"), ("1", "WARNING")])
def test_another_backend_is_said_once(caplog, monkeypatch, switch, level):
    if switch:
        monkeypatch.setenv("NSA_BACKEND_ROUND_GRAPH", switch)
    caplog.set_level("INFO")
    _, ours = two_sides()
    ours.worker.spec_v2_attn_backends = (object(),)
    for _ in range(3):
        ours.run(decode_batch([2, 4])())
    assert ours.replays == 0
    said = [(record.levelname, record.message) for record in caplog.records if "three CUDA graphs" in record.message]
    why = "another attention backend serves the target or the drafts"
    assert said == [(level, f"nsa_backend: speculative rounds are three CUDA graphs, because {why}")]


def test_the_scheduler_gets_no_event_of_a_capture():
    _, ours = two_sides()
    runners = (ours.worker.target_worker.model_runner, ours.worker.draft_worker.draft_runner)
    for runner in runners:
        setattr(runner, release().reads_done, "recorded in the capture")
    ours.start()
    assert [getattr(runner, release().reads_done) for runner in runners] == [None, None]


def test_sglang_builds_this_worker_for_eagle_alone(monkeypatch):
    monkeypatch.setattr(round_worker, "with_rounds", lambda worker_class, backends: ("with rounds", worker_class))
    monkeypatch.setattr(samplers, "compile_meanwhile", lambda: None)
    chosen = partial(draft._round_worker, (), lambda args: args == "can", lambda algorithm, args: "SGLang's")
    assert chosen(SpeculativeAlgorithm.EAGLE, "can") == ("with rounds", "SGLang's")
    assert chosen(SpeculativeAlgorithm.EAGLE, "cannot") == "SGLang's"
    assert chosen(SpeculativeAlgorithm.NGRAM, "can") == "SGLang's"
