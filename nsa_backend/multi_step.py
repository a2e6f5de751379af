"""The draft side: N - 1 decode backends, one a draft step, whose metadata one launch writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from nsa_backend.adapters import sglang
from nsa_backend.adapters.installed import adapter
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.error_notes import Activity, noted
from nsa_backend.indexer.metadata import IndexerMetadata
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.plan import MetadataPlan, plan_draft_decode, plan_shared_draft_decode
from nsa_backend.metadata.views import step_metadata


@dataclass(frozen=True)
class CapturedRound:
    """What one captured graph of a draft round does on the host."""

    launch: Callable[[], None]  # what the graph has recorded
    check: Callable[[], None]  # MetadataWriter.check of the tensors that the graph reads


class DraftStepBackend(NativeSparseAttnBackend):
    """The backend of one draft step."""

    def get_indexer_metadata(self, layer_id: int, forward_batch: sglang.ForwardBatch) -> IndexerMetadata:
        """What the indexer of a layer reads.

        A rank of DP attention without a request joins the draft steps of the others with padding rows, for which SGLang asks
        no step backend to plan: what is there belongs to an earlier round, or is nothing at all.
        """
        if forward_batch.forward_mode.is_idle():
            self.init_forward_metadata(forward_batch)
        return super().get_indexer_metadata(layer_id, forward_batch)


class NativeSparseAttnMultiStepBackend(adapter.MultiStepEntryPoints):
    """Draft step i writes the token at position L + i and attends to L + i + 1 tokens.

    SGLang hands every step the same length L. Here each step has lengths and a DeepGEMM schedule in storage of its own, and
    all steps share one page table that reaches L + N.

    Drafts of some models are trained to attend with the selection of the last accepted row in every step of a round: to the
    L tokens that row attended to. There all steps have one length, and with it one schedule.
    """

    def __init__(self, model_runner: sglang.ModelRunner, topk: int, speculative_num_steps: int, *, shared: bool = False):
        """Build N - 1 step backends.

        Args:
            model_runner: the draft model's.
            topk: `--speculative-eagle-topk`; one chain of drafts, so 1.
            speculative_num_steps: N, at least 2: the first draft token comes out of draft-extend.
            shared: whether all steps attend with one selection.
        """
        if topk != 1:
            raise ValueError(f"nsa_backend does not serve --speculative-eagle-topk {topk}: pass --speculative-eagle-topk 1")
        if speculative_num_steps < 2:
            raise ValueError(f"a multi-step draft needs N >= 2 draft steps, got {speculative_num_steps}")
        self.speculative_num_steps = speculative_num_steps
        self.shared = shared
        steps = range(speculative_num_steps - 1)
        self.attn_backends = [DraftStepBackend(model_runner, shares_selections=shared) for _ in steps]
        for step, backend in enumerate(self.attn_backends):
            backend.activity.step = step
        self.activity = Activity()
        self._writer = self.attn_backends[0].writer
        self._buffers: MetadataBuffers | None = None
        self._rounds: dict[int, CapturedRound] = {}  # by captured batch size
        self._launch: Callable[[], None] | None = None

    def plan(self, num_requests: int) -> MetadataPlan:
        """What one launch writes for all steps of a draft round."""
        if self.shared:
            return plan_shared_draft_decode(num_requests)
        return plan_draft_decode(num_requests, self.speculative_num_steps)

    @noted
    def init_forward_metadata(self, forward_batch: sglang.ForwardBatch) -> None:
        """Metadata of an eager draft round, in memory of its own."""
        self._move("preparing a draft round", forward_batch)
        self._launch = None
        plan = self.plan(forward_batch.batch_size)
        self._hand_out(plan, self._writer.write_eager(plan, forward_batch))
        self._prepare_steps()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the replay buffers of all steps for up to `max_bs` requests."""
        self._buffers = self._writer.replay_buffers(self.plan(max_bs))
        self._rounds.clear()
        for backend in self.attn_backends:
            backend.decode_attention.reserve(max_num_tokens)

    @noted
    def before_capture(self, forward_batch: sglang.ForwardBatch) -> None:
        """Choose what a capture fills; `at_graph_head` records the launch in it, on the runner's static tensors."""
        self._move("capturing a draft round", forward_batch)
        plan = self.plan(forward_batch.batch_size)
        read = {"seq_lens": forward_batch.seq_lens, "req_pool_indices": forward_batch.req_pool_indices}
        self._launch = partial(self._write_captured, plan, **read)
        self._rounds[forward_batch.batch_size] = CapturedRound(self._launch, partial(self._writer.check, plan, **read))
        self._hand_out(plan, self._buffers)

    @noted
    def before_replay(self, num_requests: int) -> None:
        """Nothing on the device: the draft graph writes its own metadata."""
        self._launch = None
        self.activity.begin("replaying a draft round", None, num_requests)
        captured = self._rounds.get(num_requests)
        if captured is None:
            raise ValueError(f"no draft graph of {num_requests} requests was captured: there is no metadata to replay")
        captured.check()
        self._launch = captured.launch

    @noted
    def begin_draft_round(self, forward_batch: sglang.ForwardBatch) -> None:
        """Runs at the head of every `draft_forward` that the plugin hooks, inside the graph where one is captured.

        Makes the draft KV locations dense and, where a captured round runs on the host, launches the metadata of all steps.
        """
        if forward_batch.forward_mode.is_idle() or not forward_batch.batch_size:
            return
        forward_batch.out_cache_loc = contiguous_by_step(
            forward_batch.out_cache_loc, forward_batch.batch_size, self.speculative_num_steps
        )
        if self._launch is not None:
            self.at_graph_head()

    @noted
    def at_graph_head(self) -> None:
        """At the head of a captured round: write the metadata of all steps, and prepare the implementation for each.

        Runs in warm-ups and the capture, and where SGLang replays by calling what it captured (--debug-cuda-graph).
        """
        self._launch()
        self._prepare_steps()

    def _write_captured(self, plan: MetadataPlan, **read: torch.Tensor) -> None:
        """The one launch of a captured round. An eager round since then has given the steps metadata of its own."""
        self._writer.write(plan, self._buffers, **read)
        self._hand_out(plan, self._buffers)

    def _hand_out(self, plan: MetadataPlan, buffers: MetadataBuffers) -> None:
        for step, backend in enumerate(self.attn_backends):
            backend.forward_metadata = step_metadata(plan, buffers, min(step, plan.num_steps - 1))

    def _prepare_steps(self) -> None:
        """What the implementation needs for the lengths of each step, after the launch that writes them."""
        first, *others = self.attn_backends
        first.prepare_decode()
        for backend in others:
            if self.shared:
                backend.forward_metadata = first.forward_metadata
            else:
                backend.prepare_decode()

    def _move(self, doing: str, batch: sglang.ForwardBatch) -> None:
        for activity in (self.activity, *(backend.activity for backend in self.attn_backends)):
            activity.begin(doing, None, batch.batch_size)


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
