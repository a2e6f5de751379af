"""One rank of DP attention on the CPU: SGLang's own padding of a batch around SGLang's own `draft_forward`."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

from nsa_backend.attention.interface import NothingToPrepare
from nsa_backend.demo.engine import Engine
from nsa_backend.demo.model import TinySparseMla
from nsa_backend.testing.calls import calls

PROMPTS = [[5, 9, 2, 40, 7], list(range(30, 50)), [3] * 70]
NO_PREFILL_GRAPHS = SimpleNamespace(prefill=SimpleNamespace(bs=None))


class Indexer(TinySparseMla):
    """The demo's model, whose indexer cuts padding rows off and gives them no slots, as SGLang's does in every release."""

    def _index(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        metadata = self.attention_backend(batch).get_indexer_metadata(0, batch)
        real = sum(metadata.get_nsa_extend_len_cpu())
        assert len(metadata.get_seqlens_int32()) == len(metadata.get_page_table_64()) == real <= len(positions)
        one = torch.ones(len(positions))
        keys = torch.stack([positions.float(), one, self.interest[input_ids]], dim=1)
        self.pool.set_index_k(batch.out_cache_loc, keys)
        query = torch.stack([one, -positions.float(), one], dim=1)[:real]
        logits = torch.einsum("rd,rkd->rk", query, self._paged_keys(metadata))
        chosen = metadata.topk_transform(logits, self.shape.index_topk)
        return torch.cat([chosen, chosen.new_full((len(positions) - real, chosen.shape[1]), -1)])


class Attention(NothingToPrepare):
    """The torch implementation behind the rules of the GPU's: every query row has its lengths, in one batch with the others."""

    def __init__(self, attention: Any):
        self._attention = attention
        self.prepared_rows = 0
        self.rows: list[int] = []

    def prepare(self, metadata: Any) -> Any:
        self.prepared_rows = len(metadata.nsa_cache_seqlens_int32)
        return metadata

    def forward(self, inputs: Any) -> torch.Tensor:
        rows = len(inputs.q_nope)
        chosen = (inputs.topk_slots >= 0).sum(1, dtype=torch.int32)
        assert len(inputs.nsa_cache_seqlens) == len(inputs.topk_slots) == self.prepared_rows == rows
        assert torch.equal(inputs.nsa_cache_seqlens, chosen)
        assert inputs.nsa_cu_seqlens_q.tolist() == list(range(rows + 1))
        assert inputs.nsa_cu_seqlens_k.tolist() == [0, *chosen.cumsum(0).tolist()]
        assert inputs.cache_seqlens is None or len(inputs.cache_seqlens) <= rows  # trtllm pads them itself
        self.rows.append(rows)
        return self._attention.forward(inputs)


class Rank:
    """Draft rounds outside CUDA graphs, of requests whose prompts have been prefilled."""

    def __init__(self, monkeypatch: Any, prompts: list[list[int]], num_steps: int):
        self.engine = engine = Engine(prompts, num_steps=num_steps, padding=0)
        draft = engine.draft
        self.first = engine.prefill(draft, prompts).argmax(-1)
        draft.net.__class__ = Indexer
        self.backend = calls.draft_factory(draft.runner, num_steps).create_decode_backend()
        self.attentions = [Attention(step.decode_attention) for step in self.backend.attn_backends]
        for step, attention in zip(self.backend.attn_backends, self.attentions, strict=True):
            step.decode_attention = attention
        draft.runner.attn_backend = draft.backend
        options = {
            "lora_manager": None,
            "server_args": SimpleNamespace(cuda_graph_config=NO_PREFILL_GRAPHS),
            "attn_tp_sequence_sharded": lambda num_tokens: False,
        }
        self.model_runner = SimpleNamespace(**vars(draft.runner) | options)
        self.worker = SimpleNamespace(
            hot_token_id=None,
            topk=1,
            speculative_num_steps=num_steps,
            speculative_num_draft_tokens=num_steps + 1,
            draft_attn_backend=self.backend,
            draft_runner=SimpleNamespace(forward=self._step, model_config=draft.runner.model_config, canary_manager=None),
            **calls.worker_fields(len(prompts), num_steps),
        )
        if hasattr(EagleDraftWorker, "_draft_forward_idle"):
            self.worker._draft_forward_idle = partial(EagleDraftWorker._draft_forward_idle, self.worker)
        beside_other_ranks(monkeypatch)

    def draft(self, global_num_tokens: list[int] | None) -> torch.Tensor:
        """One round as SGLang's workers run it: planned, then padded anew in every step. Returns the drafted tokens."""
        batch = self.batch(global_num_tokens)
        self.backend.init_forward_metadata(batch)
        return self.forward(batch)

    def batch(self, global_num_tokens: list[int] | None = None) -> ForwardBatch:
        """The batch of a round; `global_num_tokens` counts the rows of every rank."""
        engine, length = self.engine, torch.tensor([len(p) for p in self.engine.prompts])
        seq_lens, locations = length.to(calls.LENGTHS_DTYPE), engine.locations(length, engine.num_steps)
        batch = engine.batch(ForwardMode.DECODE, engine.draft, None, length.clone(), seq_lens, locations)
        batch.spec_info = EagleDraftInput(
            topk_p=torch.ones(len(length), 1), topk_index=self.first[:, None], hidden_states=torch.zeros(len(length), 1)
        )
        self._among(batch, global_num_tokens)
        return batch

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """SGLang's `draft_forward`, with whatever the plugin put around it."""
        return EagleDraftWorker.draft_forward(self.worker, batch)[2]

    def idle(self, global_num_tokens: list[int]) -> None:
        """A round without a request, beside ranks that have some; SGLang asks nobody to plan it."""
        batch = ForwardBatch(
            forward_mode=ForwardMode.IDLE,
            batch_size=0,
            input_ids=torch.zeros(0, dtype=torch.long),
            req_pool_indices=torch.zeros(0, dtype=torch.long),
            seq_lens=torch.zeros(0, dtype=calls.LENGTHS_DTYPE),
            seq_lens_cpu=torch.zeros(0, dtype=calls.LENGTHS_DTYPE),
            seq_lens_sum=0,
            out_cache_loc=torch.zeros(0, dtype=torch.long),
            positions=torch.zeros(0, dtype=torch.long),
            **calls.batch_fields(self.engine.draft),
        )
        batch.spec_info = EagleDraftInput.create_idle_input(
            device="cpu", hidden_size=1, dtype=torch.float32, topk=1, capture_hidden_mode=CaptureHiddenMode.LAST
        )
        self._among(batch, global_num_tokens)
        self.forward(batch)

    def _among(self, batch: ForwardBatch, global_num_tokens: list[int] | None) -> None:
        batch.spec_info.capture_hidden_mode = CaptureHiddenMode.LAST
        batch.spec_info.num_tokens_per_req = 1
        batch.lora_ids = [None] * batch.batch_size
        batch.global_num_tokens_cpu = batch.global_num_tokens_for_logprob_cpu = global_num_tokens
        if global_num_tokens is not None:
            batch.global_num_tokens_gpu = torch.zeros(len(global_num_tokens), dtype=torch.long)

    def _step(self, batch: ForwardBatch, **options: Any) -> SimpleNamespace:
        """`ModelRunner._forward_raw` outside CUDA graphs: padded, run, and cut back."""
        if batch.global_num_tokens_cpu is not None:
            batch.prepare_mlp_sync_batch(self.model_runner)
        seen = calls.step_batch(batch)
        logits = self.engine.draft.net.forward(seen.input_ids, seen.positions, seen)
        output = SimpleNamespace(next_token_logits=logits, hidden_states=logits[:, :1], last_hidden_states=None)
        if batch.global_num_tokens_cpu is not None:
            batch.post_forward_mlp_sync_batch(output)
        return SimpleNamespace(logits_output=output)


def beside_other_ranks(monkeypatch: Any) -> None:
    """What SGLang's padding asks of a process that has no GPU and no other rank: groups, options, memory that is not pinned."""
    from sglang.srt.layers import dp_attention

    patches = (
        (dp_attention, "_ATTN_DP_SIZE", 2),
        (dp_attention, "_ATTN_DP_RANK", 0),
        (dp_attention, "dp_gather_width", lambda: 2),
        (dp_attention, "dp_slot_in", lambda per_rank: 0),
        (dp_attention, "_decode_sum_len_fits_custom_all_reduce", lambda tokens: False),  # never with speculation
        (forward_batch_info, "dp_slot_in", lambda per_rank: 0),
        (forward_batch_info, "mambaish_config", lambda config: None),  # asks a DeepSeek for linear attention
    )
    for module, name, value in patches:
        if hasattr(module, name):  # releases differ in whom they ask
            monkeypatch.setattr(module, name, value)
    overrides = getattr(getattr(dp_attention, "get_parallel", dict)(), "_overrides", None)
    if overrides is not None:
        monkeypatch.setitem(overrides, "attn_dp_rank", 0)  # 0.5.22 reads it
    if hasattr(forward_batch_info, "get_exec"):
        graph = SimpleNamespace(cuda_graph_config=NO_PREFILL_GRAPHS)
        monkeypatch.setattr(forward_batch_info, "get_exec", lambda: SimpleNamespace(graph=graph))
    tensor = torch.tensor
    unpinned = SimpleNamespace(**vars(torch))
    unpinned.tensor = lambda *args, pin_memory=False, **options: tensor(*args, **options)
    monkeypatch.setattr(forward_batch_info, "torch", unpinned)
