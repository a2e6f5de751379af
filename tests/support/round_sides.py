"""Two servers for tests of whole rounds: SGLang's own path, and rounds in one graph, recorded on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from round_stand_in import POOL, Backend, D, Recorded, StandInWorker, finished_prefill, generate, sampling_info
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from nsa_backend.adapters.dsa.rounds import capture
from nsa_backend.adapters.dsa.rounds.worker import with_rounds
from nsa_backend.kernels import round_tensors
from nsa_backend.round_graph import graphs


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """What enters and leaves a round goes through the kernels' torch twins, and captures collect no garbage."""
    fill, store = round_tensors.fill_round_inputs_torch, round_tensors.store_round_results_torch
    with (
        mock.patch.multiple(graphs, fill_round_inputs=fill, store_round_results=store),
        mock.patch.object(capture, "freeze_gc", contextlib.nullcontext),
        mock.patch.object(torch.Tensor, "record_stream", mock.Mock()),  # 0.5.17 does not ask whether a tensor is on a GPU
    ):
        yield


def idle_batch(**told: Any) -> ScheduleBatch:
    """SGLang's of no request, once the ranks have told one another what they have."""
    batch = ScheduleBatch(reqs=[])
    batch.forward_mode, batch.enable_overlap, batch.spec_algorithm = ForwardMode.IDLE, True, SpeculativeAlgorithm.EAGLE
    batch.req_pool_indices, batch.device = torch.zeros(0, dtype=torch.int64), "cpu"
    batch.sampling_info = sampling_info([], greedy=True)
    for name, value in told.items():
        setattr(batch, name, value)
    return batch


def scheduler_of(worker: Any, future_map: FutureMap, idle: Callable[[], ScheduleBatch] = idle_batch) -> SimpleNamespace:
    """As much of a scheduler that is about to be ready as rounds look at."""
    ranks = SimpleNamespace(get_idle_batch=idle, maybe_prepare_mlp_sync_batch=lambda batch: batch)
    stream = contextlib.nullcontext()
    return SimpleNamespace(draft_worker=worker, future_map=future_map, dp_attn_adapter=ranks, forward_stream_ctx=stream)


class Side:
    """One server: a worker, and what its scheduler keeps; it is ready from the first batch on."""

    def __init__(self, with_graphs: bool, worker_class: type = StandInWorker):
        recorded = partial(Recorded, self)
        self.with_graphs = with_graphs
        self.worker = (with_rounds(worker_class, (Backend,), recorded) if with_graphs else worker_class)()
        pool = SimpleNamespace(req_to_token=torch.zeros(POOL, 8, dtype=torch.int32))
        self.future_map = FutureMap(torch.device("cpu"), SpeculativeAlgorithm.EAGLE, pool, needs_cpu_seq_lens=False)
        self.sizes: list[int] = []  # of the graphs that were replayed

    @property
    def replays(self) -> int:
        return len(self.sizes)

    def start(self) -> None:
        """What a scheduler does before it is ready."""
        if self.with_graphs:
            told = self.worker.told if self.worker.gathers else {}
            with on_the_cpu():
                self.worker.rounds.start(scheduler_of(self.worker, self.future_map, partial(idle_batch, **told)))

    def exchange(self) -> None:
        """What SGLang does where /update_weights_from_disk asks for it."""
        with on_the_cpu():
            self.worker.target_worker.model_runner.weight_updater.recapture_cuda_graph()

    def run(self, batch):
        """What the scheduler does with a batch."""
        self.start()
        with on_the_cpu():
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


def of_a_pair(patch: pytest.MonkeyPatch) -> None:
    """What SGLang's handover between the servers of a pair asks of a process."""
    from sglang.srt.speculative import eagle_disaggregation

    off = dict.fromkeys(("enable_multi_layer_eagle", "speculative_use_rejection_sampling"), False)
    spec = SimpleNamespace(speculative_eagle_topk=1, speculative_num_steps=3, **off)
    patch.setattr(eagle_disaggregation, "get_spec", lambda: spec)
    patch.setattr(eagle_disaggregation, "should_remap_pd_dsa_seed_to_local_slots", lambda: False)
    patch.setattr(eagle_disaggregation, "get_dsa_seed_metadata_dim", lambda config: 0)
