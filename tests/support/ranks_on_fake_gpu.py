"""Ranks of DP attention on GPUs that are not there: SGLang's own exchange of what they have, and its own worker on each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_gpu import gpu
from graphs_on_fake_gpu import FakeGraphs
from round_on_fake_gpu import FakeGpuWorker
from round_sides import scheduler_of
from round_stand_in import generate
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler_components import dp_attn
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_backend.adapters.dsa.rounds import capture, worker
from nsa_backend.adapters.dsa.rounds.served import Kind
from nsa_backend.adapters.dsa.rounds.worker import with_rounds
from nsa_backend.round_graph import graphs

RANKS = 2


@contextlib.contextmanager
def captures_on_fake_gpu() -> Iterator[None]:
    """Kernels do nothing, and there is memory."""
    with contextlib.ExitStack() as stack:
        for module, names in ((capture, ("free_bytes", "settled_free_bytes")), (worker, ("settled_free_bytes",))):
            for name in names:
                stack.enter_context(mock.patch.object(module, name, return_value=2**40))
        for name in ("fill_round_inputs", "store_round_results"):
            stack.enter_context(mock.patch.object(graphs, name))
        stack.enter_context(mock.patch.object(capture, "freeze_gc", contextlib.nullcontext))
        yield


class OnFakeGpu(eagle_worker_v2.EAGLEWorkerV2):
    """SGLang's worker, put together by `FakeGpuWorker`."""

    def __init__(self, fake: FakeGpuWorker):
        vars(self).update(vars(fake.worker))


class PlainRequest(SimpleNamespace):
    """Asks for nothing that SGLang looks for."""

    def __getattr__(self, name: str) -> None:
        return None


class Parts:
    """Captures nothing: replaying a round is replaying what SGLang replayed while the round was captured."""

    def __init__(self, graphs: FakeGraphs):
        self.graphs = graphs

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        before = len(self.graphs.replayed)
        returned = function()
        parts = self.graphs.replayed[before:]
        del self.graphs.replayed[before:]

        def replay() -> None:
            self.graphs.rounds += 1
            self.graphs.replayed.extend(parts)

        return replay, returned


class FakeRank:
    """One rank, and what its scheduler keeps."""

    def __init__(self, num_steps: int, sizes: list[int], *, one_graph: bool, draft_sizes: list[int] | None = None):
        """Build inside `fake_gpu`."""
        self.graphs = FakeGraphs(num_steps, sizes, ranks=RANKS, draft_sizes=draft_sizes)
        self.graphs.rounds = 0  # rounds of one graph
        self.fake = FakeGpuWorker(num_steps, max(sizes), graphs=self.graphs)
        build = with_rounds(OnFakeGpu, (mock.Mock,), lambda: Parts(self.graphs)) if one_graph else OnFakeGpu
        self.worker = build(self.fake)
        self.one_graph = one_graph
        self.future_map = self.fake.future_map()

    def decode(self, requests: int, *, sampled: bool = False, **fields: Any) -> ScheduleBatch | None:
        """The batch of this rank's requests before the exchange; None where it has none."""
        if not requests:
            return None
        batch = self.fake.batch(sampled=sampled)
        asked = SimpleNamespace(top_k=TOP_K_ALL if sampled else 1)
        batch.reqs = [PlainRequest(rid=f"request {i}", seqlen=9, sampling_params=asked) for i in range(requests)]
        batch.req_pool_indices = batch.spec_info.future_indices = gpu(requests)
        batch.sampling_info = SimpleNamespace(
            **vars(batch.sampling_info),
            temperatures=gpu(requests, 1, dtype=torch.float32),
            top_ps=gpu(requests, dtype=torch.float32),
            top_ks=gpu(requests, dtype=torch.int32),
            penalizer_orchestrator=SimpleNamespace(is_required=False),
            has_custom_logit_processor=False,
            has_watermark_candidates=False,
        )
        for name, value in fields.items():
            setattr(batch, name, value)
        return batch

    def prefill(self, tokens: int) -> ScheduleBatch:
        """A batch of one prompt."""
        batch = self.decode(1, forward_mode=ForwardMode.EXTEND, extend_num_tokens=tokens, spec_info=None)
        batch.extend_lens, batch.prefix_lens, batch.extend_logprob_start_lens = [tokens], [0], [tokens]
        return batch

    def idle(self) -> ScheduleBatch:
        """What SGLang makes for a rank without a request."""
        batch = ScheduleBatch(reqs=[])
        batch.enable_overlap, batch.spec_algorithm, batch.device = True, SpeculativeAlgorithm.EAGLE, "cuda"
        batch.model_config = self.fake._model
        batch.token_to_kv_pool_allocator, batch.req_to_token_pool = self.fake.allocator, self.fake.pool
        batch.prepare_for_idle()
        return batch

    def run(self, batch: ScheduleBatch) -> list[tuple[str, int]]:
        """What the scheduler does with a batch; returns the graphs that were replayed for it."""
        before = len(self.graphs.replayed)
        self.result = generate(self.worker, self.future_map, batch)
        return self.graphs.replayed[before:]

    def takes(self, batch: ScheduleBatch) -> Kind | None:
        """Of which kind the graph is that would serve this batch."""
        return self.worker.rounds.choose(batch)[0]


def started(ranks: list[FakeRank]) -> list[FakeRank]:
    """The same, ready: what each captures, knowing what all have told one another, has replayed nothing."""
    for rank, idle in zip(ranks, exchanged(ranks, [rank.idle() for rank in ranks]), strict=True):
        if rank.one_graph:
            rank.worker.rounds.start(scheduler_of(rank.worker, rank.future_map, lambda idle=idle: idle))
        rank.graphs.replayed.clear()
    return ranks


def exchanged(ranks: list[FakeRank], batches: list[ScheduleBatch | None]) -> list[ScheduleBatch | None]:
    """SGLang's own exchange: every rank's row, and what each makes of all rows; a rank without a request gets an idle batch."""
    idle = [rank.idle() for rank in ranks]
    gpus = get_parallel().attn_tp_size  # of a rank, whose schedulers all have the same row
    with unset_fake_temporarily():
        group = mock.Mock(world_size=get_parallel().tp_size, active_ranks_cpu=torch.ones(RANKS * gpus, dtype=torch.int64))
    rows: list[torch.Tensor] = []

    class NotYet(Exception):
        """A rank's row has left; those of the others are not here."""

    def leaves(everyone: torch.Tensor, row: torch.Tensor, group: Any) -> None:
        rows.append(row.clone())
        raise NotYet

    def arrives(everyone: torch.Tensor, row: torch.Tensor, group: Any) -> None:
        everyone.copy_(torch.cat([row for row in rows for _ in range(gpus)]))

    def prepare(rank: int) -> ScheduleBatch | None:
        model_runner = SimpleNamespace(
            prefill_cuda_graph_runner=None, spec_algorithm=SpeculativeAlgorithm.EAGLE, model_config=ranks[rank].fake._model
        )
        return dp_attn.prepare_mlp_sync_batch_raw(
            batches[rank],
            model_runner=model_runner,
            get_idle_batch=lambda: idle[rank],
            disable_cuda_graph=False,
            require_mlp_tp_gather=True,
            draft_require_mlp_tp_gather=True,
            disable_overlap_schedule=False,
            offload_tags=set(),
        )

    with unset_fake_temporarily(), get_parallel().override(num_dp_ranks=RANKS, tp_group=group):
        for rank in range(RANKS):
            with mock.patch.object(dp_attn, "exchange_sync_rows", leaves):
                try:
                    prepare(rank)
                except NotYet:
                    continue
        with mock.patch.object(dp_attn, "exchange_sync_rows", arrives):
            return [prepare(rank) for rank in range(RANKS)]
