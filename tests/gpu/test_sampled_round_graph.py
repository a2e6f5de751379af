"""Sampled rounds as graphs: random numbers that go on from replay to replay, and SGLang's own verification captured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sampled_drafts import verified

from nsa_backend.kernels.round_tensors import KEEP_ALL_TOP_P, PADDING_TOP_K, RoundInputs, SamplingParameters
from nsa_backend.round_graph.graphs import GraphRecorder, RoundGraphs, RoundOutputs

pytestmark = pytest.mark.gpu

D, VOCABULARY = 4, 2048
SIZES = [1, 2, 8]


def requests_of(*asked: tuple[float, float, int]) -> RoundInputs:
    """A batch of requests of (temperature, top-p, top-k)."""
    temperatures, top_ps, top_ks = (list(column) for column in zip(*asked, strict=True))
    rows = torch.arange(1, len(asked) + 1, device="cuda")
    parameters = SamplingParameters(
        torch.tensor(temperatures, device="cuda")[:, None],
        torch.tensor(top_ps, device="cuda"),
        torch.tensor(top_ks, dtype=torch.int32, device="cuda"),
    )
    return RoundInputs(rows, rows + 100, parameters)


@pytest.mark.usefixtures("side_stream")
def test_random_numbers_go_on_as_they_would_without_graphs():
    """One generator for replays and for what runs between them: no number twice, and the same ones after the same seed."""
    recorded = []

    def drawing(inputs: RoundInputs) -> RoundOutputs:
        size = len(inputs.seq_lens)
        coins = (torch.rand(size, D, device="cuda") * 2**30).int()
        recorded.append(coins)
        return RoundOutputs(coins.flatten(), torch.ones(size, dtype=torch.int32, device="cuda"), None)

    graphs = RoundGraphs(SIZES, D, "cuda", GraphRecorder(), sampled=True)
    graphs.warm_up(drawing)
    assert list(graphs.capture(drawing)) == SIZES[::-1]
    batch = requests_of((1.0, 1.0, PADDING_TOP_K), (0.5, 0.9, 20))

    def sequence() -> list[int]:
        torch.cuda.manual_seed(7)
        drawn = []
        for number in range(50):
            results = graphs.replay(batch)
            torch.cuda.synchronize()
            drawn += results.next_token_ids.tolist()
            if number % 3 == 0:
                drawn += (torch.rand(8, device="cuda") * 2**30).int().tolist()
        return drawn

    first, again = sequence(), sequence()
    assert first == again
    assert len(set(first)) > len(first) - 3  # of 2^30 values, hardly any comes twice


def verification(logits: torch.Tensor, drafts: torch.Tensor, inputs: RoundInputs, *, always: bool = True) -> tuple:
    """SGLang's own, of requests that sample by `inputs`; `always`: top-k and top-p even where nobody asks, as in a graph."""
    top_ps = inputs.sampling.top_ps
    asked = vars(inputs.sampling) | ({"top_ps": torch.where(top_ps >= 1.0, KEEP_ALL_TOP_P, top_ps)} if always else {})
    info = SimpleNamespace(
        **asked,
        is_all_greedy=False,
        need_top_k_sampling=always,
        need_top_p_sampling=always,
        need_min_p_sampling=False,
        has_watermark_candidates=False,
        sampling_seed=None,
        **dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties", "logit_bias")),
    )
    return verified(info, logits, drafts)


@pytest.fixture
def sglang_options():
    """What SGLang's verification asks its process for: options, and a group of one rank."""
    runtime_context = pytest.importorskip("sglang.srt.runtime_context")
    from unittest import mock

    from nsa_backend.releases import ROUND_GRAPHS, installed

    if installed() not in ROUND_GRAPHS:
        pytest.skip(f"SGLang {installed()} has no rounds in one graph")
    from nsa_backend.testing.dsa_calls import publish

    publish(D - 1, D, decode="fa3", prefill="flashmla_sparse")
    group = mock.Mock(world_size=1)
    parallel = runtime_context.get_parallel()
    with (
        mock.patch("sglang.srt.distributed.parallel_state._TP", group),
        parallel.override(tp_group=group, attn_tp_group=group),
    ):
        yield


ASKED = ((0.7, 0.8, PADDING_TOP_K), (1.0, 1.0, 1), (1.3, 1.0, 5), (1.0, 1.0, PADDING_TOP_K))


@pytest.mark.usefixtures("side_stream", "sglang_options")
def test_captured_verification_samples_from_the_target():
    """Frequencies of the first token over many replays, each request by its own parameters, beside the definitions."""
    rng = torch.Generator(device="cuda").manual_seed(1)
    logits = torch.randn(SIZES[-1], D, VOCABULARY, device="cuda", generator=rng) * 2
    drafts = logits.argmax(-1).roll(1, 1)
    batch = requests_of(*ASKED)
    verification(logits[: len(ASKED)], drafts[: len(ASKED)], batch)  # what CUDA compiles is compiled before a capture

    def whole(inputs: RoundInputs) -> RoundOutputs:
        size = len(inputs.seq_lens)
        tokens, accepted = verification(logits[:size], drafts[:size], inputs)
        return RoundOutputs(tokens.flatten(), accepted, None)

    graphs = RoundGraphs(SIZES, D, "cuda", GraphRecorder(), sampled=True)
    graphs.warm_up(whole)
    assert list(graphs.capture(whole)) == SIZES[::-1]
    samples = 4000
    counted = torch.zeros(len(ASKED), VOCABULARY)
    for _ in range(samples):
        results = graphs.replay(batch)
        torch.cuda.current_stream().synchronize()
        counted[torch.arange(len(ASKED)), results.next_token_ids.view(-1, D)[:, 0].long()] += 1
    for request, (temperature, top_p, top_k) in enumerate(ASKED):
        probs = torch.softmax(logits[request, 0].cpu().double() / temperature, -1)
        order = probs.argsort(descending=True)
        probs[order[top_k:]] = 0
        probs /= probs.sum()
        ordered = probs[order]
        probs[order[int((ordered.cumsum(0) - ordered < top_p).sum()) :]] = 0
        expected = probs / probs.sum() * samples
        often = expected > 5
        assert counted[request][expected == 0].sum() <= 2  # a token at the edge of top-p may round to the other side
        chi_square = ((counted[request] - expected)[often] ** 2 / expected[often]).sum()
        assert chi_square < 2 * int(often.sum()) + 20, request


@pytest.mark.usefixtures("side_stream", "sglang_options")
@pytest.mark.parametrize("scale", [0.5, 2.0, 20.0])
def test_filters_that_keep_all_change_nothing(scale):
    """Rounds of one graph always apply them: the same coins then choose the same tokens, but at the edge between two."""
    rng = torch.Generator(device="cuda").manual_seed(2)
    logits = torch.randn(8, D, VOCABULARY, device="cuda", generator=rng) * scale
    drafts = logits.argmax(-1).roll(1, 1)
    inputs = requests_of(*[(1.0, 1.0, PADDING_TOP_K)] * 8)
    differing = 0
    for seed in range(50):
        found = []
        for always in (True, False):
            torch.cuda.manual_seed(seed)
            found.append(verification(logits, drafts, inputs, always=always))
        (tokens, accepted), (plain, plain_accepted) = found
        for request, (mine, theirs) in enumerate(zip(accepted.tolist(), plain_accepted.tolist(), strict=True)):
            differing += mine != theirs or not torch.equal(tokens[request, :mine], plain[request, :mine])
    assert differing <= 2  # of 400


@pytest.mark.usefixtures("side_stream", "sglang_options")
def test_one_token_kept_is_the_greedy_one():
    rng = torch.Generator(device="cuda").manual_seed(3)
    logits = torch.randn(8, D, VOCABULARY, device="cuda", generator=rng)
    best = logits.argmax(-1)
    drafts = torch.cat([torch.zeros(8, 1, dtype=torch.int64, device="cuda"), best[:, :-1]], 1)
    tokens, accepted = verification(logits, drafts, requests_of(*[(1.0, 1.0, 1)] * 8))
    assert torch.equal(tokens, best.int())
    assert accepted.tolist() == [D] * 8
