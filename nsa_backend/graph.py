"""Replay buffers and the recorded metadata launch of captured forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from nsa_backend import host
from nsa_backend.buffers import MetadataBuffers
from nsa_backend.metadata import NSAMetadata, step_metadata
from nsa_backend.modes import plan_for
from nsa_backend.writer import MetadataWriter


@dataclass(frozen=True)
class CapturedBatch:
    """What one captured graph reads and writes."""

    metadata: NSAMetadata
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    launch: Callable[[], None]  # what the graph has recorded
    check: Callable[[], None]  # MetadataWriter.check of the tensors that the graph reads


class CapturedMetadata:
    """Metadata of the graphs of one backend. All batch sizes of a mode share one set of buffers.

    What a capture will write is known before it; the launch is kept here and made inside it, where the generation of SGLang
    gives the backend its turn (`host`). A replay then costs no launch: the graph reads the runner's static `seq_lens` and
    `req_pool_indices` itself. Under --debug-cuda-graph SGLang replays by calling what it captured; then the launch of that very
    batch is made again.
    """

    def __init__(self, writer: MetadataWriter):
        self._writer = writer
        self._max_requests = self._max_rows = 0
        self._buffers: dict[host.ForwardMode, MetadataBuffers] = {}
        self._batches: dict[tuple[host.ForwardMode, int], CapturedBatch] = {}
        self._launch: Callable[[], None] | None = None
        self._first_layer: int | None = None

    def reserve(self, max_requests: int, max_rows: int) -> None:
        """Set the largest captured batch; what was captured for another size is forgotten."""
        self._max_requests, self._max_rows = max_requests, max_rows
        self._buffers.clear()
        self._batches.clear()

    def capture(
        self,
        mode: host.ForwardMode,
        num_requests: int,
        num_rows: int,
        *,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        extend_lens: torch.Tensor | None,
    ) -> NSAMetadata:
        """Views for a graph of `num_requests` requests and the launch that fills them; tensors are the runner's own."""
        plan = plan_for(mode, num_requests, num_rows)
        if mode not in self._buffers:
            self._buffers[mode] = self._writer.replay_buffers(plan_for(mode, self._max_requests, self._max_rows))
        read = {"seq_lens": seq_lens, "req_pool_indices": req_pool_indices, "extend_lens": extend_lens}
        self._launch = partial(self._writer.write, plan, self._buffers[mode], **read)
        metadata = step_metadata(plan, self._buffers[mode])
        self._batches[mode, num_requests] = CapturedBatch(
            metadata, seq_lens, req_pool_indices, self._launch, partial(self._writer.check, plan, **read)
        )
        return metadata

    def is_first_layer(self, layer_id: int) -> bool:
        """Whether a captured forward runs on the host and begins at `layer_id`, the first layer that ever asked."""
        if self._launch is None:
            return False
        if self._first_layer is None:
            self._first_layer = layer_id
        return layer_id == self._first_layer

    def launch(self) -> None:
        """Make the launch of the captured forward that runs on the host: in warm-ups, the capture, and such replays."""
        self._launch()

    def forget_launch(self) -> None:
        """An eager forward follows, whose first layer must not write the metadata of a graph."""
        self._launch = None

    def replay(
        self, mode: host.ForwardMode, num_requests: int, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor
    ) -> NSAMetadata:
        """Metadata of a captured graph; raises ValueError where it was not captured or reads other tensors."""
        self.forget_launch()
        batch = self._batches.get((mode, num_requests))
        if batch is None:
            raise ValueError(
                f"no graph of {num_requests} requests was captured for {mode.name}: there is no metadata to replay"
            )
        for name, captured, given in (
            ("seq_lens", batch.seq_lens, seq_lens),
            ("req_pool_indices", batch.req_pool_indices, req_pool_indices),
        ):
            if captured.data_ptr() != given.data_ptr():
                raise ValueError(
                    f"the graph of {num_requests} requests for {mode.name} reads the {name} it was captured with, and the "
                    "replay brings another tensor: it would attend with the lengths of an earlier batch"
                )
        batch.check()
        self._launch = batch.launch
        return batch.metadata
