"""A whole round of SGLang's own worker neither waits for the GPU nor copies from the host, which would end its capture."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from fake_gpu import fake_gpu, gpu
from round_on_fake_gpu import FakeGpuWorker
from sampling_kernels import check_sampling, sampling_kernels

from nsa_backend.adapters.dsa.rounds.own_round import run_on, template_of
from nsa_backend.round_graph.graphs import RoundInputs


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shared", [False, True], ids=["own selections", "shared selection"])
@pytest.mark.parametrize("logprobs", [False, True], ids=["tokens", "log-probabilities"])
@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_a_round_is_launches_alone(num_steps, logprobs, shared, sampled):
    requests = 2
    with fake_gpu() as crossings, sampling_kernels(sampling := mock.Mock(side_effect=check_sampling)):
        fake = FakeGpuWorker(num_steps, requests, shared=shared)
        fake.graphs.logits_dtype = torch.bfloat16 if logprobs and not sampled else torch.float32
        future_map, batch = fake.future_map(), fake.batch(sampled=sampled)
        batch.return_logprob, batch.top_logprobs_nums, batch.token_ids_logprobs = logprobs, [0] * requests, [None] * requests
        batch.sampling_info.temperatures = gpu(requests, 1, dtype=torch.float32)
        inputs = RoundInputs.allocate(requests, "cuda", sampled=sampled)
        crossings.found.clear()
        outputs = run_on(inputs, template_of(batch), future_map, fake.worker.forward_batch_generation)
        assert crossings.found == []
        assert sampling.call_count == int(sampled)
        assert outputs.next_token_ids.shape == (requests * (num_steps + 1),)
        assert outputs.accept_lens.shape == (requests,)
        assert outputs.next_token_ids.dtype == outputs.accept_lens.dtype == torch.int32
        assert outputs.carried.next_draft_input.hidden_states.shape[0] == requests
        assert (outputs.carried.next_draft_input.dsa_topk_indices is not None) == shared
        if logprobs:
            assert outputs.logprobs.shape == outputs.next_token_ids.shape
            assert outputs.logprobs.dtype == torch.float32
            assert outputs.logprobs.is_contiguous()
        else:
            assert outputs.logprobs is None
    assert fake.replayed == (["draft"] if num_steps > 1 else []) + ["verify", "draft-extend"]


def test_ranks_agree_on_what_was_sampled_inside_the_round():
    """The first rank's tokens, accepted drafts and their number go to the others, as in a round of three graphs."""
    with fake_gpu() as crossings, sampling_kernels(mock.Mock(side_effect=check_sampling), ranks=2) as group:
        fake = FakeGpuWorker(3, 2)
        future_map, batch, inputs = fake.future_map(), fake.batch(sampled=True), RoundInputs.allocate(2, "cuda", sampled=True)
        crossings.found.clear()
        run_on(inputs, template_of(batch), future_map, fake.worker.forward_batch_generation)
        assert [call.args[0].shape for call in group.broadcast.call_args_list] == [(8,), (2, 4), (2,)]
        assert crossings.found == []


@pytest.mark.parametrize(
    "wait", [lambda t: t.sum().item(), lambda t: t.tolist(), lambda t: t[t > 0], lambda t: int(t[0]), torch.nonzero]
)
def test_what_reads_a_value_raises(wait):
    with fake_gpu(), pytest.raises(RuntimeError):
        wait(gpu(4))


@pytest.mark.parametrize(
    "copy",
    [
        lambda t: t.cpu(),
        lambda t: t.to("cpu", non_blocking=True),
        lambda t: torch.tensor([1, 2], device="cuda"),
        lambda t: torch.tensor(3).to("cuda", non_blocking=True),
        lambda t: t.copy_(torch.zeros(4)),
        lambda t: t[[0, 2]],
    ],
)
def test_what_is_copied_is_seen(copy):
    with fake_gpu() as crossings:
        there = gpu(4)
        assert crossings.found == []
        copy(there)
        assert len(crossings.found) == 1
