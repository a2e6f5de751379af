"""Rounds in one graph whose requests want the log-probabilities of their tokens, as those that train on their outputs do."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
from round_sides import same, two_sides
from round_stand_in import SIZES, VOCABULARY, D, decode_batch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from nsa_backend.adapters.dsa.rounds import capture
from nsa_backend.adapters.dsa.rounds.served import SWITCH

pytestmark = pytest.mark.usefixtures("sampled_rounds")


@pytest.fixture
def asked(monkeypatch):
    """One graph a round is asked for."""
    monkeypatch.setenv(SWITCH, "1")


def read(result: GenerationBatchResult, batch: ScheduleBatch) -> list[list[float]] | None:
    """What SGLang's scheduler hands on of a result, whose own copy to the host it calls before."""
    result.copy_done = mock.Mock()
    result.copy_to_cpu(return_logprob=batch.return_logprob, return_hidden_states=False)
    found = result.logits_output.next_token_logprobs
    if found is None:
        return None
    return [row[:accepted] for row, accepted in zip(found.tolist(), result.accept_lens.tolist(), strict=True)]


@pytest.mark.parametrize("greedy", [True, False])
def test_they_are_those_of_three_graphs(asked, greedy):
    theirs, ours = two_sides()
    values = set()
    for number in range(6):
        slots = [2, 4, 9, 5][: 1 + number % 4]
        batch = partial(decode_batch(slots, greedy=greedy), return_logprob=True)
        found = []
        for side in (theirs, ours):
            made = batch()
            found.append((side.run(made), made))
        same(found[1][0], found[0][0], len(slots))
        told = [read(*one) for one in found]
        assert told[0] == told[1]
        values |= {value for row in told[0] for value in row}
    assert ours.replays == 6
    assert len(values) > 6


def test_kinds_of_batches_in_turns(asked):
    """Each has graphs of its own; what one leaves, the others and SGLang's own path take up."""
    theirs, ours = two_sides()
    kinds = [
        *((greedy, {"return_logprob": told}) for greedy in (True, False) for told in (False, True)),
        (True, {"has_grammar": True}),
    ]
    for number in range(20):
        (greedy, fields), requests, found = kinds[number % 5], 1 + number % 4, []
        for side in (theirs, ours):
            made = decode_batch([2, 4, 9, 5][:requests], greedy=greedy)(**fields)
            result = side.run(made)
            found.append((result, read(result, made)))
        same(found[1][0], found[0][0], requests)
        assert found[0][1] == found[1][1]
        assert (found[0][1] is not None) == fields.get("return_logprob", False)
    assert ours.replays == 16


def test_they_stay_until_they_are_read(asked):
    """The overlap scheduler reads a round's when it has launched the next one, and copies from nothing that this writes."""
    theirs, ours = two_sides()
    made = [(decode_batch([2, 4])(return_logprob=True), decode_batch([2, 4])(return_logprob=True)) for _ in range(4)]
    results = [(ours.run(mine), theirs.run(other)) for mine, other in made]
    for (mine, other), (of_mine, of_other) in zip(results, made, strict=True):
        assert read(mine, of_mine) == read(other, of_other)


@pytest.mark.parametrize(
    ("switch", "fields", "reason"),
    [
        (None, {}, "a request asks for log-probabilities, which NSA_BACKEND_ROUND_GRAPH=1 makes one graph"),
        ("1", {"top_logprobs_nums": [0, 3]}, "a request asks for log-probabilities of other tokens than its own"),
        ("1", {"token_ids_logprobs": [None, [7]]}, "a request asks for log-probabilities of other tokens than its own"),
        ("1", {"top_logprobs_nums": [0, 0], "token_ids_logprobs": [None, None]}, None),
    ],
)
def test_which_of_them_are_one_graph(monkeypatch, caplog, switch, fields, reason):
    """No GPU run has had such a graph, so it has to be asked for."""
    caplog.set_level("INFO", "nsa_backend")
    monkeypatch.delenv(SWITCH, raising=False)
    if switch:
        monkeypatch.setenv(SWITCH, switch)
    _, ours = two_sides()
    for _ in range(3):
        ours.run(decode_batch([2, 4])(return_logprob=True, **fields))
    assert ours.replays == (0 if reason else 3)
    said = [message for message in caplog.messages if "three CUDA graphs instead of one" in message]
    head = "nsa_backend: three CUDA graphs instead of one for the rounds of some batches: "
    assert said == ([head + reason] if reason else [])


def test_what_the_log_calls_them(asked, monkeypatch, caplog):
    """Where they find too little memory too: their graphs have tensors over the vocabulary."""
    caplog.set_level("INFO", "nsa_backend")
    for name in ("free_bytes", "settled_free_bytes"):
        monkeypatch.setattr(capture, name, lambda device: 2 * 2 * 3 * D * VOCABULARY * 4)
    _, ours = two_sides()
    for slots in ([2, 4], [2, 4, 5]):
        ours.run(decode_batch(slots)(return_logprob=True))
    assert ours.replays == 1
    full, captured, *_ = (message for message in caplog.messages if "greedy requests with log-probabilities" in message)
    assert full.startswith("nsa_backend: rounds of more than 2 greedy requests with log-probabilities are three CUDA graphs, ")
    fitting = str([size for size in SIZES if size <= 2])
    assert captured.startswith(f"nsa_backend: captured whole speculative rounds of {fitting} greedy requests with log-prob")
