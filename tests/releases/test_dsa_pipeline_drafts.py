"""Drafts under pipeline parallelism, through SGLang's own relay between stages: a request's first round has none.

That is so with either backend (docs/host_defects.md); the case "two GPUs, pipeline parallel with drafts" has floors for it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

RIDS = ["first", "second"]
SAMPLED, FIRST_DRAFTS = torch.tensor([11, 21]), torch.tensor([[12], [22]])
CHAINS = torch.tensor([[31, 32, 33, 34], [41, 42, 43, 44]])


class Stage(SchedulerPPMixin):
    """A scheduler of one stage, with what the relay asks of it."""

    _pp_spec_relay = True

    def __init__(self, first: bool):
        self.pp_group = SimpleNamespace(is_first_rank=first, is_last_rank=not first)
        observer = SimpleNamespace(sampling_observer=None)
        self.tp_worker = SimpleNamespace(model_runner=observer)


@pytest.fixture
def spec():
    """SGLang's options of three draft steps."""
    with envs.SGLANG_ENABLE_PP_SPEC.override(True), get_context().override_server_args(
        speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_num_draft_tokens=4, speculative_eagle_topk=1
    ):  # fmt: skip
        yield


def live_batch() -> SimpleNamespace:
    """A batch of two requests that have their whole prompt."""
    lengths = torch.tensor([100, 200])
    return SimpleNamespace(
        reqs=[SimpleNamespace(rid=rid) for rid in RIDS], spec_algorithm=SpeculativeAlgorithm.EAGLE, return_logprob=False,
        contains_last_prefill_chunk=True, spec_info=None, input_ids=None, seq_lens=lengths, seq_lens_cpu=lengths,
        seq_lens_sum=300,
    )  # fmt: skip


def relayed(stage: Stage, batch: SimpleNamespace, result: GenerationBatchResult) -> torch.Tensor:
    """Tokens [requests, 4] that `stage` verifies in the next round, once the last stage has sent `result`."""
    sent = Stage(first=False)._pp_prepare_tensor_dict(result, batch)
    ran = SimpleNamespace(fwd_batch=batch, can_run_cuda_graph=False, fpm_timing=None, verify_out_cache_loc=None)
    stage._pp_prep_batch_result(batch, ran, PPProxyTensors(sent))
    return batch.spec_info.tokens


def draft_input() -> EagleDraftInput:
    """What draft-extend leaves for the next drafts: among it the first of them."""
    return EagleDraftInput(
        topk_p=torch.ones(2, 1), topk_index=FIRST_DRAFTS, hidden_states=torch.zeros(2, 8), bonus_tokens=SAMPLED
    )  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
def test_only_a_verify_round_relays_its_drafts(spec, first):
    """Of a prefill each stage keeps the sampled token and zeros, whatever the last one has drafted; then come drafts."""
    stage, batch = Stage(first), live_batch()
    drafted = {
        "next_verify_chain": CHAINS.flatten(),
        "next_verify_parent_list": torch.tensor([[-1, 0, 1]] * 2),
        "next_verify_top_scores_index": torch.tensor([[0, 1, 2]] * 2),
    }
    prefill = GenerationBatchResult(next_token_ids=SAMPLED, next_draft_input=draft_input(), **drafted)
    assert relayed(stage, batch, prefill).tolist() == [[11, 0, 0, 0], [21, 0, 0, 0]]
    verified = GenerationBatchResult(
        next_token_ids=torch.zeros(8, dtype=torch.int64), accept_lens=torch.tensor([1, 1]), next_draft_input=draft_input(),
        new_seq_lens=torch.tensor([101, 201]), **drafted,
    )  # fmt: skip
    assert relayed(stage, batch, verified).tolist() == CHAINS.tolist()
