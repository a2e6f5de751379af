"""The kernels that are used here, where SGLang 0.5.17 to 0.5.23 have them; some moved on the way."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from sglang.srt.environ import envs

TOPK_READS_PAGE_TABLE_1 = False
"""Top-k v2 reads the table of 64-token pages; without it positions are selected and turned into slots through pages."""


def topk_v2() -> tuple[Callable, Callable | None] | None:
    """SGLang's top-k v2 kernel: through page tables, and in windows of ragged logits where the release has that form.

    None where the user turned it off (SGLANG_OPT_USE_TOPK_V2=0).
    """
    if not envs.SGLANG_OPT_USE_TOPK_V2.get():
        return None
    from sglang.kernels.ops.attention.dsv4 import topk as module

    paged = getattr(module, "topk_transform_paged_v2", None) or module.topk_transform_512_v2
    return paged, getattr(module, "topk_transform_ragged_v2", None)


def concat_query(q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
    """[rows, heads, latent + rope] in memory of its own, by SGLang's kernel."""
    from sglang.kernels.ops.attention.utils import concat_mla_absorb_q_general as function

    return function(q_nope, q_rope)


def fa3_scheduler() -> Callable | None:
    """FA3's function that schedules the tiles of a batch ahead of its layers; None where FA3 is not sgl-kernel's."""
    if not envs.SGLANG_USE_SGL_FA3_KERNEL.get():
        return None
    from sgl_kernel.flash_attn import get_scheduler_metadata

    return get_scheduler_metadata


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
