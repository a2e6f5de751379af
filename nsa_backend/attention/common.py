"""What every sparse-attention implementation is given and must return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from nsa_backend import host

if TYPE_CHECKING:
    from nsa_backend.metadata import NSAMetadata


@dataclass(frozen=True)
class AttentionConfig:
    """Facts an implementation decides on; fixed for the life of a server."""

    device_sm: int  # 90 on Hopper, 0 without a GPU
    num_heads: int  # query heads on this rank
    kv_cache_dtype: torch.dtype
    index_topk: int
    deterministic: bool = False
    prefill: bool = False  # whether the implementation is to run prefill; decode, target_verify and draft_extend otherwise


@dataclass(frozen=True)
class FlashMlaTiles:
    """FlashMLA's own schedule of one forward."""

    tile_scheduler_metadata: torch.Tensor  # int32 [num_sm_parts, 8]
    num_splits: torch.Tensor  # int32 [rows + 1]


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
    flashmla_tiles: FlashMlaTiles | None = None


class SparseAttention(Protocol):
    """An implementation, ready to run."""

    def prepare(self, metadata: NSAMetadata) -> NSAMetadata:
        """Add what the kernel needs for these rows beyond the metadata launch; called after it, once a forward.

        Runs inside the capture where one is under way, so it may launch and allocate but not synchronise.
        """
        ...

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        """Attend; returns [rows, heads, v_head_dim] in the dtype of `q_nope`.

        A row whose top-k is all -1 (a padding row) yields finite values that nobody reads.
        """
        ...


class NothingToPrepare:
    """For implementations that need nothing beyond the metadata launch."""

    def prepare(self, metadata: NSAMetadata) -> NSAMetadata:
        """Returns `metadata` as it is."""
        return metadata


def joined_query(q_nope: torch.Tensor, q_rope: torch.Tensor, padded_heads: int) -> torch.Tensor:
    """[rows, padded_heads, latent + rope]; the added heads are zero. `padded_heads` is at least the number of heads."""
    rows, heads, latent_dim = q_nope.shape
    if padded_heads == heads:
        return host.concat_mla_absorb_q_general(q_nope, q_rope)
    q = q_nope.new_zeros(rows, padded_heads, latent_dim + q_rope.shape[-1])
    q[:, :heads, :latent_dim] = q_nope
    q[:, :heads, latent_dim:] = q_rope
    return q
