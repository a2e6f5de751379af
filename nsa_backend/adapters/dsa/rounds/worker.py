"""SGLang's EAGLE worker with its whole round in one graph: draft, verify, acceptance and draft-extend.

The round that is captured is SGLang's own: its worker runs once, on a batch of static tensors, while the stream is capturing.
Its three graphs join as child nodes, and what it launches between them is recorded as it is. So nothing of the worker is
written twice, and a batch that one graph cannot serve goes through the very same code.

A graph gathers from SGLang's FutureMap and scatters to it by itself, so SGLang's own calls of these are left out for a batch
that a graph serves.

Rounds of each kind of batches (`kinds`) are graphs of their own, captured when the second batch of the kind comes. A server
that nobody asks to sample captures none of those. A rank of DP attention without a request replays one of what it has captured,
with padding alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload

from nsa_backend.adapters.dsa.rounds import pages
from nsa_backend.adapters.dsa.rounds.kinds import Kind
from nsa_backend.adapters.dsa.rounds.own_round import MadeOf, clear_padding, on_host, run_on, template_of, thresholds
from nsa_backend.adapters.dsa.rounds.ranks import COUNTS, counts_on_host, is_idle_round, most_requests, ranks_problem
from nsa_backend.adapters.dsa.rounds.release import names
from nsa_backend.adapters.dsa.rounds.rule import Reasons, batch_problem, is_decode
from nsa_backend.adapters.dsa.rounds.sampling import free_bytes, parameters, renormalizing
from nsa_backend.adapters.dsa.rounds.sizes import Sizes, noting_memory
from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.round_graph.child_graphs import kept_graphs
from nsa_backend.round_graph.graphs import GraphRecorder, Recorder, RoundGraphs, RoundInputs, RoundOutputs

logger = logging.getLogger(__name__)

FUTURE_MAP = "sglang.srt.managers.overlap_utils.FutureMap"
CAPTURE = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.capture_one"


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
        self._worker, self._forward, self._new_recorder = worker, forward, recorder
        self._recorder: Recorder | None = None
        self._graphs: dict[Kind, RoundGraphs] = {}
        self._warm: set[Kind] = set()  # kinds of which SGLang has run a round
        self._sizes = Sizes(worker, backends)
        self._warming: Any = None  # the first sampled batch, whose forward comes next
        self._served: tuple[Any, Kind] | None = None  # the batch whose forward comes next, where one graph is to run it
        self._reasons = Reasons()
        self._bonus: torch.Tensor | None = None  # of the round that the graph has left in the FutureMap
        self.recording = False
        self._future_map: FutureMap | None = None
        self._made_of: MadeOf | None = None  # what all of `_graphs` have copies of
        self._accepts_by: tuple[float, float] | None = None  # thresholds that sampled graphs keep

    # Around SGLang's calls

    def resolve(self, original: Callable, future_map: FutureMap, batch: Any) -> None:
        """Around `FutureMap._resolve_spec_extras`: a graph gathers by itself."""
        self._future_map = future_map
        kind = None if self.recording else self._kind_for(batch)
        if kind is None:
            original(future_map, batch)
        else:
            self._served = batch, kind

    def stash(self, original: Callable, future_map: FutureMap, future_indices: torch.Tensor, payload: RelayPayload) -> None:
        """Around `FutureMap.stash`: a graph has scattered already."""
        if self._bonus is None or payload.bonus_tokens is not self._bonus:
            original(future_map, future_indices, payload)

    def takes(self, batch: Any) -> Kind | None:
        """Of which kind this batch is where `run` is to run its forward, else None; asked once a forward."""
        served, self._served = self._served, None
        return served[1] if served is not None and served[0] is batch else None

    def prepare(self, batch: Any) -> None:
        """Before SGLang's own forward of a batch: the first sampled one compiles all that a graph of sampled rounds records."""
        warming, self._warming = self._warming, None
        if warming is batch:
            batch.sampling_info = renormalizing(batch.sampling_info)

    def run(self, batch: Any, kind: Kind) -> Any:
        """A round of one graph; returns SGLang's GenerationBatchResult, its tokens on the host once the round is done."""
        if kind not in self._graphs:
            self._capture(batch, kind)
        sampling = parameters(batch.sampling_info) if kind.sampled else None
        inputs = RoundInputs(batch.req_pool_indices, batch.seq_lens, sampling)
        result = on_host(self._graphs[kind].replay(inputs, at_least=most_requests(batch)))
        self._published(batch)
        self._bonus = result.next_draft_input.bonus_tokens
        return result

    def _published(self, batch: Any) -> None:
        """What SGLang does on the host when a round publishes its lengths; of no request it publishes none.

        Its scheduler then waits for the whole round before it writes what rounds read.
        """
        if len(batch.seq_lens):
            self._future_map.publish_ready.record()
            self._future_map._publish_fresh = True
        names().wait_for_all_after(getattr(self._worker, names().last_reader))

    # The choice

    def _kind_for(self, batch: Any) -> Kind | None:
        """Of which kind the graph is that is to serve this batch; None where none is."""
        idle = is_idle_round(batch)
        if not idle and (not is_decode(batch) or self._reasons.left(batch_problem(batch))):
            return None
        self._forget_exchanged()
        if not self._holds(batch, Kind()) or self._reasons.left(ranks_problem(batch, self._worker)):
            return None
        if idle:  # it has not compiled what SGLang launches for requests, and takes what was captured for them
            return next((kind for kind in sorted(self._graphs) if self._holds(batch, kind)), None)
        kind, shared = Kind.of(batch), self._worker.draft_worker.seed_dsa_topk_from_draft_extend
        if shared and not batch.spec_info.future_dsa_topk_indices_available:
            return None
        if kind not in self._warm:  # the first round of a kind compiles what SGLang launches between its graphs
            self._warm.add(kind)
            self._warming = batch if kind.sampled else None
            return None
        return kind if self._holds(batch, kind) else None

    def _holds(self, batch: Any, kind: Kind) -> bool:
        """Whether a round of this kind is captured, or to be captured, of a size that holds the largest rank's batch."""
        sizes = self._sizes.of(kind, self._future_map.device)
        return most_requests(batch) <= max(sizes, default=0)

    def _forget_exchanged(self) -> None:
        """Drop what was captured of things that SGLang has exchanged while it serves: the next batch captures anew."""
        if self._graphs and not self._made_of.still_those_of(self._worker):
            self._graphs.clear()
            self._sizes.look_again()  # the worker may have no graphs now
        elif self._accepts_by is not None and thresholds() != self._accepts_by:
            self._graphs = {kind: graphs for kind, graphs in self._graphs.items() if not kind.sampled}

    # The capture

    def _capture(self, batch: Any, kind: Kind) -> None:
        """Capture a round of every size, of the kind that this batch is."""
        future_map, began, free = self._future_map, time.perf_counter(), free_bytes(self._future_map.device)
        clear_padding(future_map)
        if self._recorder is None:
            self._recorder = self._new_recorder()
        width, sizes = self._worker.speculative_num_draft_tokens, self._sizes.of(kind, future_map.device)
        graphs = RoundGraphs(sizes, width, future_map.device, self._recorder, **kind._asdict())
        with noting_memory(kind, free):
            graphs.capture(partial(self._record, template=template_of(batch), future_map=future_map))
        # Events recorded in a capture belong to it: the scheduler must not wait for one.
        for runner in (self._worker.target_worker.model_runner, self._worker.draft_worker.draft_runner):
            names().wait_for_all_after(runner)
        self._graphs[kind], self._made_of = graphs, MadeOf(self._worker)
        if kind.sampled:
            self._accepts_by = thresholds()
        seconds, taken = time.perf_counter() - began, (free - free_bytes(future_map.device)) / 2**20
        said = "nsa_backend: captured whole speculative rounds of %s %s in %.1f s, %.0f MiB"
        logger.info(said, sizes, kind, seconds, taken)

    def _record(self, inputs: RoundInputs, template: Any, future_map: FutureMap) -> RoundOutputs:
        self.recording, self._bonus = True, None
        try:
            return run_on(inputs, template, future_map, self._forward)
        finally:
            self.recording = False


_ROUNDS: list[Rounds] = []
"""Those of the one worker of this process, for the hooks."""


def with_rounds(worker_class: type, backends: tuple[type, ...], recorder: Callable[[], Recorder] = GraphRecorder) -> type:
    """SGLang's EAGLE worker class, whose rounds are one graph where `rule` allows it.

    Hooks SGLang's FutureMap, its captures and what it prepares before a round too, so it must come before any is used.

    Args:
        worker_class: SGLang's.
        backends: our attention backends.
        recorder: builds what captures.
    """
    hook(f"{FUTURE_MAP}._resolve_spec_extras", partial(_around, "resolve"), HookType.AROUND)
    hook(f"{FUTURE_MAP}.stash", partial(_around, "stash"), HookType.AROUND)
    hook(CAPTURE, _capture_kept, HookType.AROUND)
    if names().has_ranks:
        hook(COUNTS, _count_ranks, HookType.AROUND)
    if names().counts_in_kv:
        hook(pages.PREPARE, pages.prepare, HookType.AROUND)

    class RoundWorker(worker_class):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            self.rounds = Rounds(self, super().forward_batch_generation, backends, recorder)
            _ROUNDS[:] = [self.rounds]

        def forward_batch_generation(self, batch: Any, *args: Any, **options: Any) -> Any:
            kind = self.rounds.takes(batch)
            if kind is not None:
                return self.rounds.run(batch, kind)
            self.rounds.prepare(batch)
            return super().forward_batch_generation(batch, *args, **options)

    return RoundWorker


def _around(method: str, original: Callable, *args: Any) -> None:
    """Around a method of FutureMap: what the rounds of this process make of it, where there are some."""
    if _ROUNDS:
        getattr(_ROUNDS[0], method)(original, *args)
    else:
        original(*args)


def _count_ranks(original: Callable, *args: Any, **options: Any) -> None:
    """Around what SGLang makes of the ranks' counts for a forward."""
    if _ROUNDS and _ROUNDS[0].recording:
        counts_on_host(original, *args, **options)
    else:
        original(*args, **options)


def _capture_kept(original: Callable, *args: Any, **options: Any) -> None:
    with kept_graphs():
        original(*args, **options)
