"""SGLang's EAGLE worker with its whole round in one graph: draft, verify, acceptance and draft-extend.

The round that is captured is SGLang's own: its worker runs once, on a batch of static tensors, while the stream is capturing.
Its three graphs join as child nodes, and what it launches between them is recorded as it is. So nothing of the worker is
written twice, and a batch that one graph cannot serve goes through the very same code.

A graph gathers from SGLang's FutureMap and scatters to it by itself, so SGLang's own calls of these are left out for a batch
that a graph serves.

Rounds of each kind of batches (`served.Kind`) are graphs of their own. All that may be served are captured before a scheduler
says that it is ready, and again where SGLang exchanges what they were captured with. A rank of DP attention without a request
replays one of them with padding alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload

from nsa_backend.adapters.dsa.layer_front.short import are_short, variants_of
from nsa_backend.adapters.dsa.rounds import pages
from nsa_backend.adapters.dsa.rounds.by_release import release
from nsa_backend.adapters.dsa.rounds.capture import Capture, settled_free_bytes, without_garbage_collection
from nsa_backend.adapters.dsa.rounds.own_round import (
    CapturedGraphs,
    give_padding_a_past,
    result_of,
    sampling_parameters,
    template_of,
)
from nsa_backend.adapters.dsa.rounds.ranks import is_idle_round, most_requests, ranks_problem
from nsa_backend.adapters.dsa.rounds.served import KINDS, Kind, Reasons, batch_problem, is_decode
from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.kernels.round_tensors import RoundInputs
from nsa_backend.releases import ROUND_COUNTS
from nsa_backend.round_graph.child_graphs import kept_graphs
from nsa_backend.round_graph.graphs import GraphRecorder, Recorder, RoundGraphs

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
CAPTURE = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.capture_one"


class Phase(Enum):
    """Of the batch that SGLang's scheduler is at, in this order where a graph serves it."""

    SGLANGS = auto()  # its own path, or no round
    RESOLVED = auto()  # what the last round left was not gathered: a graph does it
    RUN = auto()  # a graph has left its results in the FutureMap
    CAPTURING = auto()


@dataclass(frozen=True)
class Round:
    """A round, from SGLang's gather of what the last one has left to its scatter of what this one leaves."""

    phase: Phase
    batch: Any = None  # SGLang's ScheduleBatch, once resolved
    kind: Kind | None = None
    bonus_tokens: torch.Tensor | None = None  # of a round that was run: what SGLang then hands over to be scattered


NO_ROUND, CAPTURING = Round(Phase.SGLANGS), Round(Phase.CAPTURING)


@dataclass(frozen=True)
class Captured:
    """Rounds of one kind, and what they were captured with."""

    graphs: RoundGraphs
    made_of: CapturedGraphs


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
        self._worker = worker
        self._capture_kind = Capture(worker, forward, backends, recorder)
        self._round = NO_ROUND
        self._captured: dict[Kind, Captured] = {}  # in the order of `KINDS`
        self._reasons = Reasons()
        self._future_map: FutureMap | None = None
        self._idle_batch: Any = None
        self._forward_stream: Any = None

    # What is captured

    def start(self, scheduler: Any) -> None:
        """Capture every kind that may be served; all ranks call it when their schedulers are about to be ready."""
        if self._future_map is not None:
            return
        self._future_map, self._forward_stream = scheduler.future_map, scheduler.forward_stream_ctx
        ranks = scheduler.dp_attn_adapter
        self._idle_batch = ranks.maybe_prepare_mlp_sync_batch(ranks.get_idle_batch())
        future_map, target = self._future_map, self._worker.target_worker.model_runner
        future_map._resolve_spec_extras = partial(self._resolve, future_map._resolve_spec_extras)
        future_map.stash = partial(self._stash, future_map.stash)
        recapture = partial(self._recapture, target.weight_updater.recapture_cuda_graph)
        target.weight_updater = dataclasses.replace(target.weight_updater, recapture_cuda_graph=recapture)
        self._capture(KINDS)

    def follow_thresholds(self) -> None:
        """Capture sampled rounds anew where drafts are accepted by other thresholds now; all ranks call it."""
        stale = [kind for kind, captured in self._captured.items() if captured.made_of.problem(self._worker, kind)]
        if stale:
            self._drop(stale)
            self._capture(stale)

    def _recapture(self, original: Callable[[], None]) -> None:
        """Around what SGLang's weight updater captures anew of the target, which may need the memory of our copies."""
        self._drop(KINDS)
        original()
        self._capture(KINDS)

    def _drop(self, kinds: Iterable[Kind]) -> None:
        settled_free_bytes(self._future_map.device)  # a replay may be under way
        for kind in kinds:
            self._captured.pop(kind, None)

    @torch.no_grad()  # as SGLang's captures: what is made in inference mode could not be written outside of it
    def _capture(self, kinds: Iterable[Kind]) -> None:
        with self._forward_stream, without_garbage_collection():
            sizes = self._capture_kind.sizes()
            if not sizes:
                return
            self._round = CAPTURING
            try:
                give_padding_a_past(self._future_map, self._worker)
                variants = variants_of(self._worker)
                for kind in kinds:
                    if kind.short and (variants is None or kind.of_any_length not in self._captured):
                        continue
                    template = template_of(self._idle_batch, kind, self._worker)
                    if batch_problem(template) or ranks_problem(template, self._worker):
                        continue
                    of_kind = [size for size in sizes if not kind.short or size <= variants.largest]
                    graphs = self._capture_kind(kind, of_kind, template, self._future_map)
                    if graphs is not None:
                        self._captured[kind] = Captured(graphs, CapturedGraphs(self._worker))
            finally:
                self._round = NO_ROUND

    # Around SGLang's calls

    def _resolve(self, original: Callable, batch: Any) -> None:
        """Around `FutureMap._resolve_spec_extras`: a graph gathers by itself."""
        if self._round.phase is Phase.CAPTURING:
            original(batch)
            return
        kind, problem = self.choose(batch)
        if problem is not None:
            self._reasons.tell(problem)
        self._round = NO_ROUND if kind is None else Round(Phase.RESOLVED, batch, kind)
        if kind is None:
            original(batch)

    def has_resolved(self, batch: Any) -> bool:
        """Whether a graph is to run the forward of this batch."""
        return self._round.phase is Phase.RESOLVED and self._round.batch is batch

    def run(self) -> Any:
        """Replay the resolved round; returns SGLang's GenerationBatchResult, its tokens on the host once the round is done."""
        batch, kind = self._round.batch, self._round.kind
        sampling = sampling_parameters(batch.sampling_info) if kind.sampled else None
        inputs = RoundInputs(batch.req_pool_indices, batch.seq_lens, sampling)
        result = result_of(self._captured[kind].graphs.replay(inputs, at_least=most_requests(batch)))
        self._published(batch)
        self._round = Round(Phase.RUN, batch, kind, result.next_draft_input.bonus_tokens)
        return result

    def _stash(self, original: Callable, future_indices: torch.Tensor, payload: RelayPayload) -> None:
        """Around `FutureMap.stash`: a graph has scattered already."""
        if self._round.phase is Phase.RUN and payload.bonus_tokens is self._round.bonus_tokens:
            self._round = NO_ROUND
        else:
            original(future_indices, payload)

    def _published(self, batch: Any) -> None:
        """What SGLang does on the host when a round publishes its lengths; of no request it publishes none.

        Its scheduler then waits for the whole round before it writes what rounds read.
        """
        future_map = self._future_map
        if len(batch.seq_lens):
            if future_map.publish_ready is None:  # SGLang makes it where it first publishes
                future_map.publish_ready = torch.get_device_module(future_map.device).Event()
            future_map.publish_ready.record()
            future_map._publish_fresh = True
        release().wait_for_all_after(getattr(self._worker, release().last_reader))

    def replays(self) -> dict[str, int]:
        """Rounds by kind that were one graph, since these were captured; short ones count among those of any length too."""
        found = {str(kind): captured.graphs.replays for kind, captured in self._captured.items()}
        for kind, captured in self._captured.items():
            if kind.short:
                found[str(kind.of_any_length)] += captured.graphs.replays
        return found

    # The choice

    def choose(self, batch: Any) -> tuple[Kind | None, str | None]:
        """Of which kind the graph is that serves this batch, or why its round is three graphs; what is no round has neither."""
        if not self._captured:  # the log has said why
            return None, None
        if is_idle_round(batch):
            kind = next(iter(self._captured))  # it takes what was captured for requests
        elif is_decode(batch):
            kind, problem = Kind.of(batch), batch_problem(batch)
            if problem is not None:
                return None, problem
            if kind not in self._captured:
                return None, f"none of {kind} was captured"
            shared = self._worker.draft_worker.seed_dsa_topk_from_draft_extend
            if shared and not batch.spec_info.future_dsa_topk_indices_available:
                return None, "its drafts have no selection yet that all steps share"
        else:
            return None, None
        problem = ranks_problem(batch, self._worker) or self._problem(batch, kind)
        if problem is not None:
            return None, problem
        short = kind._replace(short=True)
        if short in self._captured and batch.reqs and self._problem(batch, short) is None:  # with the variants of its capture
            short_requests = are_short(batch.reqs, variants_of(self._worker).index_topk)
            return (short if short_requests else kind), None
        return kind, None

    def _problem(self, batch: Any, kind: Kind) -> str | None:
        """Why the graphs of a kind that was captured do not serve this batch of it, or None."""
        captured = self._captured[kind]
        problem = captured.made_of.problem(self._worker, kind)
        if problem is None and most_requests(batch) > captured.graphs.sizes[-1]:
            problem = f"it has more requests than the {captured.graphs.sizes[-1]} of the largest one captured of {kind}"
        return problem


def with_rounds(worker_class: type, backends: tuple[type, ...], recorder: Callable[[], Recorder] = GraphRecorder) -> type:
    """SGLang's EAGLE worker class, whose rounds are one graph where `served` allows it.

    Hooks SGLang's captures, its scheduler and what it prepares before a round too, so it must come before any is used.

    Args:
        worker_class: SGLang's.
        backends: our attention backends.
        recorder: builds what captures.
    """
    hook(CAPTURE, _capture_kept, HookType.AROUND)
    hook(f"{SCHEDULER}.get_init_info", _before_ready, HookType.AROUND)
    hook(f"{SCHEDULER}.get_internal_state", _with_counts, HookType.AROUND)
    hook(f"{SCHEDULER}.set_internal_state", _with_other_thresholds, HookType.AROUND)
    if release().counts_in_kv:
        hook(pages.PREPARE, pages.prepare, HookType.AROUND)

    class RoundWorker(worker_class):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            self.rounds = Rounds(self, super().forward_batch_generation, backends, recorder)

        def forward_batch_generation(self, batch: Any, *args: Any, **options: Any) -> Any:
            if self.rounds.has_resolved(batch):
                return self.rounds.run()
            return super().forward_batch_generation(batch, *args, **options)

    return RoundWorker


def _before_ready(original: Callable, scheduler: Any) -> dict[str, Any]:
    """Around what a scheduler says once it is ready."""
    rounds = getattr(scheduler.draft_worker, "rounds", None)
    if rounds is not None:
        rounds.start(scheduler)
    return original(scheduler)


def _with_counts(original: Callable, scheduler: Any, request: Any) -> Any:
    """Around what a scheduler answers for /server_info."""
    answer = original(scheduler, request)
    rounds = getattr(scheduler.draft_worker, "rounds", None)
    if rounds is not None:
        answer.internal_state[ROUND_COUNTS] = rounds.replays()
    return answer


def _with_other_thresholds(original: Callable, scheduler: Any, request: Any) -> Any:
    """Around what a scheduler does for /set_internal_state."""
    answer = original(scheduler, request)
    rounds = getattr(scheduler.draft_worker, "rounds", None)
    if rounds is not None:
        rounds.follow_thresholds()
    return answer


def _capture_kept(original: Callable, *args: Any, **options: Any) -> None:
    with kept_graphs():
        original(*args, **options)
