"""SGLang's own EAGLE worker on a GPU that is not there, and what its scheduler brings."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_gpu import gpu
from graphs_on_fake_gpu import HIDDEN, SELECTED, VOCABULARY, FakeGraphs
from round_stand_in import WeightUpdater
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from transformers import PretrainedConfig

from nsa_backend.adapters.dsa.rounds.own_round import give_padding_a_past, template_of
from nsa_backend.adapters.dsa.rounds.served import Kind
from nsa_backend.testing.dsa_calls import publish

POOL, CONTEXT = 24, 64
GREEDY = Kind()


class FakeGpuWorker:
    """The worker, and what its scheduler brings."""

    def __init__(self, num_steps: int, requests: int, *, shared: bool = False, graphs: FakeGraphs | None = None):
        """Build inside `fake_gpu`.

        Args:
            num_steps: N.
            requests: of a batch, and the one size that is captured unless `graphs` are given.
            shared: draft steps share a selection, as GLM-5.2's do.
            graphs: what is captured.
        """
        self.steps, self.width, self.requests, self.shared = num_steps, num_steps + 1, requests, shared
        self.graphs = graphs or FakeGraphs(num_steps, [requests], shared=shared)
        self._options = publish(num_steps, self.width, decode="fa3", prefill="flashmla_sparse")["server_args"]
        self._model = SimpleNamespace(
            vocab_size=VOCABULARY,
            model_is_mrope=False,
            hf_config=PretrainedConfig(architectures=["DeepseekV32ForCausalLM"]),
            linear_attn_registry_result=None,
            requires_mm_token_modalities=False,
            spec_hidden_size=HIDDEN,
            dtype=torch.float32,
        )
        self.pool = SimpleNamespace(req_to_token=gpu(POOL, CONTEXT, dtype=torch.int32))
        self.allocator = SimpleNamespace(get_kvcache=SimpleNamespace, page_size=64)
        self.worker = self._worker()

    @property
    def replayed(self) -> list[str]:
        """Names of the graphs that were replayed."""
        return [name for name, _ in self.graphs.replayed]

    def future_map(self) -> FutureMap:
        """SGLang's, with what padding has."""
        future_map = FutureMap(torch.device("cuda"), SpeculativeAlgorithm.EAGLE, self.pool, needs_cpu_seq_lens=False)
        give_padding_a_past(future_map, self.worker)
        return future_map

    def batch(self, *, sampled: bool = False) -> ScheduleBatch:
        """A decode batch as the scheduler hands it to the forward."""
        batch = ScheduleBatch(reqs=[])
        batch.forward_mode, batch.enable_overlap, batch.spec_algorithm = ForwardMode.DECODE, True, SpeculativeAlgorithm.EAGLE
        batch.device, batch.model_config = "cuda", self._model
        batch.token_to_kv_pool_allocator, batch.req_to_token_pool = self.allocator, self.pool
        batch.seq_lens, batch.req_pool_indices = gpu(self.requests), gpu(self.requests)
        nothing = dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties", "logit_bias", "grammars"))
        batch.sampling_info = SimpleNamespace(is_all_greedy=not sampled, sampling_seed=None, **nothing)
        batch.spec_info = EagleDraftInput(future_indices=batch.req_pool_indices, future_dsa_topk_indices_available=self.shared)
        return batch

    def template(self, kind: Kind = GREEDY) -> ScheduleBatch:
        """What a round of this kind is captured of."""
        return template_of(self.batch(), kind, self.worker)

    def _worker(self) -> Any:
        common = {
            "topk": 1,
            "speculative_num_steps": self.steps,
            "speculative_num_draft_tokens": self.width,
            "speculative_algorithm": SpeculativeAlgorithm.EAGLE,
            "device": "cuda",
            "plan_stream": None,
            "plan_stream_ctx": contextlib.nullcontext(),
            "req_to_token_pool": self.pool,
        }
        mask = SimpleNamespace(mode=TreeMaskMode.QLEN_ONLY, is_read=False, fits=lambda bs: False)
        attention = mock.Mock(verify_mask=mask, use_captured_forward_metadata_for_breakable_cuda_graph=False)
        target = SimpleNamespace(model_runner=self._runner(is_draft_worker=False, attn_backend=attention))
        target.model_config = self._model
        target.model_runner.decode_cuda_graph_runner = verify = self.graphs.verify(target.model_runner)
        target.forward_batch_generation = lambda forward_batch, **_: SimpleNamespace(
            logits_output=verify.execute(forward_batch), routed_experts_output=None, indexer_topk_output=None
        )
        draft = object.__new__(eagle_worker_v2.EagleDraftWorker)
        vars(draft).update(
            common,
            target_worker=target,
            draft_runner=self._runner(is_draft_worker=True, tp_group=None),
            draft_tp_context=contextlib.nullcontext,
            parallel_layout=SimpleNamespace(tp_group=None),
            draft_attn_backend=mock.Mock(),
            draft_extend_attn_backend=mock.Mock(),
            tree_mask_mode=TreeMaskMode.FULL_MASK,
            hot_token_id=None,
            index_share_for_mtp_iteration=self.shared,
            seed_dsa_topk_from_draft_extend=self.shared,
            dsa_seed_topk_width=SELECTED,
            _topk1_parents_prealloc=gpu(POOL, self.steps),
            _topk1_score_indices_prealloc=gpu(POOL, self.steps),
        )
        draft.cuda_graph_runner = self.graphs.draft(draft.draft_runner) if self.steps > 1 else None
        draft.cuda_graph_runner_for_draft_extend = self.graphs.extend(draft.draft_runner)
        worker = object.__new__(eagle_worker_v2.EAGLEWorkerV2)
        vars(worker).update(
            common,
            _target_worker=target,
            _draft_worker=draft,
            adaptive_controller=None,
            token_to_kv_pool_allocator=self.allocator,
        )
        return worker

    def _runner(self, **fields: Any) -> SimpleNamespace:
        fields |= self._translator(fields["is_draft_worker"])
        nothing = dict.fromkeys(("canary_manager", "device_timer", "hisparse_coordinator", "lora_manager", "watermark_state"))
        return SimpleNamespace(
            spec_algorithm=SpeculativeAlgorithm.EAGLE,
            device="cuda",
            server_args=self._options,
            weight_updater=WeightUpdater(mock.Mock()),
            model_config=self._model,
            model=SimpleNamespace(shared_experts_config=None),
            ngram_embedding_manager=SimpleNamespace(enabled=False),
            **nothing,
            **fields,
        )

    def _translator(self, is_draft_worker: bool) -> dict[str, Any]:
        """What 0.5.23 has between slots and the memory behind them; 0.5.17 has nothing there."""
        try:
            from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
        except ImportError:
            return {}
        table = {"req_to_token": self.pool.req_to_token, "page_size": 64, "device": "cuda", "is_draft_worker": is_draft_worker}
        memory = {"token_to_kv_pool_allocator": self.allocator, "token_to_kv_pool": SimpleNamespace()}
        return {"kv_index_translator": KVIndexTranslator(**table, **memory)}
