"""Rows of chosen slots for sparse attention, and a kernel's answer to them in torch.

Slots that no row may read hold NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from batches import forward_batch
from metadata_reference import Batch

from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.attention.torch_reference import TorchSparseAttention
from nsa_backend.config import AttentionConfig
from nsa_backend.metadata.views import NSAMetadata

LATENT, ROPE, TOPK, SLOTS = 16, 8, 12, 40


def config(heads: int, dtype: torch.dtype = torch.bfloat16) -> AttentionConfig:
    return AttentionConfig(
        device_sm=90, num_heads=heads, kv_cache_dtype=dtype, index_topk=TOPK, latent_dim=LATENT, rope_dim=ROPE
    )


def inputs(heads: int, lengths: list[int], *, joined: bool = False, logit_cap: float = 0.0, schedule=None) -> SparseInputs:
    """Random rows with so many chosen slots each."""
    rows, generator = len(lengths), torch.Generator().manual_seed(len(lengths))
    slots = torch.full((rows, TOPK), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        slots[row, :length] = torch.randperm(SLOTS - 1, generator=generator)[:length].int()
    kv = torch.randn(SLOTS, 1, LATENT + ROPE, generator=generator).to(torch.bfloat16)
    kv[[slot for slot in range(SLOTS) if slot not in slots]] = float("nan")
    query = torch.randn(rows, heads, LATENT + ROPE, generator=generator).to(torch.bfloat16)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return SparseInputs(
        q_nope=query[..., :LATENT],
        q_rope=query[..., LATENT:],
        kv_cache=kv,
        topk_slots=slots,
        nsa_cache_seqlens=lens,
        nsa_cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32),
        nsa_cu_seqlens_k=torch.tensor([0, *lens.cumsum(0)], dtype=torch.int32),
        sm_scale=0.3,
        logit_cap=logit_cap,
        q_joined=query if joined else None,
        schedule=schedule,
    )


def same_as_the_reference(out: torch.Tensor, given: SparseInputs) -> bool:
    return torch.allclose(out.float(), TorchSparseAttention().forward(given).float(), atol=0.02)


def attended(query: torch.Tensor, keys: torch.Tensor, scale: float, cap: float = 0.0) -> torch.Tensor:
    """[heads, latent + rope] over [slots, latent + rope]; zeros where there are none."""
    scores = query.float() @ keys.float().T * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    return torch.softmax(scores, -1) @ keys[:, :LATENT].float()


def decode_metadata(backend: Any, rows: int) -> NSAMetadata:
    """Metadata of an eager decode of so many requests of one token."""
    batch = Batch("decode", [1] * rows, [1] * rows, backend.writer.req_to_token.numpy(), TOPK, 0)
    backend.init_forward_metadata(forward_batch(batch, ForwardMode.DECODE))
    return backend.forward_metadata
