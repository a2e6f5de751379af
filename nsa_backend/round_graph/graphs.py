"""The captured rounds: one graph a batch size, which reads static tensors and writes its results into pinned memory."""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from nsa_backend.kernels.round_tensors import RoundInputs, fill_round_inputs, read_slot, slot_size, store_round_results

RING_DEPTH = 4
"""Rounds whose results the host may still read: the overlap scheduler is one behind, and this leaves room."""


@dataclass(frozen=True)
class RoundOutputs:
    """What a captured round leaves at fixed addresses."""

    next_token_ids: torch.Tensor  # int32 [size * D]; of each request the accepted tokens, then what is not to be read
    accept_lens: torch.Tensor  # int32 [size]; the target's own token included
    carried: Any  # whatever else the caller wants back of the round that was captured
    logprobs: torch.Tensor | None = None  # float32 [size * D], of those tokens, where they are asked for


@dataclass(frozen=True)
class RoundResults:
    """Results of one replay, in pinned host memory; to be read once the replay is done and before `RING_DEPTH` more follow."""

    next_token_ids: torch.Tensor  # int32 [requests * D]
    accept_lens: torch.Tensor  # int32 [requests]
    carried: Any
    logprobs: torch.Tensor | None  # float32 [requests, D]


class Recorder(Protocol):
    """Records what a function does on the GPU."""

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Run `function` once, recording; returns what does it again, and what `function` returned."""


class GraphRecorder:
    """Captures CUDA graphs, all in one memory pool of their own.

    Not in the pool of the graphs that become children: there the allocator could give the pieces between them memory that a
    child overwrites. The rounds of different sizes and kinds run one after the other and may share.

    Random numbers are those of torch's generator of the device: each replay takes the next ones, as the recorded calls would.
    """

    def __init__(self):
        self._pool: tuple[int, int] | None = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if not self._graphs:  # torch gives a pool up with its last graph, and captures into it no more
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        try:
            # Relaxed: other threads of the process may allocate meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            returned = function()
            graph.capture_end()
        except BaseException:
            self._abandon(graph)
            raise
        self._graphs.add(graph)
        return graph.replay, returned

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, so that torch allocates and records events as it did before.

        What torch (2.14.1) leaves open where CUDA refuses to end a capture is closed here: while its allocator takes a capture
        for under way, it gives no block back that another stream has used.
        """
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
            return
        with contextlib.suppress(RuntimeError):  # closed already, or never opened
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)


class RoundGraphs:
    """Graphs of whole rounds of one kind, by captured batch size."""

    def __init__(
        self,
        sizes: list[int],
        num_draft_tokens: int,
        device: torch.device | str,
        recorder: Recorder,
        *,
        sampled: bool = False,
        logprobs: bool = False,
    ):
        """Allocate what the graphs share.

        Args:
            sizes: batch sizes to capture.
            num_draft_tokens: D, tokens a request verifies.
            device: where rounds run.
            recorder: captures.
            sampled: whether rounds are given `SamplingParameters`.
            logprobs: whether they leave log-probabilities of their tokens.
        """
        self.sizes = sorted(sizes)
        self._width = num_draft_tokens
        self._device = device
        self._recorder = recorder
        self._sampled, self._logprobs = sampled, logprobs
        pinned = torch.device(device).type == "cuda"
        values = slot_size(self.sizes[-1] * num_draft_tokens, self.sizes[-1], logprobs=logprobs)
        self._ring = torch.zeros(RING_DEPTH, values, dtype=torch.int32, pin_memory=pinned)
        self._launches_on_gpu = torch.zeros(1, dtype=torch.int64, device=device)
        self._launches = 0
        self._inputs = {size: RoundInputs.allocate(size, device, sampled=sampled) for size in self.sizes}
        self._rounds: dict[int, tuple[Callable[[], None], RoundOutputs]] = {}

    @property
    def replays(self) -> int:
        """Rounds since the capture."""
        return self._launches

    def warm_up(self, run: Callable[[RoundInputs], RoundOutputs]) -> None:
        """Run a round of every size, so that a capture finds all kernels compiled and loaded; `run` as in `capture`."""
        for inputs in self._inputs.values():
            fill_round_inputs(RoundInputs.allocate(1, self._device, sampled=self._sampled), inputs)
            self._whole(run, inputs)
        self._launches_on_gpu.zero_()

    def capture(self, run: Callable[[RoundInputs], RoundOutputs]) -> Iterator[int]:
        """Capture every size, the largest first, whose memory the smaller ones then use; yields each once it is captured.

        Args:
            run: a whole round on these inputs; must neither wait for the GPU nor read anything on the host that changes from
                round to round.
        """
        for size in reversed(self.sizes):
            self._rounds[size] = self._recorder.record(partial(self._whole, run, self._inputs[size]))
            yield size

    def _whole(self, run: Callable[[RoundInputs], RoundOutputs], inputs: RoundInputs) -> RoundOutputs:
        outputs = run(inputs)
        assert (outputs.logprobs is None) != self._logprobs
        results = outputs.next_token_ids, outputs.accept_lens
        store_round_results(*results, self._ring, self._launches_on_gpu, outputs.logprobs)
        return outputs

    def replay(self, batch: RoundInputs, at_least: int = 0) -> RoundResults:
        """Run a round of the smallest captured size that holds the batch: two launches, and nothing waits.

        Before a graph that draws random numbers torch writes their seed and offset, which is two more.

        Args:
            batch: its own tensors, of as many rows as it has requests; it may have none.
            at_least: requests that the size must hold too, where other ranks have more.
        """
        requests = len(batch.seq_lens)
        size = self.sizes[bisect.bisect_left(self.sizes, max(requests, at_least))]
        launch, outputs = self._rounds[size]
        fill_round_inputs(batch, self._inputs[size])
        launch()
        slot = self._ring[self._launches % RING_DEPTH]
        self._launches += 1
        ids, lens, logprobs = read_slot(slot, size * self._width, size, logprobs=self._logprobs)
        if logprobs is not None:
            logprobs = logprobs.view(size, self._width)[:requests]
        return RoundResults(ids[: requests * self._width], lens[:requests], outputs.carried, logprobs)
