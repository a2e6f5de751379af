"""The check of a model's config, which tells whether it can be served: made before its weights are loaded, and after."""

from __future__ import annotations

from typing import Any

import torch

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter

GPU_INDEX_TOPK = 2048
"""The only top-k that sgl-kernel's fast_topk kernels are built for."""

GPU_KV = (512, 64)
"""Latent and RoPE values of a token that every kernel here is built for."""


def dequantises(kv_cache_dtype: str | torch.dtype, prefill: str) -> bool:
    """Whether prefill reads an FP8 KV cache through a bfloat16 copy, and its top-k counts rows of that.

    Args:
        kv_cache_dtype: of the KV cache, or what --kv-cache-dtype calls it.
        prefill: implementation of prefill.
    """
    return kv_cache_dtype in ("fp8_e4m3", torch.float8_e4m3fn) and prefill == "flashmla_sparse"


def check_model(
    hf_config: Any, *, speculative: bool, on_gpu: bool, dequantised_prefill: bool = False, disaggregated: bool = False
) -> None:
    """Raise ValueError with one sentence where a model of this config cannot be served.

    Args:
        hf_config: the config.json of a target or a draft model, as SGLang has read it.
        speculative: whether draft steps are asked for.
        on_gpu: whether kernels for a GPU run.
        dequantised_prefill: what `dequantises` says of the KV cache and of prefill's implementation.
        disaggregated: whether the server is one of a pair (PD disaggregation).
    """
    architecture = hf_config.architectures[0]
    if not adapter.is_sparse_model(hf_config):
        raise ValueError(
            f"--attention-backend {adapter.BACKEND_NAMES[0]} serves models with an index_topk (DeepSeek-V3.2 and its kin), "
            f"and {architecture} has none: choose another --attention-backend"
        )
    problem = adapter.model_problem(hf_config, speculative, dequantised_prefill, disaggregated)
    if getattr(hf_config, "llama_4_scaling", None) is not None:
        problem = (
            "its queries are scaled by position (llama_4_scaling), which SGLang hands no implementation that is served here"
        )
    if problem:
        raise ValueError(f"nsa_backend does not serve {architecture}: {problem}{_way_back(problem)}")
    index_topk = adapter.index_topk(hf_config)
    if on_gpu and index_topk != GPU_INDEX_TOPK:
        raise ValueError(
            f"this model keeps index_topk = {index_topk} tokens and sgl-kernel's top-k is built for {GPU_INDEX_TOPK}: "
            "only models with that top-k can be served on a GPU"
        )
    kv = getattr(hf_config, "kv_lora_rank", GPU_KV[0]), getattr(hf_config, "qk_rope_head_dim", GPU_KV[1])
    if on_gpu and kv != GPU_KV:
        raise ValueError(
            f"nsa_backend does not serve {architecture}: its KV cache has {kv[0]} latent and {kv[1]} RoPE values a token, and "
            f"the kernels are built for {GPU_KV[0]} and {GPU_KV[1]}; {adapter.WAY_BACK}"
        )


def _way_back(problem: str) -> str:
    """The way back to SGLang's own backend, as one of two choices where the problem ends with advice."""
    return f"{', or' if '; ' in problem else ';'} {adapter.WAY_BACK}"


def check_models(server_args: sglang_types.ServerArgs, names: dict[str, str | None]) -> None:
    """Check the target and, where it is another checkpoint, the draft model; SGLang has read the target's config before.

    Args:
        server_args: resolved by SGLang, in the main process.
        names: by part of the server, the attention backend that options name.
    """
    args = adapter.resolved(server_args)
    asked = {
        "speculative": bool(args.speculative_num_steps),
        "on_gpu": args.device == "cuda",
        "dequantised_prefill": dequantises(args.kv_cache_dtype, getattr(args, adapter.PREFILL_ATTRIBUTE)),
        "disaggregated": args.disaggregation_mode != "null",
    }
    if not {names["prefill"], names["decode"]}.isdisjoint(adapter.BACKEND_NAMES):
        check_model(adapter.target_model(server_args).hf_config, **asked)
    if names.get("drafts") in adapter.BACKEND_NAMES:
        draft = adapter.draft_config(server_args, args)
        if draft is not None:
            _check_draft(draft)
            check_model(draft, **asked)


def _check_draft(hf_config: Any) -> None:
    """Raise ValueError where a draft model of its own checkpoint is dense (EAGLE3), and would get the target's backend."""
    if not adapter.is_sparse_model(hf_config):
        raise ValueError(
            f"--attention-backend {adapter.BACKEND_NAMES[0]} serves models with an index_topk, and the draft model "
            f"{hf_config.architectures[0]} has none: pass --speculative-draft-attention-backend fa3, and the target is served "
            "as before"
        )
