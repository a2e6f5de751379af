"""The rule by which a batch runs its speculative round in one graph, and which servers can have such graphs at all."""

from __future__ import annotations

from typing import Any

from nsa_backend.environment import switched_on
from nsa_backend.releases import round_graph_problem

SWITCH = "NSA_BACKEND_ROUND_GRAPH"

NEEDED: dict[str, tuple[tuple, str]] = {
    "speculative_algorithm": (("EAGLE", "NEXTN"), "pass --speculative-algorithm EAGLE"),
    "disable_overlap_schedule": ((False,), "drop --disable-overlap-schedule"),
    "disable_cuda_graph": ((False,), "drop --disable-cuda-graph"),
    "enable_dp_attention": ((False,), "drop --enable-dp-attention"),
    "enable_two_batch_overlap": ((False,), "drop --enable-two-batch-overlap"),
    "pp_size": ((1,), "pass --pp-size 1"),
    "ep_size": ((1,), "pass --ep-size 1"),
    "disaggregation_mode": (("null",), "drop --disaggregation-mode"),
    "speculative_adaptive": ((False,), "drop --speculative-adaptive"),
    "speculative_use_rejection_sampling": ((False,), "drop --speculative-use-rejection-sampling"),
    "enable_lora": ((None, False), "drop --enable-lora"),
    "enable_memory_saver": ((False,), "drop --enable-memory-saver"),
    "enable_eplb": ((False,), "drop --enable-eplb"),
    "elastic_ep_backend": ((None,), "drop --elastic-ep-backend"),
    "expert_distribution_recorder_mode": ((None,), "drop --expert-distribution-recorder-mode"),
    "enable_return_routed_experts": ((False,), "drop --enable-return-routed-experts"),
    "enable_return_indexer_topk": ((False,), "drop --enable-return-indexer-topk"),
    "kv_canary": (("none",), "drop --kv-canary"),
    "msprobe_dump_config": ((None,), "drop --msprobe-dump-config"),
    "debug_tensor_dump_output_folder": ((None,), "drop --debug-tensor-dump-output-folder"),
}
"""Attributes of ServerArgs to the values under which nothing happens on the host, or across ranks, between the graphs of a
round, and to what a user changes for one of them."""


def server_problems(args: Any) -> list[str]:
    """One sentence for each reason why a server of these resolved arguments can have no round graphs."""
    problem = round_graph_problem()
    if problem is not None:
        return [problem]
    if switched_on("NSA_BACKEND_CHECK"):
        return [f"{SWITCH}=1 and NSA_BACKEND_CHECK=1, which looks at every replay on the host, cannot both be: unset one"]
    return [
        f"{SWITCH}=1 cannot be served with these options: {advice}, or unset it"
        for name, (served, advice) in NEEDED.items()
        if getattr(args, name) not in served
    ]


def worker_problem(worker: Any, backends: tuple[type, ...]) -> str | None:
    """Why a worker that SGLang has built can have no round graphs, or None; options alone do not tell.

    `backends` are our attention backends, which plan nothing on the host.
    """
    from sglang.srt.managers import overlap_utils

    target, draft = worker.target_worker.model_runner, worker.draft_worker
    if not all(isinstance(backend, backends) for backend in worker.spec_v2_attn_backends if backend is not None):
        return "another attention backend serves the target or the drafts"
    if overlap_utils._DEBUG_ASSERT:
        return "SGLang checks what rounds leave to one another (SGLANG_IS_IN_CI)"
    if target.decode_cuda_graph_runner is None:
        return "SGLang captured no graph of target-verify"
    if draft.cuda_graph_runner_for_draft_extend is None:
        return "SGLang captured no graph of draft-extend"
    if any(runner.device_timer is not None for runner in (target, draft.draft_runner)):
        return "SGLang times every forward on the GPU"
    if target.model_config.model_is_mrope:
        return "the model's positions have several parts"
    return None


def batch_problem(batch: Any) -> str | None:
    """Why SGLang's own path runs this batch of a server that has round graphs, or None where one graph does.

    Args:
        batch: SGLang's ScheduleBatch, as its scheduler hands it to the forward.
    """
    if not batch.forward_mode.is_decode() or batch.is_extend_in_batch:
        return "it is no plain decode"
    sampling, draft = batch.sampling_info, batch.spec_info
    asked = {
        "a request samples": not sampling.is_all_greedy,
        "a request has a grammar": batch.has_grammar,
        "a request asks for log-probabilities": batch.return_logprob,
        "a request asks for hidden states": batch.return_hidden_states,
        "a request has penalties": sampling.penalizer_orchestrator.is_required,
        "a request biases its logits": sampling.logit_bias is not None,
        "a request brings a logit processor of its own": sampling.has_custom_logit_processor,
        "a request is watermarked": sampling.has_watermark_candidates,
        "a request has images": any(found is not None for found in batch.multimodal_inputs or ()),
        "requests search by beams": batch.beam_tail is not None,
        "its drafts are not ready": draft is None or draft.future_indices is None or not draft.cuda_graph_compatible,
    }
    return next((why for why, holds in asked.items() if holds), None)


def captured_sizes(worker: Any) -> list[int]:
    """Batch sizes of which SGLang has captured every graph of a round; with N = 1 there is no draft graph."""
    draft = worker.draft_worker
    runners = (worker.target_worker.model_runner.decode_cuda_graph_runner, draft.cuda_graph_runner_for_draft_extend)
    runners += (draft.cuda_graph_runner,) if draft.cuda_graph_runner is not None else ()
    return sorted(set.intersection(*(set(runner.capture_bs) for runner in runners)))
