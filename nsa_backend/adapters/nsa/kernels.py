"""The kernels that are used here, where SGLang 0.5.12 and 0.5.12.post1 have them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from sglang.srt.layers.attention.nsa.dequant_k_cache import dequantize_k_cache_paged
from sglang.srt.layers.attention.utils import concat_mla_absorb_q_general as concat_query
from sglang.srt.layers.attention.utils import mla_quantize_and_rope_for_fp8

__all__ = ["concat_query", "dequantize_k_cache_paged", "mla_quantize_and_rope_for_fp8"]

TOPK_READS_PAGE_TABLE_1 = True
"""The fused top-k reads a table of one column a token."""

FLASH_MLA_DISTRIBUTION = "sglang-kernel"


def topk_v2() -> None:
    """None: these releases do not have SGLang's top-k v2 kernel."""


def fa3_scheduler() -> Callable | None:
    """None: tiles are scheduled in every layer, as these releases do."""
    return None


def fa3_functions() -> tuple[Callable, Callable]:
    """`(flash_attn_with_kvcache, flash_attn_varlen_func)` of SGLang's FA3."""
    from sglang.jit_kernel.flash_attention import flash_attn_varlen_func, flash_attn_with_kvcache

    return flash_attn_with_kvcache, flash_attn_varlen_func


def flash_mla() -> ModuleType:
    """The module of FlashMLA's functions: `flash_mla_sparse_fwd`, `flash_mla_with_kvcache`, `get_mla_metadata`."""
    import sgl_kernel.flash_mla as module

    return module
