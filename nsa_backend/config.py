"""The configuration of a backend: everything it reads from SGLang's model runner, once, at server start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.environment import asked
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.model_check import check_model, dequantises
from nsa_backend.releases import PAIRED_LOGITS, installed

CPU = torch.device("cpu")

PAIRS_FROM = 2
"""Requests whose rows are scored faster two by two at every length; those of one are up to 4096 tokens faster one by one
(benchmarks/results/index_scores_0_5_23_h200.json)."""


@dataclass(frozen=True)
class AttentionConfig:
    """Facts an implementation decides on; fixed for the life of a server."""

    device_sm: int  # 90 on Hopper, 0 without a GPU
    num_heads: int  # query heads that this rank attends with
    kv_cache_dtype: torch.dtype
    index_topk: int
    device: torch.device = CPU
    device_name: str = ""  # as torch.cuda.get_device_name says it
    page_size: int = 64
    latent_dim: int = 512  # kv_lora_rank
    rope_dim: int = 64  # qk_rope_head_dim
    nope_dim: int = 128  # qk_nope_head_dim
    table_width: int = 0  # tokens that a row of req_to_token holds
    prefill: bool = False  # whether the implementation is to run prefill; decode, target_verify and draft_extend otherwise
    partner: str = ""  # the implementation asked for on the other side: prefill's for decode, decode's for prefill
    num_draft_tokens: int = 0  # D; 0 without speculative decoding
    sinks: bool = False  # whether the model has learned the score of a key without a value
    context_ranks: int = 1  # that divide the KV of every request (decode context parallel); each has the heads of all
    context_rank: int = 0  # this one of them

    @property
    def fewer_heads(self) -> str:
        """What gives a rank fewer query heads, for a refusal."""
        return "lower --dcp-size" if self.context_ranks > 1 else "raise --tp-size"

    @classmethod
    def of_model(cls, model_config: Any, attention_tp_size: int, *, context_ranks: int = 1, **facts: Any) -> AttentionConfig:
        """Of a rank of one model.

        Args:
            model_config: SGLang's ModelConfig.
            attention_tp_size: ranks that share the heads.
            context_ranks: of those, that divide the KV of a request; SGLang gathers their queries.
            facts: fields that no model tells.
        """
        return cls(
            num_heads=model_config.num_attention_heads // attention_tp_size * context_ranks,
            context_ranks=context_ranks,
            index_topk=adapter.index_topk(model_config.hf_config),
            latent_dim=model_config.kv_lora_rank,
            rope_dim=model_config.qk_rope_head_dim,
            nope_dim=model_config.qk_nope_head_dim,
            sinks=bool(getattr(model_config.hf_config, "learnable_sink", False)),
            **facts,
        )

    @property
    def fp8(self) -> bool:
        """Whether the KV cache is fp8_e4m3."""
        return self.kv_cache_dtype == torch.float8_e4m3fn


@dataclass(frozen=True)
class BackendConfig:
    """Frozen configuration of one backend."""

    attention: AttentionConfig
    decode_impl: str
    prefill_impl: str
    num_draft_tokens: int  # D; 0 without speculative decoding
    num_sms: int  # DeepGEMM's; 0 without a GPU
    num_kv_slots: int  # tokens the KV pool has memory for
    pairs_from: int | None = None  # requests of a target_verify from which on DeepGEMM's logits take its rows two by two
    surplus_last: bool = False  # which SMs DeepGEMM gives a segment more, see kernels/schedule.py
    wide_table: bool = False  # whether the top-k reads page_table_1
    topk_plan: bool = False  # whether it reads a plan, see kernels/topk_plan.py
    overlapped: bool = False  # whether it is one of several backends that run interleaved (two-batch overlap)
    decode_by_user: bool = True  # whether the user named `decode_impl`
    prefill_by_user: bool = True  # likewise
    divided_context: bool = False  # whether the server's ranks divide the KV of the target (decode context parallel)
    split_prefill: bool = False  # whether ranks may divide the rows of a prefill among them (prefill context parallel)

    def next_n(self, num_requests: int) -> int:
        """Rows of a request that DeepGEMM's logits take together in a target_verify of so many, where they divide D."""
        return 2 if self.pairs_from is not None and num_requests >= self.pairs_from else 1

    @property
    def dequantised_prefill(self) -> bool:
        """Whether prefill reads an FP8 KV cache through a bfloat16 copy."""
        return dequantises(self.attention.kv_cache_dtype, self.prefill_impl)

    @classmethod
    def from_runner(cls, runner: sglang_types.ModelRunner) -> BackendConfig:
        """Read and check; raises ValueError with one sentence where the model or the GPU cannot be served."""
        settings, hf_config = adapter.settings(runner), runner.model_config.hf_config
        # Every rank has all KV of the drafts.
        context_ranks, context_rank = (1, 0) if runner.is_draft_worker else (settings.context_ranks, settings.context_rank)
        device = torch.device(runner.device)
        kv_cache_dtype = runner.token_to_kv_pool.dtype
        prefill = prefill_name(settings.prefill, kv_cache_dtype)
        check_model(
            hf_config,
            speculative=bool(settings.num_steps),
            on_gpu=device.type == "cuda",
            dequantised_prefill=dequantises(kv_cache_dtype, prefill),
            disaggregated=settings.disaggregated,
        )
        if runner.page_size != PAGE_SIZE:
            raise ValueError(f"nsa_backend does not serve --page-size {runner.page_size}: pass --page-size {PAGE_SIZE}")
        table_width = runner.req_to_token_pool.req_to_token.shape[1]
        if runner.model_config.context_len > table_width:
            raise ValueError(
                f"--context-length {runner.model_config.context_len} is beyond the {table_width} tokens that a row of SGLang's "
                "request-to-token pool holds: lower --context-length"
            )
        if device.type == "cuda":
            _check_indexer()
        return cls(
            attention=AttentionConfig.of_model(
                runner.model_config,
                adapter.attention_tp_size(),
                context_ranks=context_ranks,
                context_rank=context_rank,
                device_sm=adapter.device_sm(device),
                kv_cache_dtype=kv_cache_dtype,
                device=device,
                device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
                page_size=runner.page_size,
                table_width=table_width,
                num_draft_tokens=settings.num_draft_tokens,
            ),
            decode_impl=settings.decode,
            decode_by_user=settings.decode_by_user,
            prefill_by_user=settings.prefill_by_user,
            prefill_impl=prefill,
            num_draft_tokens=settings.num_draft_tokens,
            num_sms=adapter.deep_gemm_num_sms() if device.type == "cuda" else 0,
            num_kv_slots=(runner.token_to_kv_pool.size + runner.token_to_kv_pool.page_size) * context_ranks,
            pairs_from=_pairs_from(adapter.device_sm(device)),
            surplus_last=adapter.schedule_surplus_last(adapter.device_sm(device)),
            wide_table=adapter.TOPK_READS_PAGE_TABLE_1,
            topk_plan=adapter.topk_v2() is not None,
            overlapped=settings.overlaps_batches and not runner.is_draft_worker,  # SGLang splits no draft batch
            divided_context=settings.context_ranks > 1,
            split_prefill=settings.splits_prefill,
        )


def _pairs_from(device_sm: int) -> int | None:
    """Requests from which on rows are scored two by two: those of one alone are where that is asked for."""
    switch = asked("NSA_BACKEND_PAIRED_LOGITS")
    if switch is None:
        return PAIRS_FROM if installed() in PAIRED_LOGITS and device_sm == 90 and adapter.pairs_logits() else None
    return 1 if switch else None


def _check_indexer() -> None:
    """The packages of the indexer's kernels: DeepGEMM's logits and sgl-kernel's top-k."""
    problems = (adapter.package_problem("sglang-kernel"), adapter.package_problem("sgl-deep-gemm"))
    if any(problems):
        raise ValueError(". ".join(filter(None, problems)))


def prefill_name(named: str, kv_cache_dtype: torch.dtype) -> str:
    """What sparse prefill runs on where options name `named`: SGLang's `flashmla_auto` is what it is there on Hopper."""
    if named != "flashmla_auto":
        return named
    return "flashmla_kv" if kv_cache_dtype == torch.float8_e4m3fn else "flashmla_sparse"
