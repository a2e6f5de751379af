"""The demo's model and decoder as a model whose draft steps share one selection, in the order of calls of SGLang's worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from nsa_backend.attention.interface import NothingToPrepare
from nsa_backend.demo.engine import Engine
from nsa_backend.demo.model import TinySparseMla, _rotation
from nsa_backend.demo.speculative import SpeculativeDecoder
from nsa_backend.testing.calls import calls

LAG = 4
"""The nearest token that attention looks at is so far back: a draft step sees it up to step LAG - 1."""


class Lagged(TinySparseMla):
    """The next token depends on the newest one, through the embedding, and on tokens LAG and more back, through attention."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        shape, x = self.shape, self.embed[input_ids]
        latent = torch.tanh(x @ self.to_latent.T)[:, None]
        offsets = positions[:, None] - LAG - torch.arange(shape.heads)
        topk = self.select(input_ids, positions, batch)
        out = self.attention(
            (x @ self.to_query.T).view(-1, shape.heads * shape.latent),
            latent,
            latent,
            batch,
            q_rope=4 * _rotation(offsets).view(-1, shape.heads * shape.rope),
            k_rope=_rotation(positions)[:, None],
            topk_indices=topk,
        )
        self.selected(batch, topk)
        return torch.tanh(x + 2 * out.reshape(len(x), -1) @ self.to_out.T) @ self.head.T

    def select(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self._index(input_ids, positions, batch)

    def selected(self, batch: ForwardBatch, topk: torch.Tensor) -> None:
        """What a target does with a selection once it has attended: nothing."""


class LaggedDraft(Lagged):
    """As SGLang's MTP model: a selection that came with the batch is used in place of its own, and its own is handed on."""

    indexed = 0

    def select(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        carried = batch.spec_info.dsa_topk_indices if batch.reuse_dsa_topk_indices else None
        if carried is not None:
            return carried
        self.indexed += 1
        return super().select(input_ids, positions, batch)

    def selected(self, batch: ForwardBatch, topk: torch.Tensor) -> None:
        hand_on(batch, topk)


def hand_on(batch: ForwardBatch, topk: torch.Tensor) -> None:
    """To the next draft step, or into the worker's buffer: SGLang's own code where the release has it by itself."""
    try:
        from sglang.srt.layers.attention.index_topk_share import IndexTopKShareState
    except ImportError:  # in the model's forward there
        spec_info = batch.spec_info
        if batch.reuse_dsa_topk_indices:
            spec_info.dsa_topk_indices = topk
        elif spec_info.dsa_seed_topk_capture is not None:
            select = spec_info.dsa_seed_topk_select
            rows = topk[: len(spec_info.dsa_seed_topk_capture)] if select is None else topk[select]
            spec_info.dsa_seed_topk_capture[: len(rows)].copy_(rows)
        return
    state = IndexTopKShareState.from_mtp_carry(batch)
    state.update(topk)
    state.publish()


class Watched(NothingToPrepare):
    """The torch implementation, which checks what FA3 relies on: the entries that a row's length counts are all slots."""

    def __init__(self, attention: Any):
        self._attention = attention

    def forward(self, inputs: Any) -> torch.Tensor:
        column = torch.arange(inputs.topk_slots.shape[1])
        counted = column < inputs.nsa_cache_seqlens[:, None]
        assert not (counted & (inputs.topk_slots < 0)).any(), "a row's length counts entries that are no slots"
        return self._attention.forward(inputs)


class SharedDecoder(SpeculativeDecoder):
    """Speculative decoding with selections carried from prefill and draft-extend into the rounds, as EAGLEWorkerV2 does."""

    def __init__(self, engine: Engine):
        self.rounds = 0
        topk, rows = engine.shape.index_topk, engine.padded * engine.num_draft_tokens
        self.carried = torch.zeros(engine.padded, topk, dtype=torch.int32)  # what the draft graph reads
        self.captured = torch.full((rows, topk), -7, dtype=torch.int32)  # the worker's buffer
        self.length: torch.Tensor | None = None
        engine.target.net.__class__, engine.draft.net.__class__ = Lagged, LaggedDraft
        engine.draft.backend = calls.draft_factory(engine.draft.runner, engine.num_steps).create_draft_extend_backend()
        self._batch, engine.batch = engine.batch, self._with_spec_info
        super().__init__(engine)
        for step in self.worker.draft_attn_backend.attn_backends:
            step.decode_attention = Watched(step.decode_attention)

    def _with_spec_info(self, mode: ForwardMode, model: Any, *arguments: Any, **fields: Any) -> ForwardBatch:
        batch = self._batch(mode, model, *arguments, **fields)
        if model is self.engine.draft and mode.is_extend(include_draft_extend_v2=True):
            select = None if mode.is_draft_extend_v2() else torch.cumsum(batch.extend_seq_lens, dim=0).long() - 1
            batch.spec_info = SimpleNamespace(
                dsa_topk_indices=None, dsa_seed_topk_capture=self.captured, dsa_seed_topk_select=select
            )
        return batch

    def _draft_round(self) -> torch.Tensor:
        self.draft_batch.spec_info.dsa_topk_indices = self.carried
        return super()._draft_round()

    def _draft(self, draft_token: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        requests = torch.arange(self.engine.num_requests)
        rows = requests
        if self.length is not None:  # the row of the last accepted token
            rows = requests * self.engine.num_draft_tokens + length - self.length - 1
        self.length, self.rounds = length, self.rounds + 1
        self.carried.zero_()
        self.carried[: len(rows)] = self.captured[rows]
        indexed = self.engine.draft.net.indexed
        drafts = super()._draft(draft_token, length)
        assert self.engine.draft.net.indexed == indexed, "a draft step selected for itself"
        return drafts
