"""The adapter of the installed SGLang. Nothing outside this package imports `sglang`, the demo aside.

Adapters offer the same names (`ADAPTER_NAMES`); `shared` has what all supported releases do alike. Imports that need a GPU
or its libraries stay inside functions, so that the package loads on a machine without one.
"""

from __future__ import annotations

import sys
from importlib import import_module

from nsa_backend.adapters.shared import *  # noqa: F403
from nsa_backend.adapters.startup import draft_config, target_config, watch_backends
from nsa_backend.releases import GENERATIONS, SUPPORTED, generation_of, installed

ADAPTER_NAMES = (
    "BACKEND_NAMES",
    "BackendEntryPoints",
    "BaseIndexerMetadata",
    "DECODE_ATTRIBUTE",
    "DECODE_OPTION",
    "FLASH_MLA_DISTRIBUTION",
    "MultiStepEntryPoints",
    "PREFILL_ATTRIBUTE",
    "PREFILL_OPTION",
    "REFUSED_OPTIONS",
    "REFUSED_VALUES",
    "TOPK_READS_PAGE_TABLE_1",
    "attention_tp_size",
    "concat_query",
    "dense_prefill_limit",
    "dequantize_k_cache_paged",
    "draft_extend_sizes_in_tokens",
    "environment_problems",
    "fa3_functions",
    "fa3_scheduler",
    "flash_mla",
    "fuse_topk",
    "in_prefill_graph",
    "index_topk",
    "is_draft_extend",
    "is_ragged_draft_extend",
    "is_sparse_model",
    "kv_pool",
    "mla_quantize_and_rope_for_fp8",
    "model_problem",
    "take_draft_side",
    "resolved",
    "schedule_surplus_last",
    "served_backends",
    "settings",
    "shares_selections",
    "take_over",
    "topk_v2",
)
"""What an adapter must offer."""

_generation = generation_of(installed())
if _generation is None:
    raise ImportError(f"nsa_backend supports SGLang {SUPPORTED}, and this is {installed()}")
ADAPTER = import_module(f"nsa_backend.adapters.{_generation.adapter}.adapter")
globals().update({name: getattr(ADAPTER, name) for name in ADAPTER_NAMES})

adapter = sys.modules[__name__]

__all__ = ["ADAPTER", "ADAPTER_NAMES", "GENERATIONS", "adapter", "draft_config", "target_config", "watch_backends"]
__all__ += ADAPTER_NAMES
