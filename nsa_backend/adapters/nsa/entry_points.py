"""What SGLang 0.5.12 and 0.5.12.post1 call around captures and replays, always outside the graph.

So the metadata launch is recorded when the first layer of the captured forward asks for its indexer metadata, and that of a
draft round at the head of `draft_forward`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nsa_backend.adapters.sglang import AttentionBackend, ForwardBatch, ForwardMode
from nsa_backend.error_notes import noted

if TYPE_CHECKING:
    from sglang.srt.speculative.spec_info import SpecInput

    from nsa_backend.indexer.metadata import IndexerMetadata


def is_ragged_draft_extend(mode: ForwardMode) -> bool:
    """Whether requests extend by different numbers of tokens (spec v1)."""
    return mode.is_draft_extend()


class BackendEntryPoints(AttentionBackend):
    """What SGLang calls around captures and replays of one model's forwards."""

    @noted
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
        """Prepare a capture. `seq_lens` and `req_pool_indices` are the graph runner's static buffers."""
        extend_lens = spec_info.num_accept_tokens if is_ragged_draft_extend(forward_mode) else None
        self.before_capture(
            forward_mode, bs, num_tokens, seq_lens=seq_lens, req_pool_indices=req_pool_indices, extend_lens=extend_lens
        )

    @noted
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
        self.before_replay(forward_mode, bs, seq_lens, req_pool_indices)

    @noted
    def get_indexer_metadata(self, layer_id: int, forward_batch: ForwardBatch) -> IndexerMetadata:
        """Called by every layer before it reads any metadata; in a capture, the first layer's call records the launch."""
        if self.captured.is_first_layer(layer_id):
            self.at_graph_head()
        return self.indexer_metadata()

    def get_verify_buffers_to_fill_after_draft(self) -> list[None]:
        """No tree mask and no positions: one chain of drafts needs neither."""
        return [None, None]


class MultiStepEntryPoints:
    """What SGLang calls around captures and replays of a draft round."""

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Prepare a capture; `begin_draft_round` records the launch inside it, on the runner's static tensors."""
        self.before_capture(forward_batch)

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: ForwardBatch, bs: int) -> None:
        """Nothing on the device: the draft graph writes its own metadata."""
        self.before_replay(bs)
