"""The inputs of one attention call: SGLang's query, shaped as implementations take it, beside the metadata of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nsa_backend.adapters import sglang_types
from nsa_backend.metadata.views import FlashMlaTiles, NSAMetadata


@dataclass(slots=True)
class SparseInputs:
    """One call: every query row attends to the KV slots that the indexer chose for it.

    One is made for every layer of an eager forward, so it is no frozen dataclass, which takes four times as long to make.
    """

    q_nope: torch.Tensor  # [rows, heads, v_head_dim], absorbed
    q_rope: torch.Tensor  # [rows, heads, rope_dim]
    kv_cache: torch.Tensor  # [slots, 1, v_head_dim + rope_dim]
    topk_slots: torch.Tensor  # int32 [rows, index_topk], -1 where there is none
    nsa_cache_seqlens: torch.Tensor  # int32 [rows], valid entries of each top-k row, which come first
    nsa_cu_seqlens_q: torch.Tensor  # int32 [rows + 1], 0, 1, 2, ...
    nsa_cu_seqlens_k: torch.Tensor | None  # int32 [rows + 1], exclusive prefix sum of nsa_cache_seqlens, where it is known
    sm_scale: float
    logit_cap: float
    rows_per_request: int = 1  # consecutive rows of one request; 1 where it is not the same for all
    q_joined: torch.Tensor | None = None  # [rows, heads, v_head_dim + rope_dim], where the query came in one piece
    cache_seqlens: torch.Tensor | None = None  # decode only: int32 [requests], tokens of each request, not clipped
    schedule: FlashMlaTiles | torch.Tensor | None = None  # what `prepare` made for these rows; None where it was for others
    attn_sink: torch.Tensor | None = None  # float32 [heads], where the model has learned the score of a key without a value
    out: torch.Tensor | None = None  # [rows, heads, v_head_dim], contiguous: where SGLang copies to what is returned elsewhere


def sparse_inputs(
    q: torch.Tensor,
    q_rope: torch.Tensor | None,
    layer: sglang_types.RadixAttention,
    kv_cache: torch.Tensor,
    topk_slots: torch.Tensor,
    metadata: NSAMetadata,
    *,
    attn_sink: torch.Tensor | None = None,
    decode: bool = False,
    out: torch.Tensor | None = None,
) -> SparseInputs:
    """Views of the query, split into its latent and RoPE parts, beside the metadata of its rows.

    `decode` says that a row is a request, whose length some kernels want as it is. `out` [rows, heads * v_head_dim] is where
    SGLang wants the result, and nobody's where it has another form.
    """
    heads, latent_dim = layer.tp_q_head_num, layer.v_head_dim
    joined = None
    if q_rope is None:
        joined = q.contiguous().view(-1, heads, layer.head_dim)
        q_nope, q_rope = joined[..., :latent_dim], joined[..., latent_dim:]
    else:
        q_nope, q_rope = q.view(-1, heads, latent_dim), q_rope.view(-1, heads, layer.head_dim - latent_dim)
    rows = q_nope.shape[0]
    if out is not None:
        fits = out.shape == (rows, heads * latent_dim) and out.dtype == q_nope.dtype and out.is_contiguous()
        out = out.view(rows, heads, latent_dim) if fits else None
    lengths, schedule = metadata.nsa_cache_seqlens_int32, metadata.schedule
    # Of a batch that SGLang padded, it may hand over the real rows alone (from 0.5.13 on).
    if rows != lengths.shape[0]:
        lengths, schedule = lengths[:rows], None
    return SparseInputs(
        q_nope=q_nope,
        q_rope=q_rope,
        kv_cache=kv_cache,
        topk_slots=topk_slots,
        nsa_cache_seqlens=lengths,
        nsa_cu_seqlens_q=metadata.nsa_cu_seqlens_q[: rows + 1],
        nsa_cu_seqlens_k=metadata.nsa_cu_seqlens_k[: rows + 1],
        sm_scale=layer.scaling,
        logit_cap=layer.logit_cap,
        rows_per_request=metadata.rows_per_request,
        q_joined=joined,
        cache_seqlens=metadata.cache_seqlens_int32 if decode else None,
        schedule=schedule,
        attn_sink=attn_sink,
        out=out,
    )


def append_rows(rows: torch.Tensor, num_rows: int, value: int) -> torch.Tensor:
    """Append rows of `value` where SGLang padded the query beyond its metadata (TP with partial DP attention)."""
    missing = num_rows - rows.shape[0]
    if missing < 0:
        raise ValueError(f"there are {rows.shape[0]} rows of metadata or slots and the query has {num_rows}: rows would mix")
    if missing == 0:
        return rows
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])


def refuse_unapplied(llama_4_scaling: torch.Tensor | None, attn_sink: torch.Tensor | None, sinks: bool) -> None:
    """Raise ValueError for arguments of models that are not served; `sinks` says whether the model has learnable ones."""
    if llama_4_scaling is not None:
        raise ValueError("llama_4_scaling came with a sparse MLA layer and nothing here applies it: scores would be wrong")
    if (attn_sink is not None) != sinks:
        raise ValueError("attn_sink came with a layer of a model whose config has no learnable_sink, or did not come")


def write_kv(
    pool: Any, layer: sglang_types.RadixAttention, out_cache_loc: torch.Tensor, k: torch.Tensor, k_rope: torch.Tensor
) -> None:
    """Write the latent KV of the new tokens through SGLang's pool; raises ValueError where it would write to wrong slots."""
    if not out_cache_loc.is_contiguous():
        raise ValueError(
            "out_cache_loc is strided and SGLang's KV writer reads it as if it were dense: the KV of all requests "
            "but the first would land in wrong slots"
        )
    pool.set_mla_kv_buffer(layer, out_cache_loc, k, k_rope)
