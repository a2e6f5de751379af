"""The host boundary: every import from SGLang, for release 0.5.12.post1.

Nothing else in the package imports `sglang`, so another host release costs another file like this one. Imports that need a
GPU or its libraries stay inside functions, so that the package loads on a machine without one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any

import torch
from packaging.requirements import Requirement
from sglang.srt.configs.model_config import get_nsa_index_topk, is_deepseek_nsa
from sglang.srt.environ import envs
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.nsa.dequant_k_cache import dequantize_k_cache_paged
from sglang.srt.layers.attention.nsa.nsa_indexer import BaseIndexerMetadata
from sglang.srt.layers.attention.nsa.utils import pad_nsa_cache_seqlens
from sglang.srt.layers.attention.utils import mla_quantize_and_rope_for_fp8
from sglang.srt.layers.dp_attention import get_attention_tp_size
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative.draft_utils import DraftBackendFactory

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpecInput

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "BaseIndexerMetadata",
    "DraftBackendFactory",
    "ForwardBatch",
    "ForwardMode",
    "ModelRunner",
    "RadixAttention",
    "ServerArgs",
    "SpecInput",
    "dequantize_k_cache_paged",
    "get_attention_tp_size",
    "get_nsa_index_topk",
    "is_deepseek_nsa",
    "mla_quantize_and_rope_for_fp8",
    "pad_nsa_cache_seqlens",
    "register_attention_backend",
]

WAY_BACK = "set NSA_BACKEND_DISABLE=1 to serve with SGLang's built-in nsa backend"

DRAFT_WORKERS = (
    ("sglang.srt.speculative.eagle_worker_v2", "EagleDraftWorker"),
    ("sglang.srt.speculative.eagle_worker", "EAGLEWorker"),
)
"""The workers whose `draft_forward` runs our multi-step backend: spec v2 (overlap scheduling) and spec v1."""


def fuse_topk() -> bool:
    """Whether the indexer's top-k returns KV slots (SGLANG_NSA_FUSE_TOPK=1, the default) or token positions."""
    return envs.SGLANG_NSA_FUSE_TOPK.get()


def dense_prefill_limit() -> int:
    """Longest KV length, in tokens, that prefill still computes densely; SGLang sets it to index_topk."""
    return envs.SGLANG_NSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.get()


def flashinfer_workspace_bytes() -> int:
    """Size of the workspace that flashinfer's kernels share (SGLANG_FLASHINFER_WORKSPACE_SIZE)."""
    return envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get()


@functools.cache
def _pins() -> dict[str, Requirement]:
    """What the installed SGLang requires without condition, by distribution name with dashes."""
    found = (Requirement(line) for line in requires("sglang") or ())
    return {requirement.name.replace("_", "-"): requirement for requirement in found if requirement.marker is None}


def package_problem(distribution: str) -> str | None:
    """Why `distribution` cannot be relied on, or None: it is missing, or not the release that the installed SGLang pins."""
    pin = _pins().get(distribution.replace("_", "-"))
    wanted = f"SGLang {version('sglang')} needs {pin or distribution}: pip install '{pin or distribution}'"
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return f"{distribution} is not installed and {wanted}"
    if pin is not None and not pin.specifier.contains(found, prereleases=True):
        return f"{distribution} {found} is installed and {wanted}"
    return None


def deep_gemm_num_sms() -> int:
    """SMs that DeepGEMM's paged-MQA logits kernel schedules for on this GPU."""
    import deep_gemm

    return deep_gemm.get_num_sms()


def fa3_functions() -> tuple[Callable, Callable]:
    """`(flash_attn_with_kvcache, flash_attn_varlen_func)` of SGLang's FA3."""
    from sglang.jit_kernel.flash_attention import flash_attn_varlen_func, flash_attn_with_kvcache

    return flash_attn_with_kvcache, flash_attn_varlen_func


def hook(target: str, function: Callable, kind: HookType) -> None:
    """Hook `target`, a dotted path, through SGLang's registry at once; raises RuntimeError where that did not take.

    The registry logs a failure and goes on, which would leave the built-in backend serving in part.
    """
    HookRegistry.register(target, function, kind)
    HookRegistry.apply_hooks()
    if target not in HookRegistry._patched:
        raise RuntimeError(f"nsa_backend could not hook {target}, and the log above says why; to go on without it, {WAY_BACK}")


def hook_draft_workers(method: str, function: Callable) -> None:
    """Wrap `method` of every draft worker that this process has loaded.

    Not done when the plugin loads: the workers' modules import sgl_kernel, which needs libcuda, and SGLang loads plugins in
    processes that never see a GPU.
    """
    for module, worker in DRAFT_WORKERS:
        target = f"{module}.{worker}.{method}"
        if module in sys.modules and target not in HookRegistry._hooks:
            hook(target, function, HookType.AROUND)


def hook_draft_extend_runner(function: Callable) -> None:
    """Wrap how the draft-extend graph runner is built, for both draft workers; once the module can be imported, as above."""
    target = "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.__init__"
    if target not in HookRegistry._hooks:
        hook(target, function, HookType.AROUND)


def draft_extend_graph_runner(worker: Any) -> Any:
    """Capture the draft-extend graphs of a draft worker, `num_steps + 1` rows a request."""
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    return EAGLEDraftExtendCudaGraphRunner(worker)


@contextlib.contextmanager
def draft_extend_sizes_in_tokens(tokens_per_request: int) -> Iterator[None]:
    """While a draft-extend graph runner is built, choose its batch sizes by tokens.

    A captured batch must hold a multiple of the attention TP size in tokens. SGLang 0.5.12.post1 tells its target runner that
    a request has D tokens and does not tell the draft-extend runner, which then leaves out sizes that would do.
    """
    from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as module

    original = module.get_batch_sizes_to_capture
    module.get_batch_sizes_to_capture = functools.partial(original, num_tokens_per_bs=tokens_per_request)
    try:
        yield
    finally:
        module.get_batch_sizes_to_capture = original


def is_rocm() -> bool:
    return torch.version.hip is not None


def device_sm(device: torch.device | str) -> int:
    """Compute capability of a CUDA device as one number, 90 for Hopper; 0 without a GPU."""
    if torch.device(device).type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
