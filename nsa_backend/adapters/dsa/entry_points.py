"""The entry points that SGLang 0.5.17 to 0.5.23 call around captures and replays: once outside the graph, once at its head."""

from __future__ import annotations

from functools import cached_property

import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from nsa_backend.adapters.core import CapturedForwards, CapturedRounds
from nsa_backend.adapters.sglang_types import AttentionBackend, ForwardBatch, ForwardMode
from nsa_backend.kernels.batch_inputs import BatchInputs


class BackendEntryPoints(CapturedForwards, AttentionBackend):
    """What SGLang calls around captures and replays of one model's forwards."""

    needs_cpu_seq_lens = False
    """Replays read lengths on the GPU alone; tables of an eager forward that has none on the host are full width."""

    extend_dummy_seqs_capped_by_req_pool = True
    """A dummy prefill batch may not have more requests than the request pool has rows: page tables come from there."""

    @cached_property
    def verify_mask(self) -> VerifyMask:
        """The form of the mask that SGLang builds for every verify: over the drafts alone, because nothing here reads it.

        A backend without one gets D · (context + D) bytes a request filled in every round, and its tree of drafts in several
        launches. The buffer is empty, so that SGLang allocates the D² bytes a request of a round by itself.
        """
        return VerifyMask(buffer=torch.empty(0, dtype=torch.bool), mode=TreeMaskMode.QLEN_ONLY, max_bs=0, is_read=False)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Choose what a capture fills, or what a replay reads. Nothing on the device."""
        bs, mode = forward_batch.batch_size, forward_batch.forward_mode
        if in_capture:
            inputs = BatchInputs(forward_batch.seq_lens[:bs], forward_batch.req_pool_indices[:bs])
            self.before_capture(mode, forward_batch.positions.shape[0], inputs)
        else:
            # The draft-extend runner hands over its whole static buffers, which begin where the captured views did.
            self.before_replay(mode, bs, BatchInputs(forward_batch.seq_lens, forward_batch.req_pool_indices))

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """The metadata launch, recorded in the graph; SGLang warms the captured forward up with it too."""
        self.at_graph_head()

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        """Yes: a draft-extend replay needs no preparation on the host."""
        return True

    def get_indexer_metadata(self, layer_id: int, forward_batch: ForwardBatch) -> object:
        """What the indexer of a layer reads."""
        return self.indexer_metadata(forward_batch)

    def prepare_mtp_seed_indices(self, topk_indices: torch.Tensor, forward_mode: ForwardMode) -> torch.Tensor:
        """A selection of prefill or draft-extend as the draft steps that share it read it.

        SGLang calls it in eager prefills, and inside draft-extend's capture.
        """
        return self.selection_for_drafts(topk_indices)


class MultiStepEntryPoints(CapturedRounds):
    """What SGLang calls around captures and replays of a draft round."""

    needs_cpu_seq_lens = False

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Choose what a capture fills, or check a replay, whose graph reads static tensors and not those of `forward_batch`."""
        if in_capture:
            self.before_capture(BatchInputs(forward_batch.seq_lens, forward_batch.req_pool_indices))
        else:
            self.before_replay(forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """The one launch for all steps, at the head of the captured round."""
        self.at_graph_head()
