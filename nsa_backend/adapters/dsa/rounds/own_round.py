"""SGLang's own round on static tensors, which is what a graph of rounds records.

What a round takes from the last one and leaves for the next one is in SGLang's FutureMap, rows by request: its gather and its
scatters are recorded too.

SGLang leaves top-k or top-p out of a sampled round where no request of the batch asks for it. A captured round always applies
both: a request that asks for neither keeps every token, which top-p 1 does not promise (`KEEP_ALL_TOP_P`). So one graph a size
serves every sampled batch.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec

from nsa_backend.adapters.dsa.rounds.by_release import graphs_of
from nsa_backend.adapters.dsa.rounds.ranks import among_equals, without_copies_from_host
from nsa_backend.adapters.dsa.rounds.served import Kind
from nsa_backend.kernels.batch_inputs import PADDING_LENGTH, PADDING_SLOT
from nsa_backend.kernels.round_tensors import RoundInputs, SamplingParameters
from nsa_backend.round_graph.graphs import RoundOutputs, RoundResults

OF_REQUESTS = (
    "seq_lens_cpu", "seq_lens_sum", "req_pool_indices_cpu", "orig_seq_lens", "input_ids", "out_cache_loc",
    "top_logprobs_nums", "token_ids_logprobs",
)  # fmt: skip
"""What a batch has by request and a round does not read: of log-probabilities, which ones of tokens that were not chosen."""


class CapturedGraphs:
    """SGLang's graphs of a round, which a captured round has copies of, and the thresholds that it has as numbers.

    SGLang captures its own of target-verify anew where /update_weights_from_disk asks for it (`recapture_cuda_graph`), and the
    memory of the old ones is then free. Hence no reference here that would keep them. /set_internal_state changes thresholds.
    """

    def __init__(self, worker: Any):
        self._graphs = [None if runner is None else weakref.ref(runner) for runner in graphs_of(worker)]
        self._thresholds = thresholds()

    def problem(self, worker: Any, kind: Kind) -> str | None:
        """Why a round of this kind that was captured with these would not do what the worker does now, or None."""
        pairs = zip(self._graphs, graphs_of(worker), strict=True)
        if not all(now is None if kept is None else now is not None and kept() is now for kept, now in pairs):
            return "SGLang has other graphs than rounds were captured with"
        if kind.sampled and self._thresholds != thresholds():
            return "drafts are accepted by other thresholds than rounds were captured with"
        return None


def thresholds() -> tuple[float, float]:
    """By which sampled rounds accept drafts now."""
    spec = get_spec()
    return spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc


def give_padding_a_past(future_map: FutureMap, worker: Any) -> None:
    """Zeros in the row that padding gathers.

    They are left as a prefill leaves its own: before the first one SGLang's FutureMap has no tensors for them.
    """
    draft = worker.draft_worker
    hidden_size, dtype = get_draft_recurrent_hidden_state_spec(draft.draft_runner)
    of_none = EagleDraftInput.create_idle_input(
        future_map.device, hidden_size, dtype, worker.topk, CaptureHiddenMode.LAST, worker.target_worker.model_config.vocab_size
    )
    if draft.seed_dsa_topk_from_draft_extend:
        width = draft.dsa_seed_topk_width
        of_none.dsa_topk_indices = torch.empty((0, width), dtype=torch.int32, device=future_map.device)
    payload = {
        name: None if tensor is None else tensor.new_zeros(1, *tensor.shape[1:])
        for name, tensor in vars(RelayPayload.from_draft_input(of_none)).items()
    }
    row = torch.full((1,), PADDING_SLOT, dtype=torch.int64, device=future_map.device)
    future_map.stash(row, RelayPayload(**payload))
    future_map.new_seq_lens_buf[PADDING_SLOT] = PADDING_LENGTH


def template_of(idle: Any, kind: Kind, worker: Any) -> Any:
    """A decode batch of this kind without a request; `run_on` adds the tensors.

    Args:
        idle: SGLang's idle batch, which knows what the ranks have told one another.
        kind: of the round.
        worker: SGLang's.
    """
    template = copy.copy(idle)
    template.forward_mode, template.return_logprob = ForwardMode.DECODE, kind.logprobs
    for name in OF_REQUESTS:
        setattr(template, name, None)
    template.sampling_info = copy.copy(idle.sampling_info)
    template.sampling_info.is_all_greedy = not kind.sampled
    shared = worker.draft_worker.seed_dsa_topk_from_draft_extend
    template.spec_info = EagleDraftInput(future_indices=idle.req_pool_indices, future_dsa_topk_indices_available=shared)
    return template


def run_on(inputs: RoundInputs, template: Any, future_map: FutureMap, forward: Callable[..., Any]) -> RoundOutputs:
    """A round from the FutureMap to the FutureMap.

    Args:
        inputs: static tensors of the batch.
        template: `template_of` a batch of this kind.
        future_map: of SGLang's scheduler.
        forward: `forward(batch, on_publish=...)`, the worker's own round.
    """
    batch = copy.copy(template)
    batch.seq_lens, batch.req_pool_indices = inputs.seq_lens, inputs.req_pool_indices
    among_equals(batch, len(inputs.seq_lens))
    batch.sampling_info = sampling_info_of(template.sampling_info, inputs.sampling)
    batch.spec_info = copy.copy(template.spec_info)
    batch.spec_info.future_indices = inputs.req_pool_indices

    def publish(new_seq_lens: torch.Tensor) -> None:
        future_map.new_seq_lens_buf[inputs.req_pool_indices] = new_seq_lens.to(future_map.new_seq_lens_buf.dtype)

    with without_copies_from_host(inputs):
        future_map._resolve_spec_extras(batch)
        result = forward(batch, on_publish=publish)
        future_map.stash(inputs.req_pool_indices, RelayPayload.from_draft_input(result.next_draft_input))
    logprobs = result.logits_output.next_token_logprobs.flatten().float() if template.return_logprob else None
    return RoundOutputs(result.next_token_ids, result.accept_lens, result, logprobs)


def sampling_info_of(info: Any, static: SamplingParameters | None) -> Any:
    """SGLang's SamplingBatchInfo of a round that samples by `static`, or of a greedy one: a copy that may be written to."""
    changed = copy.copy(info)
    changed.penalizer_orchestrator = None  # the scheduler's; a forward has none
    if static is not None:
        changed.temperatures, changed.top_ps, changed.top_ks = static.temperatures, static.top_ps, static.top_ks
        changed.need_top_k_sampling = changed.need_top_p_sampling = True
        changed.min_ps = None  # SGLang's verification does not read it
    return changed


def sampling_parameters(info: Any) -> SamplingParameters:
    """Those of a batch, from SGLang's SamplingBatchInfo."""
    return SamplingParameters(info.temperatures, info.top_ps, info.top_ks)


def result_of(results: RoundResults) -> Any:
    """SGLang's GenerationBatchResult of a round, of which the scheduler reads numbers on the host once the round is done.

    The scheduler writes on each of the three that are copied here, and the next replay brings the same again.
    """
    result = copy.copy(results.carried)
    result.next_draft_input = copy.copy(result.next_draft_input)
    result.next_token_ids, result.accept_lens = results.next_token_ids, results.accept_lens
    if results.logprobs is not None:
        result.logits_output = copy.copy(result.logits_output)
        result.logits_output.next_token_logprobs = results.logprobs
    return result
