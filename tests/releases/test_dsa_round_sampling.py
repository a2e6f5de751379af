"""SGLang's own verification of sampled drafts as a round of one graph runs it: static tensors, padding, top-k and top-p always.

The CUDA kernels are torch stand-ins; the rest is SGLang's.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sampled_drafts import verified
from sampling_kernels import sampling_kernels
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams
from sglang.srt.speculative import eagle_utils

from nsa_backend.adapters.dsa.rounds import ranks
from nsa_backend.adapters.dsa.rounds.own_round import sampling_info_of, sampling_parameters
from nsa_backend.adapters.dsa.rounds.served import Kind
from nsa_backend.kernels.round_tensors import PADDING_TOP_K, RoundInputs, fill_round_inputs_torch
from nsa_backend.testing.dsa_calls import publish

D, VOCABULARY = 4, 40
MIXED = ({"temperature": 0.7, "top_p": 0.8}, {"temperature": 0}, {"temperature": 1.3, "top_k": 5}, {})
BATCHES = {
    "nothing asked": ({}, {"temperature": 0.5}),
    "top-p": ({"top_p": 0.9}, {"temperature": 0.6, "top_p": 0.95}, {}),
    "top-k": ({"top_k": 3}, {"temperature": 2.0}),
    "greedy requests too": MIXED,
    "min-p, which SGLang does not look at here": ({"min_p": 0.2}, {"min_p": 0.9, "temperature": 0.8}),
}


@pytest.fixture(autouse=True)
def options():
    publish(D - 1, D, decode="fa3", prefill="flashmla_sparse")


def batch_of(asked: tuple[dict, ...]) -> ScheduleBatch:
    """SGLang's own, of requests that ask for this."""
    unasked = {"custom_logit_processor": None, "return_sampling_mask": False, "sampling_logprobs_mode": None}
    reqs = [SimpleNamespace(sampling_params=SamplingParams(**parameters), **unasked) for parameters in asked]
    for req in reqs:
        req.sampling_params.normalize(None)
    batch = ScheduleBatch(reqs=reqs)
    batch.device, batch.return_logprob = "cpu", False
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, VOCABULARY)
    return batch


def of_requests(asked: tuple[dict, ...]) -> SamplingBatchInfo:
    """SGLang's own, of requests that ask for this."""
    return batch_of(asked).sampling_info.copy_for_forward()


def static(info: SamplingBatchInfo, rows: int, device: str = "cpu") -> SamplingBatchInfo:
    """The same on the static tensors of a round that was captured for `rows`."""
    into, ids = RoundInputs.allocate(rows, device, sampled=True), torch.zeros(len(info), dtype=torch.int64)
    fill_round_inputs_torch(RoundInputs(ids, ids, sampling_parameters(info)), into)
    return sampling_info_of(info, into.sampling)


def coins_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same coins for a request, however many rows of padding there are."""
    coins = torch.rand(100, D + 1, generator=torch.Generator().manual_seed(5))[:rows]
    return coins[:, :D].contiguous(), coins[:, D].contiguous()


@pytest.mark.parametrize("asked", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("padding", [0, 3])
def test_a_captured_round_samples_what_sglang_samples(monkeypatch, asked, padding):
    monkeypatch.setattr(eagle_utils, "_verify_coins", lambda candidates, **_: coins_of(len(candidates)))
    asked = asked * 8
    rng = torch.Generator().manual_seed(3)
    rows = len(asked) + padding
    logits = torch.randn(rows, D, VOCABULARY, generator=rng) * 3
    drafts = logits.argmax(-1).roll(1, 1)
    with sampling_kernels():
        theirs = verified(of_requests(asked), logits[: len(asked)], drafts[: len(asked)])
        ours = verified(static(of_requests(asked), rows), logits, drafts)
    assert torch.equal(ours[1][: len(asked)], theirs[1])
    for request, accepted in enumerate(theirs[1].tolist()):
        assert torch.equal(ours[0][request, :accepted], theirs[0][request, :accepted])
    assert 1 < theirs[1].float().mean() < D  # there are accepted and rejected drafts among them


def filtered(logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = VOCABULARY) -> torch.Tensor:
    """Probabilities of one token by the definitions alone, without ties."""
    if temperature == 0:
        temperature, top_k = 1.0, 1
    probs = torch.softmax(logits.double() / temperature, -1)
    order = probs.argsort(descending=True)
    for keep in (slice(top_k), None):
        ordered = probs[order]
        count = int((ordered.cumsum(0) - ordered < top_p * (1 - 1e-9)).sum())
        probs[order[keep.stop :] if keep else order[count:]] = 0
        probs /= probs.sum()
    return probs


def test_tokens_come_as_often_as_the_target_says():
    """Whatever was drafted, the first token of a round has the target's distribution, as each request filters it."""
    samples = 1500
    rng = torch.Generator().manual_seed(9)
    logits = (torch.randn(len(MIXED), D, VOCABULARY, generator=rng) * 2).repeat(samples, 1, 1)
    drafts = torch.randint(0, 3, (len(logits), D), generator=rng)
    drafts[:, 1] = torch.where(drafts[:, 1] > 0, logits[:, 0].argmax(-1), drafts[:, 1])
    torch.manual_seed(11)
    with sampling_kernels():
        tokens, accepted = verified(static(of_requests(MIXED * samples), len(logits)), logits, drafts)
    assert {1, 2} <= set(accepted.tolist())
    for request, asked in enumerate(MIXED):
        expected = filtered(logits[request, 0], **asked) * samples
        counted = torch.bincount(tokens[request :: len(MIXED), 0], minlength=VOCABULARY)
        assert (counted[expected == 0] == 0).all()
        often = expected > 5
        chi_square = ((counted - expected)[often] ** 2 / expected[often]).sum()
        assert chi_square < 3 * int(often.sum()) + 10


def checked(info: SamplingBatchInfo, requests: int) -> None:
    rows = torch.zeros(requests, dtype=torch.int64)
    RoundInputs(rows, rows, sampling_parameters(info)).check("")


def test_sglangs_parameters_have_the_form_that_a_round_takes():
    """Also of batches that shrank and grew."""
    whole, other = of_requests(MIXED), of_requests(({"top_p": 0.3},))
    for info in (whole, other):
        info.penalizer_orchestrator = mock.Mock(is_required=False)
    checked(whole, len(MIXED))
    whole.filter_batch([0, 3], torch.tensor([0, 3]))
    checked(whole, 2)
    whole.merge_batch(other)
    checked(whole, 3)
    assert whole.top_ps.tolist() == pytest.approx([0.8, 1.0, 0.3])


def test_padding_asks_for_what_a_request_that_asks_nothing_does():
    padding, unasked = (RoundInputs.allocate(1, "cpu", sampled=True) for _ in range(2))
    nothing = torch.zeros(1, dtype=torch.int64)
    fill_round_inputs_torch(RoundInputs(nothing, nothing, sampling_parameters(of_requests(({},)))), unasked)
    padding, unasked = vars(padding.sampling), vars(unasked.sampling)
    assert {name: tensor.tolist() for name, tensor in padding.items()} == {name: t.tolist() for name, t in unasked.items()}
    assert PADDING_TOP_K == TOP_K_ALL


def test_all_ranks_go_by_the_least(monkeypatch):
    """Of those that run forwards together: under DP attention too, where their first rounds meet in collectives."""
    group = mock.Mock(world_size=2)
    monkeypatch.setattr(ranks, "get_parallel", lambda: SimpleNamespace(attn_tp_group=None, tp_group=group))

    def all_reduce(tensor: torch.Tensor, operation: object, group: object) -> None:
        assert (operation, group) == (torch.distributed.ReduceOp.MIN, ranks.get_parallel().tp_group.cpu_group)
        tensor.clamp_(max=5)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert ranks.least_of_ranks(7) == 5
    group.world_size = 1
    assert ranks.least_of_ranks(7) == 7


def test_a_batch_of_which_the_sampled_requests_have_ended_is_greedy_again():
    """SGLang's `filter_batch` leaves it sampled, and a greedy request whose best tokens tie would get one of them by chance."""
    batch = batch_of(MIXED)
    assert Kind.of(batch) == Kind(sampled=True)
    batch.sampling_info.filter_batch([1], torch.tensor([1]))
    batch.reqs = [batch.reqs[1]]
    assert not batch.sampling_info.is_all_greedy
    assert Kind.of(batch) == Kind()
