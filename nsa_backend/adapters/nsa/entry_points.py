"""The entry points that SGLang 0.5.12 and 0.5.12.post1 call around captures and replays, always outside the graph.

So the metadata launch is recorded when the first layer of the captured forward asks for its indexer metadata, and that of a
draft round at the head of `draft_forward`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nsa_backend.adapters.core import CapturedForwards, CapturedRounds
from nsa_backend.adapters.sglang_types import AttentionBackend, ForwardBatch, ForwardMode
from nsa_backend.kernels.batch_inputs import BatchInputs

if TYPE_CHECKING:
    from sglang.srt.speculative.spec_info import SpecInput


class BackendEntryPoints(CapturedForwards, AttentionBackend):
    """What SGLang calls around captures and replays of one model's forwards."""

    _first_layer: int | None = None
    """The first layer that ever asked in a captured forward: where every captured forward begins."""

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: SpecInput | None,
    ) -> None:
        """Choose what a capture fills. `seq_lens` and `req_pool_indices` are the graph runner's static buffers."""
        ragged = forward_mode.is_draft_extend()  # spec v1: requests extend by different numbers of tokens
        extend_lens = spec_info.num_accept_tokens if ragged else None
        self.before_capture(forward_mode, num_tokens, BatchInputs(seq_lens[:bs], req_pool_indices[:bs], extend_lens))

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: SpecInput | None,
        seq_lens_cpu: torch.Tensor | None,
        out_cache_loc: torch.Tensor | None = None,
        actual_forward_mode: ForwardMode | None = None,
    ) -> None:
        """Nothing on the device: the graph writes its own metadata."""
        self.before_replay(forward_mode, bs, BatchInputs(seq_lens, req_pool_indices))

    def get_indexer_metadata(self, layer_id: int, forward_batch: ForwardBatch) -> object:
        """Called by every layer before it reads any metadata; in a capture, the first layer's call records the launch."""
        if self.runs_captured:
            if self._first_layer is None:
                self._first_layer = layer_id
            if layer_id == self._first_layer:
                self.at_graph_head()
        return self.indexer_metadata(forward_batch)

    def get_verify_buffers_to_fill_after_draft(self) -> list[None]:
        """No tree mask and no positions: one chain of drafts needs neither."""
        return [None, None]


class MultiStepEntryPoints(CapturedRounds):
    """What SGLang calls around captures and replays of a draft round, and what the plugin calls inside it."""

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Choose what a capture fills; `begin_draft_round` records the launch inside it, on the runner's static tensors."""
        self.before_capture(BatchInputs(forward_batch.seq_lens, forward_batch.req_pool_indices))

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: ForwardBatch, bs: int) -> None:
        """Nothing on the device: the draft graph writes its own metadata."""
        self.before_replay(bs)

    def begin_draft_round(self, forward_batch: ForwardBatch) -> None:
        """Runs at the head of every `draft_forward`, which the plugin hooks, inside the graph where one is captured.

        Makes the draft KV locations dense and, where a captured round runs on the CPU, writes the metadata of all steps.
        """
        if forward_batch.forward_mode.is_idle() or not forward_batch.batch_size:
            return
        forward_batch.out_cache_loc = contiguous_by_step(
            forward_batch.out_cache_loc, forward_batch.batch_size, self.speculative_num_steps
        )
        if self.runs_captured:
            self.at_graph_head()


def contiguous_by_step(out_cache_loc: torch.Tensor, num_requests: int, num_steps: int) -> torch.Tensor:
    """Lay the draft KV locations out so that SGLang's `draft_forward` hands each step a contiguous vector.

    SGLang reshapes `out_cache_loc` to (num_requests, 1, N), permutes it and takes row i. From request-major memory that row
    is strided, and the MLA KV writer reads it as if it were dense: every request but the first writes its draft KV to wrong
    slots (SGLang 0.5.12.post1). The tensor returned here has the same values in the same logical order, in step-major
    memory, so that the same three operations are views and the row is contiguous. Costs one small copy a round.

    Args:
        out_cache_loc: [num_requests * N], the N locations of request 0, then those of request 1, ...

    Returns:
        [num_requests, N] with strides (1, num_requests).
    """
    return out_cache_loc.view(num_requests, num_steps).t().contiguous().t()
