"""A sparse-MLA language model small enough for a CPU: embedding, one attention layer with an indexer, an LM head.

Its next token depends on the newest few tokens, through attention alone. Used as its own MTP layer (the input at position p
is then token p + 1), it predicts exactly what it predicts as a target, because everything depends on differences of
positions. So every draft must be accepted, as long as a draft attends to what it should.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

FREQUENCIES = (0.4, 0.7, 1.1, 1.6, 1.9, 2.2, 2.6, 2.9)


@dataclass(frozen=True)
class ModelShape:
    vocab: int = 256
    hidden: int = 64
    heads: int = 4
    latent: int = 32
    rope: int = 2 * len(FREQUENCIES)
    index_dim: int = 3
    index_topk: int = 16


class TinySparseMla:
    """The weights and the forward pass; KV lives in `pool`, metadata in `attention_backend(batch)`."""

    def __init__(self, shape: ModelShape, pool, radix_attention, attention_backend: Callable, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator) / math.sqrt(size[-1])

        self.shape, self.pool, self.attention_backend = shape, pool, attention_backend
        self.embed = torch.randn(shape.vocab, shape.hidden, generator=generator)
        self.to_latent = normal(shape.latent, shape.hidden)
        self.to_query = 0.1 * normal(shape.heads * shape.latent, shape.hidden)
        self.to_out = normal(shape.hidden, shape.heads * shape.latent)
        self.head = normal(shape.vocab, shape.hidden)
        self.interest = 8 * torch.rand(shape.vocab, generator=generator)
        self.attention = radix_attention(
            num_heads=shape.heads,
            head_dim=shape.latent + shape.rope,
            scaling=1.0,
            num_kv_heads=1,
            layer_id=0,
            v_head_dim=shape.latent,
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch) -> torch.Tensor:
        """Logits [tokens, vocab]."""
        return self.logits(self.attend(input_ids, positions, batch))

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[tokens, vocab] of what attention returned, [tokens, heads, latent]."""
        return torch.tanh(2 * out.reshape(len(out), -1) @ self.to_out.T) @ self.head.T

    def attend(self, input_ids: torch.Tensor, positions: torch.Tensor, batch) -> torch.Tensor:
        """What the attention backend returns."""
        shape, x = self.shape, self.embed[input_ids]
        topk = self._index(input_ids, positions, batch)
        offsets = positions[:, None] - torch.arange(shape.heads)  # head h looks h tokens back
        k, k_rope = self._new_kv(input_ids, positions, batch)
        return self.attention(
            (x @ self.to_query.T).view(-1, shape.heads * shape.latent),
            k,
            k,
            batch,
            q_rope=4 * _rotation(offsets).view(-1, shape.heads * shape.rope),
            k_rope=k_rope,
            topk_indices=topk,
        )

    def _new_kv(self, input_ids: torch.Tensor, positions: torch.Tensor, batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [tokens, 1, latent] and rotated keys [tokens, 1, rope] of the tokens at `batch.out_cache_loc`."""
        return torch.tanh(self.embed[input_ids] @ self.to_latent.T)[:, None], _rotation(positions)[:, None]

    def _new_index_keys(self, input_ids: torch.Tensor, positions: torch.Tensor, batch) -> torch.Tensor:
        """Index keys [tokens, 3] of the same tokens: position, one, interest."""
        return torch.stack([positions.float(), torch.ones(len(positions)), self.interest[input_ids]], dim=1)

    def _index(self, input_ids: torch.Tensor, positions: torch.Tensor, batch) -> torch.Tensor:
        """Lightning indexer: a token's score falls with its distance and rises with its own interest."""
        metadata = self.attention_backend(batch).get_indexer_metadata(0, batch)
        one = torch.ones(len(positions))
        query = torch.stack([one, -positions.float(), one], dim=1)
        self.pool.set_index_k(batch.out_cache_loc, self._new_index_keys(input_ids, positions, batch))
        if batch.forward_mode.is_extend_without_speculative():
            start, _ = metadata.get_indexer_kvcache_range()
            return metadata.topk_transform(query @ self._gathered_keys(metadata).T, self.shape.index_topk, ks=start)
        logits = torch.einsum("rd,rkd->rk", query, self._paged_keys(metadata))
        return metadata.topk_transform(logits, self.shape.index_topk)

    def _paged_keys(self, metadata) -> torch.Tensor:
        """Index keys [rows, columns of the page table x 64, 3]; past a row's length they are of page 0.

        As DeepGEMM does, only pages that a row has are looked at: captured graphs share one table, whose other columns keep
        what earlier batches left there, which may be pages of a pool that is gone.
        """
        pages, lengths = metadata.get_page_table_64().long(), metadata.get_seqlens_expanded()
        own = torch.arange(pages.shape[1]) * 64 < lengths[:, None]
        return self.pool.index_k[torch.where(own, pages, 0)].flatten(1, 2)

    def _gathered_keys(self, metadata) -> torch.Tensor:
        tables, lengths = metadata.get_page_table_64().long(), metadata.get_indexer_seq_len_cpu().tolist()
        return torch.cat([self.pool.index_k[t].flatten(0, 1)[:n] for t, n in zip(tables, lengths, strict=True)])


def _rotation(positions: torch.Tensor) -> torch.Tensor:
    """[..., rope]: the dot product of two of them depends on the distance alone and is largest at 0."""
    angles = positions[..., None].double() * torch.tensor(FREQUENCIES, dtype=torch.float64)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()
