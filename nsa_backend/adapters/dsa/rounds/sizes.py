"""Batch sizes of captured rounds: of which numbers of requests there are graphs, kind by kind."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from nsa_backend.adapters.dsa.rounds.kinds import Kind
from nsa_backend.adapters.dsa.rounds.ranks import gather, least_of_batch
from nsa_backend.adapters.dsa.rounds.release import graphs_of
from nsa_backend.adapters.dsa.rounds.rule import SAMPLED_SWITCH, SWITCH, worker_problem
from nsa_backend.adapters.dsa.rounds.sampling import fitting, least_free_bytes
from nsa_backend.environment import switched_on

logger = logging.getLogger(__name__)


class Sizes:
    """Those of one worker, found when a batch first asks for them."""

    def __init__(self, worker: Any, backends: tuple[type, ...]):
        """Nothing is found yet; `backends` are our attention backends."""
        self._worker, self._backends = worker, backends
        self._found: dict[Kind, list[int]] = {}

    def of(self, kind: Kind, device: torch.device) -> list[int]:
        """In ascending order; empty where no batch can be served. Every rank that has the same batch must ask."""
        if Kind() not in self._found:
            self._found[Kind()] = self._to_capture()
        if kind not in self._found:
            target, width = self._worker.target_worker, self._worker.speculative_num_draft_tokens
            vocabulary, free = target.model_config.vocab_size, least_free_bytes(device)
            self._found[kind] = fitting(self._found[Kind()], width, vocabulary, free, kind)
        return self._found[kind]

    def look_again(self) -> None:
        """Once SGLang has captured its own graphs anew, or has none any more."""
        del self._found[Kind()]

    def _to_capture(self) -> list[int]:
        """Empty where the worker cannot have such graphs, or that of another rank of its batch, and the log says why.

        SGLang times forwards on one of them alone, for one.
        """
        problem = worker_problem(self._worker, self._backends)
        if least_of_batch(problem is None):
            return captured_sizes(self._worker)
        problem = problem or "another rank that has the same requests can have none"
        log = logger.warning if switched_on(SWITCH) else logger.info
        log("nsa_backend: speculative rounds are three CUDA graphs, because %s", problem)
        return []


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
def noting_memory(kind: Kind, free: int) -> Iterator[None]:
    """While rounds are captured: whatever is raised says how many bytes were free, and how a server does without them."""
    if kind.logprobs:
        way = f"without {SWITCH}=1 rounds with log-probabilities are three CUDA graphs"
    elif kind.sampled:
        way = f"{SAMPLED_SWITCH}=0 leaves sampled rounds three CUDA graphs"
    else:
        way = f"{SWITCH}=0 leaves rounds three CUDA graphs, under EAGLE in place of NAIVE_EAGLE"
    try:
        yield
    except Exception as error:
        error.add_note(
            f"nsa_backend: while capturing whole speculative rounds, with {free / 2**20:.0f} MiB free at first: lower "
            f"--mem-fraction-static where memory ran out; {way}"
        )
        raise
