"""Speculative decoding in the order of calls of SGLang's spec v2 worker, with SGLang's own `draft_forward`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

from nsa_backend.demo.engine import CpuGraph, Engine, Model, capture, replay
from nsa_backend.testing.calls import calls


class SpeculativeDecoder:
    """draft, target_verify, draft_extend (v2), with graphs for all three and SGLang's own `draft_forward`."""

    def __init__(self, engine: Engine):
        self.engine, n, d, bs = engine, engine.num_steps, engine.num_draft_tokens, engine.padded
        draft = engine.draft
        factory = calls.draft_factory(draft.runner, n)
        backend = factory.create_decode_backend() if engine.multi_step is None else engine.multi_step(draft.runner, 1, n)
        self.worker = SimpleNamespace(
            hot_token_id=None,
            topk=1,
            speculative_num_steps=n,
            speculative_num_draft_tokens=d,
            draft_attn_backend=backend,
            draft_runner=SimpleNamespace(forward=self._draft_step, model_config=draft.runner.model_config, canary_manager=None),
            **calls.worker_fields(bs, n),
        )
        self.seq_lens = {mode: torch.ones(bs, dtype=calls.LENGTHS_DTYPE) for mode in ("draft", "verify", "extend")}
        self.draft_batch = self._static(ForwardMode.DECODE, draft, 1, self.seq_lens["draft"], n)
        self.draft_batch.spec_info = EagleDraftInput(
            topk_p=torch.ones(bs, 1), topk_index=torch.zeros(bs, 1).long(), hidden_states=torch.zeros(bs, 1)
        )
        self.draft_batch.spec_info.capture_hidden_mode = CaptureHiddenMode.LAST
        backend.init_cuda_graph_state(bs, bs)
        self.draft_graph = CpuGraph(lambda: calls.before_round_capture(backend, self.draft_batch), self._draft_round)
        self.verify_batch = self._static(ForwardMode.TARGET_VERIFY, engine.target, d, self.seq_lens["verify"], d)
        self.verify_graph = capture(engine.target, self.verify_batch)
        self.extend_batch = self._static(ForwardMode.DRAFT_EXTEND_V2, draft, d, self.seq_lens["extend"], d)
        self.extend_graph = capture(draft, self.extend_batch)

    def _static(self, mode: ForwardMode, model: Model, rows: int, seq_lens: torch.Tensor, slots: int) -> ForwardBatch:
        bs = self.engine.padded
        zeros = torch.zeros(bs * rows, dtype=torch.long)
        return self.engine.batch(mode, model, zeros, zeros.clone(), seq_lens, torch.zeros(bs * slots, dtype=torch.long))

    def _draft_step(self, batch: ForwardBatch, **options: Any) -> SimpleNamespace:
        """What the draft model's runner does with a step, which finds its backend where `draft_forward` has put it."""
        batch = calls.step_batch(batch)
        logits = self.engine.draft.net.forward(batch.input_ids, batch.positions, batch)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=logits[:, :1]))

    def _draft_round(self) -> torch.Tensor:
        """What the draft graph runner captures: SGLang's `draft_forward`, and its inputs as they were."""
        batch, before = self.draft_batch, dict(vars(self.draft_batch))
        hidden_states = batch.spec_info.hidden_states
        calls.at_round_head(self.worker.draft_attn_backend, batch)
        tokens = EagleDraftWorker.draft_forward(self.worker, batch)[2]
        vars(batch).update(before)
        batch.spec_info.hidden_states = hidden_states
        batch.positions.sub_(self.engine.num_steps - 1)
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
        calls.before_round_replay(self.worker.draft_attn_backend, batch)
        return self.draft_graph.replay()[: engine.num_requests]

    def _verify(self, rows: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        self._fill(self.verify_batch, rows, length, engine_length=length)
        logits = replay(self.engine.target, self.verify_graph, self.verify_batch)
        return logits.argmax(-1).view(self.engine.padded, -1)[: self.engine.num_requests]

    def _extend(self, rows: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        self._fill(self.extend_batch, rows, length, engine_length=length + self.engine.num_draft_tokens)
        logits = replay(self.engine.draft, self.extend_graph, self.extend_batch)
        return logits.argmax(-1).view(self.engine.padded, -1)[: self.engine.num_requests]

    def _fill(self, batch: ForwardBatch, rows: torch.Tensor, start: torch.Tensor, *, engine_length: torch.Tensor) -> None:
        engine, d = self.engine, self.engine.num_draft_tokens
        batch.seq_lens.copy_(engine.pad(engine_length, 1))
        batch.input_ids[: rows.numel()] = rows.flatten()
        batch.positions[: rows.numel()] = (start[:, None] + torch.arange(d)).flatten()
        batch.out_cache_loc.copy_(engine.locations(engine.pad(start, 0), d))
