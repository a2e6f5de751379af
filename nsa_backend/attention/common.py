"""What every sparse-attention implementation is given and must return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from nsa_backend.metadata import NSAMetadata


CPU = torch.device("cpu")


@dataclass(frozen=True)
class AttentionConfig:
    """Facts an implementation decides on; fixed for the life of a server."""

    device_sm: int  # 90 on Hopper, 0 without a GPU
    num_heads: int  # query heads on this rank
    kv_cache_dtype: torch.dtype
    index_topk: int
    device: torch.device = CPU
    device_name: str = ""  # as torch.cuda.get_device_name says it
    page_size: int = 64
    latent_dim: int = 512  # kv_lora_rank
    rope_dim: int = 64  # qk_rope_head_dim
    nope_dim: int = 128  # qk_nope_head_dim
    table_width: int = 0  # tokens that a row of req_to_token holds
    prefill: bool = False  # whether the implementation is to run prefill; decode, target_verify and draft_extend otherwise
    partner: str = ""  # the implementation asked for on the other side: prefill's for decode, decode's for prefill


@dataclass(frozen=True)
class FlashMlaTiles:
    """FlashMLA's own schedule of one forward."""

    tile_scheduler_metadata: torch.Tensor  # int32 [num_sm_parts, 8]
    num_splits: torch.Tensor  # int32 [rows + 1]


@dataclass(slots=True)
class SparseInputs:
    """One call: every query row attends to the KV slots that the indexer chose for it.

    One is made for every layer of an eager forward, so it is no frozen dataclass, which takes four times as long to make.
    """

    q_nope: torch.Tensor  # [rows, heads, v_head_dim], absorbed
    q_rope: torch.Tensor  # [rows, heads, rope_dim]
    kv_cache: torch.Tensor  # [slots, 1, v_head_dim + rope_dim]
    topk_slots: torch.Tensor  # int32 [rows, index_topk], -1 where there is none
    cache_seqlens: torch.Tensor  # int32 [rows], valid entries of each top-k row, which come first
    cu_seqlens_q: torch.Tensor  # int32 [rows + 1], 0, 1, 2, ...
    cu_seqlens_k: torch.Tensor  # int32 [rows + 1], exclusive prefix sum of cache_seqlens
    sm_scale: float
    logit_cap: float
    q_joined: torch.Tensor | None = None  # [rows, heads, v_head_dim + rope_dim], where the query came in one piece
    request_seqlens: torch.Tensor | None = None  # decode only: int32 [requests], tokens of each request, not clipped
    schedule: FlashMlaTiles | torch.Tensor | None = None  # what `prepare` made for these rows; None where it was for others


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


class NothingToPrepare:
    """For implementations that need nothing beyond the metadata launch."""

    def reserve(self, max_rows: int) -> None:
        """Nothing to keep."""

    def prepare(self, metadata: NSAMetadata) -> NSAMetadata:
        """Returns `metadata` as it is."""
        return metadata


def pad_rows(rows: torch.Tensor, num_rows: int, value: int) -> torch.Tensor:
    """Append rows of `value` where SGLang padded the query beyond its metadata (TP with partial DP attention)."""
    missing = num_rows - rows.shape[0]
    if missing < 0:
        raise ValueError(f"there are {rows.shape[0]} rows of metadata or slots and the query has {num_rows}: rows would mix")
    if missing == 0:
        return rows
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])


def device_title(device_sm: int) -> str:
    """What a refusal calls the device."""
    return f"SM{device_sm}" if device_sm else "no GPU"
