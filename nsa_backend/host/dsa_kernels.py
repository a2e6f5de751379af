"""Where SGLang 0.5.17 to 0.5.23 have the kernels that are used here; some moved on the way."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch


def dequantize_k_cache_paged(quant_k_cache: torch.Tensor, page_table_1_flattened: torch.Tensor) -> torch.Tensor:
    """bfloat16 [slots, 1, latent + rope] of those slots of a packed FP8 KV cache."""
    from sglang.kernels.ops.attention.dsa import dequant_k_cache as module

    found = getattr(module, "dequantize_k_cache_paged_dsa", None) or module.dequantize_k_cache_paged
    return found(quant_k_cache, page_table_1_flattened)


def mla_quantize_and_rope_for_fp8(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RoPE and the cast to fp8_e4m3 of query and key, in SGLang's one launch."""
    from sglang.kernels.ops.attention.utils import mla_quantize_and_rope_for_fp8 as function

    return function(*arguments)


def fa3_functions() -> tuple[Callable, Callable]:
    """`(flash_attn_with_kvcache, flash_attn_varlen_func)` of SGLang's FA3."""
    from sglang.kernels.ops.attention.flash_attention import flash_attn_varlen_func, flash_attn_with_kvcache

    return flash_attn_with_kvcache, flash_attn_varlen_func


def _has_flash_mla_of_its_own() -> bool:
    return find_spec("sglang.kernels.ops.attention.flash_mla_interface") is not None


FLASH_MLA_DISTRIBUTION = "sgl-flash-mla" if _has_flash_mla_of_its_own() else "sglang-kernel"


def flash_mla() -> ModuleType:
    """The module of FlashMLA's functions: `flash_mla_sparse_fwd`, `flash_mla_with_kvcache`, `get_mla_metadata`."""
    if _has_flash_mla_of_its_own():
        from sglang.kernels.ops.attention import flash_mla_interface as module
    else:
        import sgl_kernel.flash_mla as module
    return module
