"""What a model's config tells about whether it can be served: asked before its weights are loaded, and once more after."""

from __future__ import annotations

from typing import Any

from nsa_backend.adapters import sglang
from nsa_backend.adapters.installed import adapter

GPU_INDEX_TOPK = 2048
"""The only top-k that sgl-kernel's fast_topk kernels are built for."""


def check_model(hf_config: Any, *, speculative: bool, on_gpu: bool) -> None:
    """Raise ValueError with one sentence where a model of this config cannot be served.

    Args:
        hf_config: the config.json of a target or a draft model, as SGLang has read it.
        speculative: whether draft steps are asked for.
        on_gpu: whether the indexer runs sgl-kernel's kernels.
    """
    architecture = hf_config.architectures[0]
    if not adapter.is_sparse_model(hf_config):
        raise ValueError(
            f"--attention-backend {adapter.BACKEND_NAMES[0]} serves models with an index_topk (DeepSeek-V3.2 and its kin), "
            f"and {architecture} has none: choose another --attention-backend"
        )
    problem = adapter.model_problem(hf_config, speculative)
    if problem:
        raise ValueError(f"nsa_backend does not serve {architecture}: {problem}; {adapter.WAY_BACK}")
    index_topk = adapter.index_topk(hf_config)
    if on_gpu and index_topk != GPU_INDEX_TOPK:
        raise ValueError(
            f"this model keeps index_topk = {index_topk} tokens and sgl-kernel's top-k is built for {GPU_INDEX_TOPK}: "
            "only models with that top-k can be served on a GPU"
        )


def check_models(server_args: sglang.ServerArgs, names: dict[str, str | None]) -> None:
    """Check the target and, where it is another checkpoint, the draft model; SGLang has read the target's config before.

    Args:
        server_args: resolved by SGLang, in the main process.
        names: by part of the server, the attention backend that options name.
    """
    args = adapter.resolved(server_args)
    speculative, on_gpu = bool(args.speculative_num_steps), args.device == "cuda"
    if not {names["prefill"], names["decode"]}.isdisjoint(adapter.BACKEND_NAMES):
        check_model(adapter.target_config(server_args), speculative=speculative, on_gpu=on_gpu)
    if names.get("drafts") in adapter.BACKEND_NAMES:
        draft = adapter.draft_config(server_args, args)
        if draft is not None:
            check_model(draft, speculative=speculative, on_gpu=on_gpu)
