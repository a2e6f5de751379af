"""SGLang's own round on static tensors, which is what a graph of rounds records.

What a round takes from the last one and leaves for the next one is in SGLang's FutureMap, rows by request: its gather and its
scatters are recorded too.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleDraftInput

from nsa_backend.adapters.dsa.rounds.ranks import among_equals
from nsa_backend.adapters.dsa.rounds.release import graphs_of
from nsa_backend.adapters.dsa.rounds.sampling import on_static_tensors
from nsa_backend.kernels.batch_inputs import PADDING_SLOT
from nsa_backend.round_graph.graphs import RoundInputs, RoundOutputs, RoundResults

CARRIED = ("output_tokens_buf", "topk_p_buf", "topk_index_buf", "hidden_states_buf", "dsa_topk_indices_buf")
"""What a FutureMap keeps of a request between rounds; padding's row must hold something that can be computed with."""


OF_REQUESTS = (
    "seq_lens_cpu", "seq_lens_sum", "req_pool_indices_cpu", "orig_seq_lens", "input_ids", "out_cache_loc",
    "top_logprobs_nums", "token_ids_logprobs",
)  # fmt: skip
"""What a batch has by request and a round does not read: of log-probabilities, which ones of tokens that were not chosen."""


class MadeOf:
    """SGLang's graphs of a round, which a captured round has copies of.

    SGLang captures its own of target-verify anew where /update_weights_from_disk asks for it (`recapture_cuda_graph`), and the
    memory of the old ones is then free. Hence no reference here that would keep them.
    """

    def __init__(self, worker: Any):
        self._graphs = [None if runner is None else weakref.ref(runner) for runner in graphs_of(worker)]

    def still_those_of(self, worker: Any) -> bool:
        pairs = zip(self._graphs, graphs_of(worker), strict=True)
        return all(now is None if kept is None else now is not None and kept() is now for kept, now in pairs)


def thresholds() -> tuple[float, float]:
    """By which sampled rounds accept drafts now: numbers that a capture keeps, and that /set_internal_state changes."""
    spec = get_spec()
    return spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc


def clear_padding(future_map: FutureMap) -> None:
    """Zeros in the row that padding gathers."""
    for name in CARRIED:
        buffer = getattr(future_map, name)
        if buffer is not None:
            buffer[PADDING_SLOT] = 0


def template_of(batch: Any) -> Any:
    """A batch of the same kind with nothing of a request in it; `run_on` adds the tensors."""
    template = copy.copy(batch)
    template.reqs = []
    for name in OF_REQUESTS:
        setattr(template, name, None)
    template.multimodal_inputs = None
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
    info = template.sampling_info
    batch.sampling_info = copy.copy(info) if inputs.sampling is None else on_static_tensors(info, inputs.sampling)
    batch.spec_info = EagleDraftInput(
        future_indices=inputs.req_pool_indices,
        future_dsa_topk_indices_available=template.spec_info.future_dsa_topk_indices_available,
    )

    def publish(new_seq_lens: torch.Tensor) -> None:
        future_map.new_seq_lens_buf[inputs.req_pool_indices] = new_seq_lens.to(future_map.new_seq_lens_buf.dtype)

    future_map._resolve_spec_extras(batch)
    result = forward(batch, on_publish=publish)
    future_map.stash(inputs.req_pool_indices, RelayPayload.from_draft_input(result.next_draft_input))
    logprobs = result.logits_output.next_token_logprobs.flatten().float() if template.return_logprob else None
    return RoundOutputs(result.next_token_ids, result.accept_lens, result, logprobs)


def on_host(results: RoundResults) -> Any:
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
