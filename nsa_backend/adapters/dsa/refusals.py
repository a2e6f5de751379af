"""What backends of SGLang 0.5.17 to 0.5.23 are asked for and this one does not do."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs import model_config
from sglang.srt.environ import envs

REFUSED_OPTIONS = {
    "enable_prefill_cp": "--enable-prefill-cp",
    "enable_dsa_prefill_context_parallel": "--enable-dsa-prefill-context-parallel",
    "enable_dsa_cache_layer_split": "--enable-dsa-cache-layer-split",
    "enable_kv_cache_sharding": "--enable-kv-cache-sharding",
    "enable_cp_decode_attn_tp": "--enable-cp-decode-attn-tp",
    "enable_unified_memory": "--enable-unified-memory",
    "enable_page_major_kv_layout": "--enable-page-major-kv-layout",
    "speculative_adaptive": "--speculative-adaptive",
}
"""Attributes of ServerArgs to options that this generation alone has and that must be off; a release need not have all."""

REFUSED_VALUES = {
    # Its metadata launch would be captured too, and a prefill has no replay buffers: it allocates for the rows that come.
    "cuda_graph_config.prefill.backend": ("--cuda-graph-backend-prefill", (None, "disabled", "tc_piecewise", "breakable")),
    "dcp_size": ("--dcp-size", (None, 1)),
    "dsa_topk_backend": ("--dsa-topk-backend", (None, "sgl-kernel")),
    "speculative_dsa_topk_backend": ("--speculative-dsa-topk-backend", (None, "sgl-kernel")),
    "dsa_paged_mqa_logits_backend": ("--dsa-paged-mqa-logits-backend", (None, "auto", "deepgemm")),
}
"""Attributes, dotted where they are nested, to the option and the values that are served."""

REFUSED_ENVIRONMENT = {
    "SGLANG_EAGER_INPUT_NO_COPY": "draft steps would hand strided locations to a KV writer that reads them as if dense",
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "a second stream would refill the lengths that the draft graph is still reading",
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": "there is no eager preparation to capture: the graph writes its own metadata",
}
"""Switches of SGLang that must be off, and why."""


def model_problem(hf_config: Any, speculative: bool) -> str | None:
    """What a sparse model asks of its backend that this one does not do, or None."""
    if getattr(model_config, "get_dsa_index_kpool", lambda config: 1)(hf_config) > 1:
        return "its indexer pools keys (index_kpool), and page tables here are made for one key a token"
    if getattr(hf_config, "qk_rope_head_dim", 64) == 0:
        return "its attention has no RoPE part, and every implementation here reads one"
    if getattr(hf_config, "learnable_sink", False):
        return "its attention has learnable sinks, and no implementation here adds them"
    if speculative and getattr(hf_config, "index_share_for_mtp_iteration", False):
        return (
            "its draft steps share the top-k of draft-extend (index_share_for_mtp_iteration), which is shorter than what each "
            "step attends to here"
        )
    return None


def environment_problems() -> list[str]:
    """One sentence for each of SGLang's own switches that must be off."""
    found = []
    for name, why in REFUSED_ENVIRONMENT.items():
        if hasattr(envs, name) and getattr(envs, name).get():
            found.append(f"nsa_backend does not serve {name}=1: {why}; unset it")
    return found
