"""An implementation of sparse attention, as the backend sees it: what it must offer."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.context_part import ContextPart
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.config import AttentionConfig
from nsa_backend.metadata.views import NSAMetadata


class SparseAttention(Protocol):
    """An implementation, ready to run."""

    def reserve(self, max_rows: int) -> None:
        """Keep memory for captured forwards of up to `max_rows` query rows; called before the captures."""
        ...

    def prepare(self, metadata: NSAMetadata) -> NSAMetadata:
        """Add what the kernel needs for these rows beyond the metadata launch; called after it, once a forward.

        Runs inside the capture where one is under way, so it may launch and allocate but not synchronise.
        """
        ...

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        """Attend; returns [rows, heads, v_head_dim] in bfloat16 (in the query's dtype without a GPU).

        A row whose top-k is all -1 (a padding row) yields finite values that nobody reads.
        """
        ...

    def forward_part(self, inputs: SparseInputs, part: ContextPart) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to what this rank has of the chosen slots, where ranks divide the KV of every request.

        Returns:
            [rows, heads, v_head_dim] as `forward`, zeros where the rank has nothing of a row; and float32 [rows, heads],
            contiguous: the log-sum-exp in base 2, -inf there. For implementations without `part_problems`.
        """
        ...


class NothingToPrepare:
    """For implementations that need nothing beyond the metadata launch."""

    def reserve(self, max_rows: int) -> None:
        """Nothing to keep."""

    def prepare(self, metadata: NSAMetadata) -> NSAMetadata:
        """Returns `metadata` as it is."""
        return metadata


def device_title(device_sm: int) -> str:
    """What a refusal calls the device."""
    return f"SM{device_sm}" if device_sm else "no GPU"


def sinks_problems(config: AttentionConfig) -> list[str]:
    """Why a kernel that adds no sinks cannot run: no sentence, or one."""
    if not config.sinks:
        return []
    return ["this model has learnable sinks and its kernel adds none: flashmla_sparse does, on a bfloat16 KV cache"]


def part_problems(config: AttentionConfig) -> list[str]:
    """Why a kernel without a log-sum-exp cannot run: no sentence, or one."""
    if config.context_ranks == 1:
        return []
    return ["--dcp-size divides the KV of a request among ranks, whose parts are joined by a log-sum-exp, and it returns none"]


def bfloat16_problems(config: AttentionConfig) -> list[str]:
    """Why a kernel that reads a bfloat16 KV cache cannot run: no sentence, or one."""
    if config.kv_cache_dtype == torch.bfloat16:
        return []
    return [f"it reads a bfloat16 KV cache and this one is {config.kv_cache_dtype}"]


def package_problems(distribution: str) -> list[str]:
    """Why the package that a kernel comes from cannot be relied on: no sentence, or one."""
    problem = adapter.package_problem(distribution)
    return [problem] if problem else []


def nvrtc_problems() -> list[str]:
    """Why a kernel in CUDA C++ cannot be compiled: no sentence, or one. SGLang requires cuda-python."""
    try:
        if find_spec("cuda.bindings.nvrtc") is not None:
            return []
    except ModuleNotFoundError:
        pass
    return ["it is compiled at start by NVRTC of cuda-python, which is not installed: pip install cuda-python"]
