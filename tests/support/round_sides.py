"""Two servers for tests of whole rounds: SGLang's own path, and rounds in one graph, recorded on the CPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from round_stand_in import POOL, Backend, D, Recorded, StandInWorker, finished_prefill, generate
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from nsa_backend.adapters.dsa.rounds import worker as round_worker


class Side:
    """One server: a worker, and what its scheduler keeps."""

    def __init__(self, with_graphs: bool, worker_class: type = StandInWorker):
        recorded = partial(Recorded, self)
        self.worker = (round_worker.with_rounds(worker_class, (Backend,), recorded) if with_graphs else worker_class)()
        if not with_graphs:
            round_worker._ROUNDS.clear()
        self.rounds = list(round_worker._ROUNDS)
        pool = SimpleNamespace(req_to_token=torch.zeros(POOL, 8, dtype=torch.int32))
        self.future_map = FutureMap(torch.device("cpu"), SpeculativeAlgorithm.EAGLE, pool, needs_cpu_seq_lens=False)
        self.sizes: list[int] = []  # of the graphs that were replayed

    @property
    def replays(self) -> int:
        return len(self.sizes)

    def run(self, batch):
        """What the scheduler does with a batch; the hooks see this side's worker alone."""
        round_worker._ROUNDS[:] = self.rounds
        return generate(self.worker, self.future_map, batch)


def two_sides(worker_class: type = StandInWorker) -> tuple[Side, Side]:
    sides = Side(False, worker_class), Side(True, worker_class)
    for side in sides:
        finished_prefill(side.future_map, seed=7)
    return sides


def same(ours, theirs, requests: int) -> None:
    """Accepted tokens of every request, and their numbers."""
    assert torch.equal(ours.accept_lens, theirs.accept_lens)
    for request in range(requests):
        accepted = slice(request * D, request * D + int(theirs.accept_lens[request]))
        assert torch.equal(ours.next_token_ids[accepted], theirs.next_token_ids[accepted])
