"""SGLang's own EAGLE worker on a GPU that is not there, with its own graph runners around graphs that do nothing."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_gpu import gpu
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from transformers import PretrainedConfig

from nsa_backend.testing.dsa_calls import publish

HIDDEN, VOCABULARY, POOL, CONTEXT, SELECTED = 8, 50, 6, 64, 16


class FakeGpuWorker:
    """The worker, and what its scheduler brings."""

    def __init__(self, num_steps: int, requests: int, *, shared: bool = False):
        """Build inside `fake_gpu`; `shared`: draft steps share a selection, as GLM-5.2's do."""
        self.steps, self.width, self.requests, self.shared = num_steps, num_steps + 1, requests, shared
        self._options = publish(num_steps, self.width, decode="fa3", prefill="flashmla_sparse")["server_args"]
        self._model = SimpleNamespace(
            vocab_size=VOCABULARY,
            model_is_mrope=False,
            hf_config=PretrainedConfig(architectures=["DeepseekV32ForCausalLM"]),
            linear_attn_registry_result=None,
        )
        self.pool = SimpleNamespace(req_to_token=gpu(POOL, CONTEXT, dtype=torch.int32))
        self.allocator = SimpleNamespace(get_kvcache=SimpleNamespace, page_size=64)
        self.replayed: list[str] = []
        self.worker = self._worker()

    def future_map(self) -> FutureMap:
        """What prefills have left."""
        future_map = FutureMap(torch.device("cuda"), SpeculativeAlgorithm.EAGLE, self.pool, needs_cpu_seq_lens=False)
        selection = gpu(1, SELECTED, dtype=torch.int32) if self.shared else None
        tensors = {"topk_p": gpu(1, 1, dtype=torch.float32), "topk_index": gpu(1, 1)}
        hidden = gpu(1, HIDDEN, dtype=torch.float32)
        future_map.stash(gpu(1), RelayPayload(bonus_tokens=gpu(1), hidden_states=hidden, dsa_topk_indices=selection, **tensors))
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
        target.model_runner.decode_cuda_graph_runner = verify = self._verify_runner(target.model_runner)
        target.forward_batch_generation = lambda forward_batch, **_: SimpleNamespace(
            logits_output=verify.execute(forward_batch), routed_experts_output=None, indexer_topk_output=None
        )
        draft = object.__new__(eagle_worker_v2.EagleDraftWorker)
        vars(draft).update(
            common,
            target_worker=target,
            draft_runner=self._runner(is_draft_worker=True, tp_group=None),
            draft_tp_context=contextlib.nullcontext,
            tree_mask_mode=TreeMaskMode.FULL_MASK,
            hot_token_id=None,
            index_share_for_mtp_iteration=self.shared,
            seed_dsa_topk_from_draft_extend=self.shared,
            _topk1_parents_prealloc=gpu(POOL, self.steps),
            _topk1_score_indices_prealloc=gpu(POOL, self.steps),
        )
        draft.cuda_graph_runner = self._draft_runner(draft.draft_runner) if self.steps > 1 else None
        draft.cuda_graph_runner_for_draft_extend = self._extend_runner(draft.draft_runner)
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
        nothing = dict.fromkeys(("canary_manager", "device_timer", "hisparse_coordinator"))
        return SimpleNamespace(
            spec_algorithm=SpeculativeAlgorithm.EAGLE,
            device="cuda",
            server_args=self._options,
            model_config=self._model,
            ngram_embedding_manager=SimpleNamespace(enabled=False),
            **nothing,
            **fields,
        )

    # SGLang's graph runners: their own preparation of a replay, and a graph that does nothing

    def _graphs(self, cls: type, model_runner: Any, name: str, width: int, output: Any, **fields: Any) -> Any:
        def replay(*_: Any) -> Any:
            self.replayed.append(name)
            return output

        off = ("require_mlp_tp_gather", "require_gathered_buffer", "require_mlp_sync", "disable_padding", "enable_pdmux")
        off += ("ragged_verify_mode", "enable_two_batch_overlap", "is_encoder_decoder", "is_dllm", "record_nolora_graph")
        runner = object.__new__(cls)
        vars(runner).update(
            dict.fromkeys(off, False),
            model_runner=model_runner,
            device_module=torch.cuda,
            deepep_adapter=mock.Mock(),
            backend=SimpleNamespace(replay=replay, replay_session=contextlib.nullcontext),
            captured_req_width=width,
            capture_bs=[self.requests],
            max_bs=self.requests,
            seq_len_fill_value=1,
            **fields,
        )
        return runner

    def _logits(self) -> LogitsProcessorOutput:
        rows = self.requests * self.width
        return LogitsProcessorOutput(
            next_token_logits=gpu(rows, VOCABULARY, dtype=torch.float32), hidden_states=gpu(rows, HIDDEN, dtype=torch.float32)
        )

    def _verify_runner(self, model_runner: Any) -> DecodeCudaGraphRunner:
        tokens = self.requests * self.width
        sizes = {"max_bs": self.requests, "max_num_token": tokens, "seq_len_fill_value": 1, "cache_loc_dtype": torch.int64}
        registry = build_decode_registry(device=torch.device("cuda"), share_pool=False, **sizes)
        return self._graphs(
            DecodeCudaGraphRunner,
            model_runner,
            "verify",
            self.width,
            self._logits(),
            buffer_registry=registry,
            buffers=SimpleNamespace(
                mamba_track_indices=None, **{name: registry.get_slot(name).buffer for name in registry.slot_names()}
            ),
            attn_backend=model_runner.attn_backend,
            capture_forward_mode=ForwardMode.TARGET_VERIFY,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )

    def _inputs(self, tokens: int, slots: int, **others: Any) -> SimpleNamespace:
        """Static inputs of a draft runner."""
        bs = {name: gpu(self.requests) for name in ("req_pool_indices", "seq_lens")}
        wide = {"hidden_states": gpu(tokens, HIDDEN, dtype=torch.float32)}
        return SimpleNamespace(**bs, **wide, positions=gpu(tokens), out_cache_loc=gpu(slots), **others)

    def _draft_runner(self, model_runner: Any) -> EAGLEDraftCudaGraphRunner:
        requests = self.requests
        others = dict.fromkeys(("rids_int", "bootstrap_room_ids_int", "draft_probs", "dsa_seed_topk"))
        others["dsa_seed_topk"] = gpu(requests, SELECTED, dtype=torch.int32) if self.shared else None
        chains = {"topk_p": gpu(requests, 1, dtype=torch.float32), "topk_index": gpu(requests, 1)}
        output = (gpu(requests, self.steps), gpu(requests, self.steps), gpu(requests, self.steps), None)
        return self._graphs(
            EAGLEDraftCudaGraphRunner,
            model_runner,
            "draft",
            1,
            output,
            buffers=self._inputs(requests, requests * self.steps, **chains, **others),
            draft_attn_backend=mock.Mock(),
            speculative_num_steps=self.steps,
        )

    def _extend_runner(self, model_runner: Any) -> EAGLEDraftExtendCudaGraphRunner:
        requests, tokens = self.requests, self.requests * self.width
        counts = ("extend_seq_lens", "num_correct_drafts", "num_accept_tokens")
        others = {name: gpu(requests, dtype=torch.int32) for name in counts} | {"input_ids": gpu(tokens)}
        seeds = gpu(tokens, SELECTED, dtype=torch.int32) if self.shared else None
        return self._graphs(
            EAGLEDraftExtendCudaGraphRunner,
            model_runner,
            "draft-extend",
            self.width,
            self._logits(),
            buffers=self._inputs(tokens, tokens, dsa_seed_topk_capture=seeds, **others),
            draft_extend_attn_backend=mock.Mock(),
            forward_mode=ForwardMode.DRAFT_EXTEND_V2,
            extend_seq_lens_cpu=[0] * requests,
        )
