"""The sizes of DeepSeek-V3.2's sparse attention, which every model that is served shares and the kernels are built for."""

from __future__ import annotations

from dataclasses import dataclass

TOPK = 2048  # tokens that the indexer keeps
LATENT, ROPE = 512, 64
QK_DIM = LATENT + ROPE  # of a token in the KV cache
NOPE = 128  # of a query head before it is absorbed into the latent
INDEX_DIM = 128
SCALE = (NOPE + ROPE) ** -0.5


@dataclass(frozen=True)
class AttentionShape:
    """What a backend reads of a model's size."""

    heads: int  # of the whole model
    latent: int = LATENT
    rope: int = ROPE
    nope: int = NOPE
    index_topk: int = TOPK
