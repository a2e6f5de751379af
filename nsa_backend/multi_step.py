"""The draft side: N - 1 decode backends, one a draft step, whose metadata one launch writes."""

from __future__ import annotations

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.backend import NativeSparseAttnBackend
from nsa_backend.error_notes import Activity, noted
from nsa_backend.indexer.metadata import IndexerMetadata
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.plan import MetadataPlan, plan_draft_decode, plan_shared_draft_decode
from nsa_backend.metadata.captured import CapturedLaunches
from nsa_backend.metadata.views import NSAMetadata, step_metadata


class DraftStepBackend(NativeSparseAttnBackend):
    """The backend of one draft step."""

    def indexer_metadata(self, forward_batch: sglang_types.ForwardBatch) -> IndexerMetadata:
        """What the indexer of a layer reads.

        A rank of DP attention without a request joins the draft steps of the others with padding rows, for which SGLang asks
        no step backend to plan: what is there belongs to an earlier round, or is nothing at all.
        """
        if forward_batch.forward_mode.is_idle():
            self.init_forward_metadata(forward_batch)
        return super().indexer_metadata(forward_batch)


class NativeSparseAttnMultiStepBackend(adapter.MultiStepEntryPoints):
    """Draft step i writes the token at position L + i and attends to L + i + 1 tokens.

    SGLang hands every step the same length L. Here each step has lengths and a DeepGEMM schedule in storage of its own, and
    all steps share one page table that reaches L + N.

    Drafts of some models are trained to attend with the selection of the last accepted row in every step of a round: to the
    L tokens that row attended to. There all steps have one length, and with it one schedule.
    """

    def __init__(self, model_runner: sglang_types.ModelRunner, topk: int, speculative_num_steps: int, *, shared: bool = False):
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
        self.writer = self.attn_backends[0].writer
        self.captured = CapturedLaunches(self.writer, "draft graph")
        self._most_captured = 0  # requests

    def plan(self, num_requests: int) -> MetadataPlan:
        """What one launch writes for all steps of a draft round."""
        if self.shared:
            return plan_shared_draft_decode(num_requests)
        return plan_draft_decode(num_requests, self.speculative_num_steps)

    @noted
    def init_forward_metadata(self, forward_batch: sglang_types.ForwardBatch) -> None:
        """Metadata of an eager draft round, in memory of its own."""
        self._begin("preparing a draft round", forward_batch.batch_size)
        self.captured.leave()
        plan = self.plan(forward_batch.batch_size)
        buffers = self.writer.write_eager(plan, forward_batch)
        self.hand_out(tuple(step_metadata(plan, buffers, step) for step in range(plan.num_steps)))
        self._prepare_steps()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Remember how large captured rounds get; metadata buffers are allocated when the first one is captured."""
        self._most_captured = max_bs
        self.captured.clear()
        for backend in self.attn_backends:
            backend.decode_attention.reserve(max_num_tokens)

    @noted
    def before_capture(self, inputs: BatchInputs) -> None:
        self._begin("capturing a draft round", inputs.num_requests)
        plan, room = self.plan(inputs.num_requests), self.plan(self._most_captured)
        self.hand_out(self.captured.capture(None, plan, room, inputs).steps)

    @noted
    def before_replay(self, num_requests: int) -> None:
        self.activity.begin("replaying a draft round", None, num_requests)
        self.captured.replay(None, num_requests)

    @noted
    def at_graph_head(self) -> None:
        # An eager round since the capture has given the steps metadata of its own.
        self.hand_out(self.captured.write().steps)
        self._prepare_steps()

    @property
    def runs_captured(self) -> bool:
        return self.captured.current is not None

    def hand_out(self, steps: tuple[NSAMetadata, ...]) -> None:
        """Give every step backend the metadata of its step, or the only one."""
        steps = steps * len(self.attn_backends) if len(steps) == 1 else steps
        for backend, metadata in zip(self.attn_backends, steps, strict=True):
            backend.forward_metadata = metadata

    def _prepare_steps(self) -> None:
        """What the implementation needs for the lengths of each step, after the launch that writes them."""
        first, *others = self.attn_backends
        first.prepare_decode()
        for backend in others:
            if self.shared:
                backend.forward_metadata = first.forward_metadata
            else:
                backend.prepare_decode()

    def _begin(self, doing: str, num_requests: int) -> None:
        for activity in (self.activity, *(backend.activity for backend in self.attn_backends)):
            activity.begin(doing, None, num_requests)
