"""How whole rounds are captured: kind by kind, within a share of the memory that is free, and on all ranks or on none."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.model_executor.runner import freeze_gc
from sglang.srt.runtime_context import get_parallel

from nsa_backend.adapters.dsa.layer_front.short import SWITCH as SHORT_SWITCH
from nsa_backend.adapters.dsa.layer_front.short import in_short_graphs
from nsa_backend.adapters.dsa.rounds.by_release import graphs_of, release
from nsa_backend.adapters.dsa.rounds.own_round import run_on
from nsa_backend.adapters.dsa.rounds.ranks import gather, least_of_ranks
from nsa_backend.adapters.dsa.rounds.served import SAMPLED_SWITCH, SWITCH, Kind, worker_problem
from nsa_backend.environment import switched_on
from nsa_backend.round_graph.graphs import Recorder, RoundGraphs

logger = logging.getLogger(__name__)

MIB = 2**20
FLOAT_BYTES = 4
VOCABULARIES = 3
"""Tensors of probabilities, float32 [rows, vocabulary], alive at once in SGLang's verification, and then in its log-softmax:
what a step reads and writes, and one for what the allocator cannot join."""
SHARE_OF_FREE, UNASKED_SHARE_OF_FREE = 0.5, 0.125
"""Of the memory that is free, at most so much goes to the rounds of a kind, and to those with probabilities that nobody asked
for: prefills may still want the rest."""


class Outcome(IntEnum):
    """Of a capture; the least over the ranks holds for all of them."""

    FAILED = 0
    TOO_MUCH = 1  # memory below what is to stay free
    CAPTURED = 2


class Capture:
    """Captures the rounds of one worker. All ranks that run forwards together call it for the same kinds in the same order."""

    def __init__(self, worker: Any, forward: Callable[..., Any], backends: tuple[type, ...], recorder: Callable[[], Recorder]):
        """Nothing is captured yet; the arguments are those of `Rounds`."""
        self._worker, self._forward, self._backends, self._new_recorder = worker, forward, backends, recorder
        self._recorder: Recorder | None = None
        self._warm: dict[Kind, set[int]] = {}  # sizes of which a round has run

    def sizes(self) -> list[int]:
        """Batch sizes to capture, in ascending order.

        Empty where the worker, or that of another rank, cannot have such graphs, and the log says why: SGLang times forwards on
        one rank alone, for one.
        """
        problem = worker_problem(self._worker, self._backends)
        if least_of_ranks(problem is None):
            return captured_sizes(self._worker)
        problem = problem or "another rank can have none"
        log = logger.warning if switched_on(SWITCH) else logger.info
        log("nsa_backend: speculative rounds are three CUDA graphs, because %s", problem)
        return []

    def __call__(self, kind: Kind, sizes: list[int], template: Any, future_map: FutureMap) -> RoundGraphs | None:
        """Graphs of rounds of this kind, of as many of these sizes as memory allows; None where there are none.

        Args:
            kind: of the rounds.
            sizes: in ascending order.
            template: a batch of this kind (`own_round.template_of`).
            future_map: of SGLang's scheduler.
        """
        began, device = time.perf_counter(), future_map.device
        free = least_of_ranks(settled_free_bytes(device))
        asked = switched_on(SHORT_SWITCH) if kind.short else kind.logprobs or not kind.sampled or switched_on(SAMPLED_SWITCH)
        switch, instead = SAMPLED_SWITCH, "are three CUDA graphs"
        if kind.short:
            switch, instead = SHORT_SWITCH, "are graphs for requests of any length"
        may_take = (SHARE_OF_FREE if asked else UNASKED_SHARE_OF_FREE) * free
        forward = in_short_graphs(self._worker, self._forward) if kind.short else self._forward
        run = partial(run_on, template=template, future_map=future_map, forward=forward)
        wanted, sizes, outcome, graphs, why = sizes, self._fitting(sizes, kind, may_take), Outcome.TOO_MUCH, None, ""
        if sizes and kind == Kind(sampled=True):
            logger.info(
                "nsa_backend: capturing whole speculative rounds of %s: where FlashInfer has never sampled they wait until it "
                "has compiled that",
                kind,
            )
        while sizes and outcome is Outcome.TOO_MUCH:
            graphs, outcome, why = self._attempt(kind, sizes, run, device, free - may_take)
            if outcome is not Outcome.CAPTURED:
                graphs = None
                gc.collect()
                settled_free_bytes(device)
            if outcome is Outcome.TOO_MUCH:
                sizes = sizes[: len(sizes) // 2]
        if outcome is Outcome.FAILED:
            logger.warning(
                "nsa_backend: rounds of %s %s, because their capture failed, %s; %.0f MiB were free: lower "
                "--mem-fraction-static where memory ran out",
                kind,
                instead,
                why,
                free / MIB,
            )
            return None
        if sizes != wanted:
            logger.warning(
                "nsa_backend: rounds of more than %d %s %s, because more would take over %.0f MiB, their "
                "share of the %.0f MiB that are free: lower --mem-fraction-static for more%s",
                max(sizes, default=0),
                kind,
                instead,
                may_take / MIB,
                free / MIB,
                "" if asked else f", or set {switch}=1, which gives them half of what is free in place of an eighth",
            )
        if graphs is not None:
            seconds, taken = time.perf_counter() - began, (free - settled_free_bytes(device)) / MIB
            said = "nsa_backend: captured whole speculative rounds of %s %s in %.1f s, %.0f MiB"
            logger.info(said, sizes, kind, seconds, taken)
        return graphs

    def _fitting(self, sizes: list[int], kind: Kind, may_take: float) -> list[int]:
        """The sizes whose probabilities alone take no more; the largest one counts, whose memory the others use."""
        if not (kind.sampled or kind.logprobs):
            return sizes
        rows = self._worker.speculative_num_draft_tokens
        of_a_request = VOCABULARIES * rows * self._worker.target_worker.model_config.vocab_size * FLOAT_BYTES
        return [size for size in sizes if size * of_a_request <= may_take]

    def _attempt(
        self, kind: Kind, sizes: list[int], run: Callable[..., Any], device: torch.device, stays_free: float
    ) -> tuple[RoundGraphs | None, Outcome, str]:
        """Graphs of these sizes, what came of it on all ranks, and why where one of them failed."""
        graphs, outcome, why = None, Outcome.CAPTURED, "on another rank"

        def failed(error: Exception) -> str:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a word'}"

        try:
            self._recorder = self._recorder or self._new_recorder()
            width, asked = self._worker.speculative_num_draft_tokens, {"sampled": kind.sampled, "logprobs": kind.logprobs}
            graphs = RoundGraphs(sizes, width, device, self._recorder, **asked)
        except Exception as error:
            outcome, why = Outcome.FAILED, failed(error)
        if not least_of_ranks(outcome):
            return None, Outcome.FAILED, why
        try:
            self._warm_up(kind, graphs, run)
            settled_free_bytes(device)
            for _size in graphs.capture(run):
                if free_bytes(device) < stays_free:
                    outcome = Outcome.TOO_MUCH
                    break
        except UnevenRanksError:
            raise
        except Exception as error:
            outcome, why = Outcome.FAILED, failed(error)
        finally:
            # Events recorded in a capture belong to it: the scheduler must not wait for one.
            for runner in (self._worker.target_worker.model_runner, self._worker.draft_worker.draft_runner):
                release().wait_for_all_after(runner)
        return graphs, Outcome(least_of_ranks(outcome)), why

    def _warm_up(self, kind: Kind, graphs: RoundGraphs, run: Callable[..., Any]) -> None:
        """Run what was never run: SGLang's graphs of a round, and all that it launches between them."""
        warm = self._warm.setdefault(kind, set())
        if warm.issuperset(graphs.sizes):
            return
        try:
            graphs.warm_up(run)
        except Exception as error:
            if get_parallel().tp_group.world_size > 1:
                raise UnevenRanksError("a round failed on this rank, and others wait for it in a collective") from error
            raise
        warm.update(graphs.sizes)


class UnevenRanksError(RuntimeError):
    """A forward that ranks run together has failed on one of them: SGLang cannot go on."""


def captured_sizes(worker: Any) -> list[int]:
    """Batch sizes of whole rounds; with N = 1 there is no draft graph.

    Those of which SGLang has captured every graph of a round. Where sizes go by all ranks, those of which it has captured any:
    each graph of a round must then be the one that a rank with three graphs takes, the smallest that holds the largest rank.
    With attention TP the draft steps have fewer sizes than the others, and SGLang pads their part of a round as it always does.
    """
    found = [set(runner.capture_bs) for runner in graphs_of(worker) if runner is not None]
    if not gather(worker):
        return sorted(set.intersection(*found))
    largest = min(max(sizes) for sizes in found)
    return sorted(size for size in set.union(*found) if size <= largest)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """As SGLang's captures: what is garbage is collected before, and nothing meanwhile.

    A pinned block that is freed in a capture would have its event recorded there.
    """
    with freeze_gc(False):
        gc.disable()
        try:
            yield
        finally:
            gc.enable()


def free_bytes(device: torch.device | str) -> int:
    """Free memory of a GPU; 0 elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if torch.device(device).type == "cuda" else 0


def settled_free_bytes(device: torch.device | str) -> int:
    """The same once the GPU is idle and torch has given back what it keeps for later allocations."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return free_bytes(device)
