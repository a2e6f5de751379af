"""SGLang's own types and registries, by the names they have there; which module has them is alike in all supported releases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from sglang.srt.speculative.draft_utils import DraftBackendFactory

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpecInput

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "DraftBackendFactory",
    "ForwardBatch",
    "ForwardMode",
    "HookRegistry",
    "HookSource",
    "HookType",
    "ModelRunner",
    "RadixAttention",
    "ServerArgs",
    "SpecInput",
    "register_attention_backend",
]
