"""Refusals of what backends of SGLang 0.5.17 to 0.5.23 are asked for and this one does not do."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sglang.srt.configs import model_config
from sglang.srt.environ import envs

from nsa_backend.adapters import decode_context_parallel, prefill_context_parallel
from nsa_backend.adapters.layer_sharing import sharing_problem
from nsa_backend.adapters.option_rules import Rule, nested
from nsa_backend.releases import installed

rule = partial(Rule, everywhere=False)

_INDEXER = "SGLang's indexer then reads metadata that it has not asked its backend for, so no server gets through its captures"

REFUSED = (
    *prefill_context_parallel.REFUSED,
    *decode_context_parallel.REFUSED,
    rule(
        "enable_cp_decode_attn_tp",
        "--enable-cp-decode-attn-tp",
        "a rank then has fewer heads in decode than in prefill, and a backend here is built for one number",
    ),
    rule(
        "enable_kv_cache_sharding",
        "--enable-kv-cache-sharding",
        "a prefill then reads a gathered copy of the KV under other slots than the request table's, and page tables here are "
        "made from that table",
    ),
    rule(
        "enable_unified_memory",
        "--enable-unified-memory",
        "slots in the request table are then virtual, and page tables here are made from them as they stand",
        builtin_serves=False,
    ),
    rule(
        "enable_page_major_kv_layout",
        "--enable-page-major-kv-layout",
        "the KV of a layer is then strided, and kernels here read it as dense",
        builtin_serves=False,
    ),
    rule(
        "cuda_graph_config.prefill.backend",
        "--cuda-graph-backend-prefill",
        "its metadata launch would be captured too, and a prefill has no replay buffers",
        (None, "disabled", "tc_piecewise", "breakable"),
        "pass --cuda-graph-backend-prefill breakable",
    ),
    rule(
        "cuda_graph_config.decode.backend",
        "--cuda-graph-backend-decode",
        _INDEXER,
        (None, "disabled", "tc_piecewise", "full"),
        "pass --cuda-graph-backend-decode full",
        builtin_serves=False,
    ),
    rule(
        "debug_cuda_graph",
        "--debug-cuda-graph",
        f"it needs --cuda-graph-backend-decode breakable, and {_INDEXER}",
        advice="pass --disable-cuda-graph, which runs the same forwards outside graphs",
        builtin_serves=False,
    ),
    rule("dsa_topk_backend", "--dsa-topk-backend", "", (None, "sgl-kernel"), "pass --dsa-topk-backend sgl-kernel"),
    rule(
        "speculative_dsa_topk_backend",
        "--speculative-dsa-topk-backend",
        "",
        (None, "sgl-kernel"),
        "pass --speculative-dsa-topk-backend sgl-kernel",
    ),
    rule(
        "dsa_paged_mqa_logits_backend",
        "--dsa-paged-mqa-logits-backend",
        "the schedule that is written here is DeepGEMM's",
        (None, "auto", "deepgemm"),
        "pass --dsa-paged-mqa-logits-backend deepgemm",
    ),
)
"""Options that this generation alone has, or alone may not be started with; a release need not have all."""

REFUSED_ENVIRONMENT = {
    "SGLANG_EAGER_INPUT_NO_COPY": "draft steps would hand strided locations to a KV writer that reads them as if dense",
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "a second stream would refill the lengths that the draft graph is still reading",
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": "there is no eager preparation to capture: the graph writes its own metadata",
}
"""Switches of SGLang that must be off, and why."""


_SAME_KV = {"bf16": "bfloat16", "auto": "bfloat16"}


def combination_problems(args: Any) -> list[str]:
    """One sentence for each of these resolved arguments that is not served beside another one."""
    found = prefill_context_parallel.combination_problems(args) + decode_context_parallel.combination_problems(args)
    drafts, target = nested(args, "speculative_draft_kv_cache_dtype"), args.kv_cache_dtype
    kv = {_SAME_KV.get(name, name) for name in (drafts, target)}
    if args.speculative_algorithm and drafts is not None and len(kv) > 1:
        found.append(
            f"nsa_backend does not serve --speculative-draft-kv-cache-dtype {drafts} beside --kv-cache-dtype {target}: one "
            "implementation reads the KV of both, and SGLang's layers of both go by the target's dtype; drop the first option, "
            "and drafts follow the target"
        )
    return found


def model_problem(hf_config: Any, speculative: bool, dequantised_prefill: bool, disaggregated: bool = False) -> str | None:
    """What a sparse model asks of its backend that this one does not do, or what SGLang does not do for it; or None.

    Args:
        speculative: whether draft steps are asked for.
        dequantised_prefill: whether prefill dequantises an FP8 KV cache, and its top-k counts rows of that.
        disaggregated: whether the server is one of a pair, between which shared selections travel as positions.
    """
    architecture = hf_config.architectures[0]
    if getattr(model_config, "get_dsa_index_kpool", lambda config: 1)(hf_config) > 1:
        return "its indexer pools keys (index_kpool), and page tables here are made for one key a token"
    if getattr(hf_config, "qk_rope_head_dim", 64) == 0:
        return "its attention has no RoPE part, and every implementation here reads one"
    if architecture.startswith("Dots3Note"):
        return "SGLang gives its full-attention layers a sparse backend of its own, past the one that is registered"
    if getattr(hf_config, "learnable_sink", False) and dequantised_prefill:
        return "its attention has learnable sinks, which are added on a bfloat16 KV cache alone; pass --kv-cache-dtype bfloat16"
    if speculative and architecture.startswith("LongcatFlash"):
        return "SGLang's MTP layer of it takes no selection back from its attention; drop --speculative-algorithm"
    of_prefill = speculative and dequantised_prefill and shares_draft_selections(hf_config)
    if of_prefill and not disaggregated and not _turns_selections_into_slots():
        return (
            f"its draft steps attend with the selection of prefill, and SGLang {installed()} does not turn one that was made "
            "on dequantised FP8 KV into slots; pass --dsa-prefill-backend flashmla_kv"
        )
    if getattr(hf_config, "cli_factor", None) is None:  # LongCat's own pattern, which SGLang's models read by themselves
        return sharing_problem(hf_config, model_config.dsa_layer_skips_topk, installed())
    return None


def shares_draft_selections(hf_config: Any) -> bool:
    """Whether all draft steps of a round attend with one selection."""
    return bool(getattr(hf_config, "index_share_for_mtp_iteration", False))


def _turns_selections_into_slots() -> bool:
    """Whether SGLang asks a backend for a prefill's selection as draft steps read it (`prepare_mtp_seed_indices`)."""
    name = "sglang.srt.layers.attention.index_topk_share"
    return find_spec(name) is not None and hasattr(import_module(name), "write_mtp_seed")


def environment_problems() -> list[str]:
    """One sentence for each of SGLang's own switches that must be off."""
    found = []
    for name, why in REFUSED_ENVIRONMENT.items():
        if hasattr(envs, name) and getattr(envs, name).get():
            found.append(f"nsa_backend does not serve {name}=1: {why}; unset it")
    return found
