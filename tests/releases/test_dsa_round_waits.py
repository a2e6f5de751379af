"""A whole round of SGLang's own worker neither waits for the GPU nor copies from the host, which would end its capture."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from fake_gpu import fake_gpu, gpu
from graphs_on_fake_gpu import FakeGraphs
from round_on_fake_gpu import FakeGpuWorker
from sampling_kernels import check_sampling, sampling_kernels
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.runner import decode_cuda_graph_runner

from nsa_backend.adapters.dsa.rounds.by_release import release
from nsa_backend.adapters.dsa.rounds.own_round import run_on
from nsa_backend.adapters.dsa.rounds.ranks import without_copies_from_host
from nsa_backend.adapters.dsa.rounds.served import Kind
from nsa_backend.kernels.round_tensors import RoundInputs


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shared", [False, True], ids=["own selections", "shared selection"])
@pytest.mark.parametrize("logprobs", [False, True], ids=["tokens", "log-probabilities"])
@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_a_round_is_launches_alone(num_steps, logprobs, shared, sampled):
    requests = 2
    with fake_gpu() as crossings, sampling_kernels(sampling := mock.Mock(side_effect=check_sampling)):
        fake = FakeGpuWorker(num_steps, requests, shared=shared)
        fake.graphs.logits_dtype = torch.bfloat16 if logprobs and not sampled else torch.float32
        future_map, template = fake.future_map(), fake.template(Kind(sampled, logprobs))
        inputs = RoundInputs.allocate(requests, "cuda", sampled=sampled)
        crossings.found.clear()
        outputs = run_on(inputs, template, future_map, fake.worker.forward_batch_generation)
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


@pytest.mark.skipif(not release().has_ranks, reason="experts in parallel leave rounds three graphs on this release")
@pytest.mark.parametrize("num_steps", [1, 3])
def test_experts_in_parallel_are_told_on_the_gpu_which_rows_are_padding(num_steps):
    """SGLang copies the count from the host, that of all rows of the batch; a replay of fewer requests has another."""
    size, counts = 4, []
    with (
        fake_gpu() as crossings,
        mock.patch.object(forward_batch_info, "enable_num_token_non_padded", return_value=True),
        mock.patch.object(forward_batch_info, "is_pin_memory_available", return_value=False),
    ):
        fake = FakeGpuWorker(num_steps, size, graphs=FakeGraphs(num_steps, [size], experts=True))
        runner = fake.worker.target_worker.model_runner.decode_cuda_graph_runner
        execute = runner.execute
        runner.execute = lambda batch: counts.append(batch.global_num_token_non_padded) or execute(batch)
        future_map, template, inputs = fake.future_map(), fake.template(), RoundInputs.allocate(size, "cuda")
        crossings.found.clear()
        run_on(inputs, template, future_map, fake.worker.forward_batch_generation)
        assert crossings.found == []
        assert [(count.device.type, count.shape, count.dtype) for count in counts] == [("cuda", (), torch.int32)]
        with mock.patch("nsa_backend.adapters.dsa.rounds.own_round.without_copies_from_host", nullcontext):
            run_on(inputs, template, future_map, fake.worker.forward_batch_generation)
        assert len(crossings.found) == 2 + (num_steps > 0)


@pytest.mark.skipif(not release().has_ranks, reason="experts in parallel leave rounds three graphs on this release")
@pytest.mark.parametrize(("requests", "rows"), [(0, 0), (3, 12), (8, 32)])
def test_rows_that_are_no_padding_are_counted_from_the_requests(requests, rows):
    inputs, batch = RoundInputs.allocate(8, "cpu"), mock.Mock(input_ids=range(8 * 4), batch_size=8)
    inputs.num_requests.fill_(requests)
    runner = mock.Mock(buffers=mock.Mock(num_token_non_padded=torch.zeros(1, dtype=torch.int32)))
    with (
        mock.patch.object(forward_batch_info, "enable_num_token_non_padded", return_value=True),
        mock.patch.object(decode_cuda_graph_runner, "_dp_tp_moe_masks_pad_rows", return_value=True),
        without_copies_from_host(inputs),
    ):
        forward_batch_info.ForwardBatch._init_num_token_non_padded(batch, device="cuda", is_draft_worker=False)
        decode_cuda_graph_runner.DecodeCudaGraphRunner._set_dp_real_num_tokens(runner, 32)
    assert batch.global_num_token_non_padded.tolist() == rows
    assert runner.buffers.num_token_non_padded.tolist() == [rows]


def test_ranks_agree_on_what_was_sampled_inside_the_round():
    """The first rank's tokens, accepted drafts and their number go to the others, as in a round of three graphs."""
    with fake_gpu() as crossings, sampling_kernels(mock.Mock(side_effect=check_sampling), ranks=2) as group:
        fake = FakeGpuWorker(3, 2)
        future_map, template = fake.future_map(), fake.template(Kind(sampled=True))
        inputs = RoundInputs.allocate(2, "cuda", sampled=True)
        crossings.found.clear()
        run_on(inputs, template, future_map, fake.worker.forward_batch_generation)
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
