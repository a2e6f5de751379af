"""SGLang's EAGLE worker with its whole round in one graph: draft, verify, acceptance and draft-extend.

The round that is captured is SGLang's own: its worker runs once, on a batch of static tensors, while the stream is capturing.
Its three graphs join as child nodes, and what it launches between them is recorded as it is. So nothing of the worker is
written twice, and a batch that one graph cannot serve goes through the very same code.

What a round takes from the last one and leaves for the next one is in SGLang's FutureMap, rows by request: its gather and its
scatters are captured too, and SGLang's own calls of them are left out for a batch that a graph serves.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.speculative.eagle_info import EagleDraftInput

from nsa_backend.adapters.dsa.rounds.release import names
from nsa_backend.adapters.dsa.rounds.rule import SWITCH, batch_problem, captured_sizes, worker_problem
from nsa_backend.adapters.sglang import HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.environment import switched_on
from nsa_backend.kernels.inputs import PADDING_SLOT
from nsa_backend.round_graph.child_graphs import kept_graphs
from nsa_backend.round_graph.graphs import GraphRecorder, Recorder, RoundGraphs, RoundInputs, RoundOutputs

logger = logging.getLogger(__name__)

FUTURE_MAP = "sglang.srt.managers.overlap_utils.FutureMap"
CAPTURE = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.capture_one"

CARRIED = ("output_tokens_buf", "topk_p_buf", "topk_index_buf", "hidden_states_buf", "dsa_topk_indices_buf")
"""What a FutureMap keeps of a request between rounds; padding's row must hold something that can be computed with."""


class Rounds:
    """The rounds of one worker: which batch a graph serves, and what SGLang leaves out for it."""

    def __init__(
        self,
        worker: Any,
        forward: Callable[..., Any],
        backends: tuple[type, ...],
        recorder: Callable[[], Recorder] = GraphRecorder,
    ):
        """Nothing is captured yet.

        Args:
            worker: SGLang's.
            forward: `forward(batch, on_publish=...)`, the worker's own round.
            backends: our attention backends, whose forwards plan nothing on the host.
            recorder: builds what captures.
        """
        self._worker, self._forward, self._backends, self._recorder = worker, forward, backends, recorder
        self._graphs: RoundGraphs | None = None
        self._served: Any = None  # the batch whose forward comes next
        self._bonus: torch.Tensor | None = None  # of the round that the graph has left in the FutureMap
        self._recording = False
        self._warm = False
        self._sizes: list[int] | None = None  # batch sizes to capture; empty where no batch can be served
        self._future_map: FutureMap | None = None

    # Around SGLang's calls

    def resolve(self, original: Callable, future_map: FutureMap, batch: Any) -> None:
        """Around `FutureMap._resolve_spec_extras`: a graph gathers by itself."""
        if self._recording or not self._serves(future_map, batch):
            original(future_map, batch)
        else:
            self._served, self._future_map = batch, future_map

    def stash(self, original: Callable, future_map: FutureMap, future_indices: torch.Tensor, payload: RelayPayload) -> None:
        """Around `FutureMap.stash`: a graph has scattered already."""
        if self._bonus is None or payload.bonus_tokens is not self._bonus:
            original(future_map, future_indices, payload)

    def takes(self, batch: Any) -> bool:
        """Whether `run` is to run the forward of this batch; asked once a forward."""
        served, self._served = self._served, None
        return served is batch

    def run(self, batch: Any) -> Any:
        """A round of one graph; returns SGLang's GenerationBatchResult, its tokens on the host once the round is done."""
        if self._graphs is None:
            self._capture(batch)
        results = self._graphs.replay(batch.req_pool_indices, batch.seq_lens)
        self._published()
        result = copy.copy(results.carried)  # the scheduler writes on both
        result.next_draft_input = copy.copy(result.next_draft_input)
        result.next_token_ids, result.accept_lens = results.next_token_ids, results.accept_lens
        self._bonus = result.next_draft_input.bonus_tokens
        return result

    def _published(self) -> None:
        """What SGLang does on the host when a round publishes its lengths.

        Its scheduler then waits for the whole round before it writes what rounds read.
        """
        future_map = self._future_map
        future_map.publish_ready.record()
        future_map._publish_fresh = True
        names().wait_for_all_after(getattr(self._worker, names().last_reader))

    # The choice

    def _serves(self, future_map: FutureMap, batch: Any) -> bool:
        if batch_problem(batch) is not None:
            return False
        if self._sizes is None:
            self._sizes = self._sizes_to_capture()
        if len(batch.seq_lens) > max(self._sizes, default=0):
            return False
        shared = self._worker.draft_worker.seed_dsa_topk_from_draft_extend
        if shared and not batch.spec_info.future_dsa_topk_indices_available:
            return False
        if not self._warm:  # the first round compiles what SGLang launches between its graphs
            self._warm = True
            return False
        return True

    def _sizes_to_capture(self) -> list[int]:
        """Empty where the worker cannot have such graphs, and the log says why."""
        problem = worker_problem(self._worker, self._backends)
        if problem is None:
            return captured_sizes(self._worker)
        log = logger.warning if switched_on(SWITCH) else logger.info
        log("nsa_backend: speculative rounds are three CUDA graphs, because %s", problem)
        return []

    # The capture

    def _capture(self, batch: Any) -> None:
        """Capture a round of every size whose three graphs SGLang has captured."""
        future_map, began, free = self._future_map, time.perf_counter(), free_bytes(self._future_map.device)
        for name in CARRIED:
            buffer = getattr(future_map, name)
            if buffer is not None:
                buffer[PADDING_SLOT] = 0
        template = self._template(batch)
        graphs = RoundGraphs(self._sizes, self._worker.speculative_num_draft_tokens, future_map.device, self._recorder())
        graphs.capture(lambda inputs: self._round(template, future_map, inputs))
        # Events recorded in a capture belong to it: the scheduler must not wait for one.
        for runner in (self._worker.target_worker.model_runner, self._worker.draft_worker.draft_runner):
            names().wait_for_all_after(runner)
        self._graphs = graphs
        seconds, taken = time.perf_counter() - began, (free - free_bytes(future_map.device)) / 2**20
        logger.info(
            "nsa_backend: captured whole speculative rounds of %s requests in %.1f s, %.0f MiB", self._sizes, seconds, taken
        )

    def _template(self, batch: Any) -> Any:
        """A batch of padding alone, with nothing of a request in it; `_round` adds the tensors."""
        template = copy.copy(batch)
        template.reqs = []
        template.sampling_info = copy.copy(batch.sampling_info)
        for name in ("seq_lens_cpu", "seq_lens_sum", "req_pool_indices_cpu", "orig_seq_lens", "input_ids", "out_cache_loc"):
            setattr(template, name, None)
        template.multimodal_inputs = None
        return template

    def _round(self, template: Any, future_map: FutureMap, inputs: RoundInputs) -> RoundOutputs:
        """SGLang's own round on static tensors, from the FutureMap to the FutureMap."""
        batch = copy.copy(template)
        batch.seq_lens, batch.req_pool_indices = inputs.seq_lens, inputs.req_pool_indices
        batch.spec_info = EagleDraftInput(
            future_indices=inputs.req_pool_indices,
            future_dsa_topk_indices_available=template.spec_info.future_dsa_topk_indices_available,
        )

        def publish(new_seq_lens: torch.Tensor) -> None:
            future_map.new_seq_lens_buf[inputs.req_pool_indices] = new_seq_lens.to(future_map.new_seq_lens_buf.dtype)

        self._recording, self._bonus = True, None
        try:
            future_map._resolve_spec_extras(batch)
            result = self._forward(batch, on_publish=publish)
            future_map.stash(inputs.req_pool_indices, RelayPayload.from_draft_input(result.next_draft_input))
        finally:
            self._recording = False
        return RoundOutputs(result.next_token_ids, result.accept_lens, result)


def free_bytes(device: torch.device | str) -> int:
    """Free memory of a GPU; 0 elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if torch.device(device).type == "cuda" else 0


_ROUNDS: list[Rounds] = []
"""Those of the one worker of this process, for the hooks."""


def with_rounds(worker_class: type, backends: tuple[type, ...], recorder: Callable[[], Recorder] = GraphRecorder) -> type:
    """SGLang's EAGLE worker class, whose rounds are one graph where `rule` allows it.

    Hooks SGLang's FutureMap and its captures too, so it must come before either is used.

    Args:
        worker_class: SGLang's.
        backends: our attention backends.
        recorder: builds what captures.
    """
    hook(f"{FUTURE_MAP}._resolve_spec_extras", partial(_around, "resolve"), HookType.AROUND)
    hook(f"{FUTURE_MAP}.stash", partial(_around, "stash"), HookType.AROUND)
    hook(CAPTURE, _capture_kept, HookType.AROUND)

    class RoundWorker(worker_class):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            self.rounds = Rounds(self, super().forward_batch_generation, backends, recorder)
            _ROUNDS[:] = [self.rounds]

        def forward_batch_generation(self, batch: Any, *args: Any, **options: Any) -> Any:
            if self.rounds.takes(batch):
                return self.rounds.run(batch)
            return super().forward_batch_generation(batch, *args, **options)

    return RoundWorker


def _around(method: str, original: Callable, *args: Any) -> None:
    """Around a method of FutureMap: what the rounds of this process make of it, where there are some."""
    if _ROUNDS:
        getattr(_ROUNDS[0], method)(original, *args)
    else:
        original(*args)


def _capture_kept(original: Callable, *args: Any, **options: Any) -> None:
    with kept_graphs():
        original(*args, **options)
