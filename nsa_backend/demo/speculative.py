"""Speculative decoding in the order of calls of SGLang's spec v2 worker, with SGLang's own `draft_forward`."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

from nsa_backend.demo.engine import CpuGraph, Engine, Model, capture, replay


class SpeculativeDecoder:
    """draft, target_verify, draft_extend (v2), with graphs for all three and SGLang's own `draft_forward`."""

    def __init__(self, engine: Engine):
        self.engine, n, d, bs = engine, engine.num_steps, engine.num_draft_tokens, engine.padded
        draft = engine.draft
        factory = DraftBackendFactory(draft.runner.server_args, draft.runner, 1, n)
        backend = factory.create_decode_backend() if engine.multi_step is None else engine.multi_step(draft.runner, 1, n)
        self.worker = SimpleNamespace(
            hot_token_id=None,
            topk=1,
            speculative_num_steps=n,
            speculative_num_draft_tokens=d,
            draft_attn_backend=backend,
            draft_runner=SimpleNamespace(forward=self._draft_step),
        )
        self.seq_lens = {mode: torch.ones(bs, dtype=torch.int32) for mode in ("draft", "verify", "extend")}
        self.draft_batch = self._static(ForwardMode.DECODE, draft, 1, self.seq_lens["draft"], n)
        self.draft_batch.spec_info = EagleDraftInput(
            topk_p=torch.ones(bs, 1), topk_index=torch.zeros(bs, 1).long(), hidden_states=torch.zeros(bs, 1)
        )
        self.draft_batch.spec_info.capture_hidden_mode = CaptureHiddenMode.LAST
        backend.init_cuda_graph_state(bs, bs)
        self.draft_graph = CpuGraph(
            lambda: backend.init_forward_metadata_capture_cuda_graph(self.draft_batch), self._draft_round
        )
        self.verify_batch = self._static(ForwardMode.TARGET_VERIFY, engine.target, d, self.seq_lens["verify"], d)
        self.verify_graph = capture(engine.target, self.verify_batch, bs * d)
        self.extend_batch = self._static(ForwardMode.DRAFT_EXTEND_V2, draft, d, self.seq_lens["extend"], d)
        self.extend_graph = capture(draft, self.extend_batch, bs * d)

    def _static(self, mode: ForwardMode, model: Model, rows: int, seq_lens: torch.Tensor, slots: int) -> ForwardBatch:
        bs = self.engine.padded
        zeros = torch.zeros(bs * rows, dtype=torch.long)
        return self.engine.batch(mode, model, zeros, zeros.clone(), seq_lens, torch.zeros(bs * slots, dtype=torch.long))

    def _draft_step(self, batch: ForwardBatch, skip_attn_backend_init: bool) -> SimpleNamespace:
        logits = self.engine.draft.run(batch)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=logits[:, :1]))

    def _draft_round(self) -> torch.Tensor:
        backup = self.draft_batch.out_cache_loc, self.draft_batch.spec_info.hidden_states, self.draft_batch.attn_backend
        _, _, tokens = EagleDraftWorker.draft_forward(self.worker, self.draft_batch)
        self.draft_batch.out_cache_loc, self.draft_batch.spec_info.hidden_states, self.draft_batch.attn_backend = backup
        self.draft_batch.positions.sub_(self.engine.num_steps - 1)
        return tokens

    def decode(self, max_new_tokens: int) -> tuple[list[list[int]], list[int]]:
        """Returns the new tokens of each request and the accept length (drafts and bonus) of every request and round."""
        engine, n_req = self.engine, self.engine.num_requests
        first = engine.prefill(engine.target, engine.prompts).argmax(-1)
        shifted = [[*p[1:], int(t)] for p, t in zip(engine.prompts, first, strict=True)]
        draft_token = engine.prefill(engine.draft, shifted).argmax(-1)
        tokens = [[int(t)] for t in first]
        length = torch.tensor([len(p) for p in engine.prompts])
        accepted: list[int] = []
        while min(len(t) for t in tokens) < max_new_tokens:
            drafts = self._draft(draft_token, length)
            bonus = torch.tensor([t[-1] for t in tokens])
            predicted = self._verify(torch.cat([bonus[:, None], drafts], 1), length)
            matches = (predicted[:, :-1] == drafts).long().cumprod(1).sum(1)
            for request in range(n_req):
                tokens[request] += predicted[request, : matches[request] + 1].tolist()
            accepted += (matches + 1).tolist()
            draft_token = self._extend(predicted, length)[torch.arange(n_req), matches]
            length = length + matches + 1
        return [t[:max_new_tokens] for t in tokens], accepted

    def _draft(self, draft_token: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        engine, batch = self.engine, self.draft_batch
        self.seq_lens["draft"].copy_(engine.pad(length, 1))
        batch.positions.copy_(engine.pad(length, 0))
        batch.out_cache_loc.copy_(engine.locations(engine.pad(length, 0), engine.num_steps))
        batch.spec_info.topk_index[: engine.num_requests, 0] = draft_token
        self.worker.draft_attn_backend.init_forward_metadata_replay_cuda_graph(batch, engine.padded)
        return self.draft_graph.replay()[: engine.num_requests]

    def _verify(self, rows: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        self._fill(self.verify_batch, rows, length, engine_length=length)
        logits = replay(self.engine.target, self.verify_graph, self.verify_batch, rows.numel())
        return logits.argmax(-1).view(self.engine.padded, -1)[: self.engine.num_requests]

    def _extend(self, rows: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        self._fill(self.extend_batch, rows, length, engine_length=length + self.engine.num_draft_tokens)
        logits = replay(self.engine.draft, self.extend_graph, self.extend_batch, rows.numel())
        return logits.argmax(-1).view(self.engine.padded, -1)[: self.engine.num_requests]

    def _fill(self, batch: ForwardBatch, rows: torch.Tensor, start: torch.Tensor, *, engine_length: torch.Tensor) -> None:
        engine, d = self.engine, self.engine.num_draft_tokens
        batch.seq_lens.copy_(engine.pad(engine_length, 1))
        batch.input_ids[: rows.numel()] = rows.flatten()
        batch.positions[: rows.numel()] = (start[:, None] + torch.arange(d)).flatten()
        batch.out_cache_loc.copy_(engine.locations(engine.pad(start, 0), d))
