"""What every sparse-attention implementation is given and must return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class AttentionConfig:
    """Facts an implementation decides on; fixed for the life of a server."""

    device_sm: int  # 90 on Hopper, 0 without a GPU
    num_heads: int  # query heads on this rank
    kv_cache_dtype: torch.dtype
    index_topk: int
    deterministic: bool = False


@dataclass(frozen=True)
class SparseInputs:
    """One call: every query row attends to the KV slots that the indexer chose for it."""

    q_nope: torch.Tensor  # [rows, heads, v_head_dim], absorbed
    q_rope: torch.Tensor  # [rows, heads, rope_dim]
    kv_cache: torch.Tensor  # [slots, 1, v_head_dim + rope_dim]
    topk_slots: torch.Tensor  # int32 [rows, index_topk], -1 where there is none
    cache_seqlens: torch.Tensor  # int32 [rows], valid entries of each top-k row
    cu_seqlens_q: torch.Tensor  # int32 [rows + 1], 0, 1, 2, ...
    cu_seqlens_k: torch.Tensor  # int32 [rows + 1], exclusive prefix sum of cache_seqlens
    sm_scale: float
    logit_cap: float


class SparseAttention(Protocol):
    """An implementation, ready to run."""

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        """Attend; returns [rows, heads, v_head_dim] in the dtype of `q_nope`.

        A row whose top-k is all -1 (a padding row) yields finite values that nobody reads.
        """
        ...
