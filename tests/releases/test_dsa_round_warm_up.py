"""`--warmups round_graphs`, run by SGLang's own loop over warm-ups: what it asks of a server, and that it is enough."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import ClassVar

import pytest
from round_sides import Side
from round_stand_in import D, decode_batch, finished_prefill
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.entrypoints import warmup as sglang_warmups

from nsa_backend.adapters import naive_eagle
from nsa_backend.adapters.dsa.rounds import release, rule, warm_up
from nsa_backend.adapters.installed import adapter
from nsa_backend.releases import ROUND_WARM_UP, installed


class Manager:
    """SGLang's tokenizer manager: a request is known when it comes, and answered when all that came with it have."""

    marks: ClassVar[dict[str, bool]] = {}

    def __init__(self, ranks: int, draft_tokens: int | None):
        options = {"dp_size": ranks, "speculative_num_draft_tokens": draft_tokens}
        self.server_args = SimpleNamespace(**self.marks, **(options if installed() == "0.5.17" else {"resolve_once": None}))
        self.batches: list[list] = []
        self._waiting, self._ranks = [], ranks

    async def generate_request(self, request, http_request):
        request.normalize_batch_and_arguments()
        assert http_request is None
        assert request.is_single
        self._waiting.append(request)
        yield {"text": "the first token"}
        while self._waiting and len(self._waiting) < self._ranks:
            await asyncio.sleep(0)
        if self._waiting:
            self.batches.append(self._waiting)
            self._waiting = []
        yield {"text": "the last one"}


@pytest.fixture
def warmed(monkeypatch):
    """Returns a function that has SGLang run the warm-up by its name, and gives back what the server was sent."""

    monkeypatch.delenv(rule.SWITCH, raising=False)

    def run(mode: str, ranks: int, draft_tokens: int | None) -> list[list]:
        monkeypatch.setattr(release, "get_parallel", lambda: SimpleNamespace(num_dp_ranks=ranks))
        monkeypatch.setattr(release, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=draft_tokens))
        monkeypatch.setattr(sglang_warmups, "_warmup_registry", {})
        warm_up.offer()
        manager = Manager(ranks, draft_tokens)
        asyncio.run(sglang_warmups.execute_warmups(mode, [ROUND_WARM_UP], manager))
        return manager.batches

    return run


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("mode", ["null", "decode"])
def test_every_rank_has_a_request_of_its_own_of_either_kind(warmed, mode, ranks):
    """At once: a rank that captures makes the others wait, and each captures for itself."""
    greedy, sampled = warmed(mode, ranks, D)
    for requests, temperature in ((greedy, 0), (sampled, 1)):
        assert not any(request.return_logprob for request in requests)
        assert [request.routed_dp_rank for request in requests] == list(range(ranks))
        assert {request.sampling_params["temperature"] for request in requests} == {temperature}
        assert {request.bootstrap_host for request in requests} == {None if mode == "null" else FAKE_BOOTSTRAP_HOST}
        assert [request.bootstrap_room for request in requests] == [None if mode == "null" else n for n in range(ranks)]


@pytest.mark.parametrize("way", ["the switch", "NAIVE_EAGLE"])
def test_where_one_graph_is_asked_for_rounds_with_log_probabilities_are_captured_too(warmed, monkeypatch, way):
    if way == "the switch":
        monkeypatch.setenv(rule.SWITCH, "1")
    else:
        monkeypatch.setattr(Manager, "marks", {naive_eagle.MARK: True})
    kinds = [(batch[0].sampling_params["temperature"], batch[0].return_logprob) for batch in warmed("null", 1, D)]
    assert kinds == [(0, False), (0, True), (1, False), (1, True)]


def test_several_tokenizer_processes_do_not_know_it(resolve):
    server_args = resolve(
        "--attention-backend", adapter.BACKEND_NAMES[0], "--warmups", "round_graphs", "--tokenizer-worker-num", "2"
    )
    with pytest.raises(ValueError, match="pass --tokenizer-worker-num 1, or drop the warm-up"):
        server_args.check_server_args()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("draft_tokens", [2, 4, 8])
def test_its_requests_have_rounds_enough_to_capture_where_every_draft_is_accepted(warmed, sampled_rounds, draft_tokens, shared):
    """One round of a kind is SGLang's own; drafts that share a selection have none in a request's first."""
    side = Side(with_graphs=True)
    side.worker.draft_worker.seed_dsa_topk_from_draft_extend = shared
    finished_prefill(side.future_map, seed=3, shared=shared)
    for requests in warmed("null", 1, draft_tokens):
        sampling, before = requests[0].sampling_params, side.replays
        assert sampling["ignore_eos"]
        of_the_prefill = 1
        for round_of_request in range((sampling["max_new_tokens"] - of_the_prefill) // draft_tokens):
            batch = decode_batch([2], greedy=sampling["temperature"] == 0, shared=shared and round_of_request > 0)
            side.run(batch())
        assert side.replays > before


@pytest.mark.parametrize(("mode", "draft_tokens"), [("prefill", D), ("null", None)])
def test_a_server_without_rounds_says_so(warmed, caplog, mode, draft_tokens):
    caplog.set_level("INFO")
    assert warmed(mode, 2, draft_tokens) == []
    assert "nsa_backend: --warmups round_graphs does nothing, because this server has no speculative rounds" in caplog.messages


@pytest.mark.parametrize(("words", "offered"), [([], False), (["voice_chat"], False), (["voice_chat,round_graphs"], True)])
def test_it_is_there_for_a_server_that_is_started_with_it(resolve, monkeypatch, words, offered):
    """SGLang's module of warm-ups is loaded by the process that answers requests, and heavy for any other."""
    monkeypatch.setattr(sglang_warmups, "_warmup_registry", {})
    options = ["--warmups", *words] if words else []
    resolve("--attention-backend", adapter.BACKEND_NAMES[0], *options).check_server_args()
    assert (ROUND_WARM_UP in sglang_warmups._warmup_registry) == offered
