"""SGLang's own graph runners of a speculative round on a GPU that is not there, around graphs that do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_gpu import gpu
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

HIDDEN, VOCABULARY, SELECTED = 8, 50, 16
GATHERING = ("require_mlp_tp_gather", "require_gathered_buffer", "require_mlp_sync")
OFF = (
    "require_attn_tp_gather",
    "disable_padding",
    "enable_pdmux",
    "ragged_verify_mode",
    "enable_two_batch_overlap",
    "is_encoder_decoder",
    "is_dllm",
    "record_nolora_graph",
    "dllm_uses_input_embeds",
    "_skips_prefilled_inputs",
    "_draft_metadata_glue",
    "_target_metadata_glue",
)
NOTHING = (
    "dllm_input_preparation",
    "attention_graph_variants",
    "_early_verify_metadata",
    "_metadata_glue",
    "_prefilled_inputs",
)


class FakeGraphs:
    """The three runners of a worker, built inside `fake_gpu`; `replayed` has what they replayed: graph and captured size."""

    logits_dtype = torch.float32

    def __init__(
        self,
        steps: int,
        sizes: list[int],
        *,
        shared: bool = False,
        ranks: int = 1,
        draft_sizes: list[int] | None = None,
        experts: bool = False,
    ):
        """`sizes` are captured, of draft steps `draft_sizes` where these are others; `ranks` are those of DP attention.

        `experts`: these are on several GPUs, and told which rows are padding.
        """
        self.experts = experts
        self.steps, self.width, self.shared, self.ranks = steps, steps + 1, shared, ranks
        self.sizes, self.draft_sizes, self.requests = sizes, draft_sizes or sizes, max(sizes)
        self.replayed: list[tuple[str, int]] = []

    def _runner(self, cls: type, model_runner: Any, name: str, width: int, output: Callable[[int], Any], **fields: Any) -> Any:
        def replay(shape: Any, *_: Any) -> Any:
            variant = getattr(shape, "attention_variant", None)  # before 0.5.23 there are none
            self.replayed.append((name if variant is None else f"{variant} {name}", shape.size))
            return output(shape.size)

        sizes = self.draft_sizes if name == "draft" else self.sizes
        runner = object.__new__(cls)
        vars(runner).update(
            dict.fromkeys(OFF, False)
            | dict.fromkeys(NOTHING)
            | dict.fromkeys(GATHERING, self.ranks > 1)
            | {"num_dp_ranks": self.ranks, "attn_dp_size": self.ranks},
            model_runner=model_runner,
            device_module=torch.cuda,
            deepep_adapter=mock.Mock(),
            backend=SimpleNamespace(replay=replay, replay_session=contextlib.nullcontext),
            captured_req_width=width,
            capture_bs=sizes,
            max_bs=max(sizes),
            seq_len_fill_value=1,
            **fields,
        )
        return runner

    def _counts(self) -> dict[str, torch.Tensor | None]:
        """What the ranks have, as a captured forward reads it."""
        return {
            f"global_num_tokens{what}_gpu": gpu(self.ranks, dtype=torch.int32) if self.ranks > 1 else None
            for what in ("", "_for_logprob")
        }

    def _logits(self, size: int) -> LogitsProcessorOutput:
        rows = size * self.width
        return LogitsProcessorOutput(
            next_token_logits=gpu(rows, VOCABULARY, dtype=self.logits_dtype),
            hidden_states=gpu(rows, HIDDEN, dtype=torch.float32),
        )

    def verify(self, model_runner: Any) -> DecodeCudaGraphRunner:
        tokens = self.requests * self.width
        sizes = {"max_bs": self.requests, "max_num_token": tokens, "seq_len_fill_value": 1, "cache_loc_dtype": torch.int64}
        ranks = {"require_gathered_buffer": True, "require_mlp_tp_gather": True, "num_dp_ranks": self.ranks}
        sizes |= ranks if self.ranks > 1 else {}
        registry = build_decode_registry(
            device=torch.device("cuda"), share_pool=False, enable_num_token_non_padded=self.experts, **sizes
        )
        return self._runner(
            DecodeCudaGraphRunner,
            model_runner,
            "verify",
            self.width,
            self._logits,
            buffer_registry=registry,
            buffers=SimpleNamespace(
                **dict.fromkeys(("mamba_track_indices", "num_token_non_padded", "custom_mask"))
                | {name: registry.get_slot(name).buffer for name in registry.slot_names()},
            ),
            attn_backend=model_runner.attn_backend,
            capture_forward_mode=ForwardMode.TARGET_VERIFY,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )

    def _inputs(self, tokens: int, slots: int, **others: Any) -> SimpleNamespace:
        """Static inputs of a draft runner."""
        bs = {name: gpu(self.requests) for name in ("req_pool_indices", "seq_lens")}
        wide = {"hidden_states": gpu(tokens, HIDDEN, dtype=torch.float32)}
        others |= self._counts() | {"seq_lens_cpu": torch.zeros(self.requests, dtype=torch.int64)}
        return SimpleNamespace(**bs, **wide, positions=gpu(tokens), out_cache_loc=gpu(slots), **others)

    def draft(self, model_runner: Any) -> EAGLEDraftCudaGraphRunner:
        requests = self.requests
        others = dict.fromkeys(("rids_int", "bootstrap_room_ids_int", "draft_probs", "dsa_seed_topk"))
        others["dsa_seed_topk"] = gpu(requests, SELECTED, dtype=torch.int32) if self.shared else None
        chains = {"topk_p": gpu(requests, 1, dtype=torch.float32), "topk_index": gpu(requests, 1)}
        return self._runner(
            EAGLEDraftCudaGraphRunner,
            model_runner,
            "draft",
            1,
            lambda size: (*(gpu(size, self.steps) for _ in range(3)), None),
            buffers=self._inputs(requests, requests * self.steps, **chains, **others),
            draft_attn_backend=mock.Mock(),
            speculative_num_steps=self.steps,
        )

    def extend(self, model_runner: Any) -> EAGLEDraftExtendCudaGraphRunner:
        requests, tokens = self.requests, self.requests * self.width
        counts = ("extend_seq_lens", "num_correct_drafts", "num_accept_tokens")
        others = {name: gpu(requests, dtype=torch.int32) for name in counts} | {"input_ids": gpu(tokens)}
        others |= {"select_index": gpu(requests), "mamba_track_indices": None}
        seeds = gpu(tokens, SELECTED, dtype=torch.int32) if self.shared else None
        return self._runner(
            EAGLEDraftExtendCudaGraphRunner,
            model_runner,
            "draft-extend",
            self.width,
            self._logits,
            buffers=self._inputs(tokens, tokens, dsa_seed_topk_capture=seeds, **others),
            draft_extend_attn_backend=mock.Mock(),
            forward_mode=ForwardMode.DRAFT_EXTEND_V2,
            extend_seq_lens_cpu=[0] * requests,
        )
