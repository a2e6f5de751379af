"""The lightning indexer, and how it is distilled against dense attention.

SGLang also turns q and k by the same Hadamard matrix before it rounds them to FP8, which changes no product; the rounding is
not part of the training.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_backend.benchmarks.trained.parts import Linear, rotate_halves
from nsa_backend.benchmarks.trained.shape import EPS, Shape

NEVER = -1e30
"""Score of a token that a row may not see; finite, so that a masked row has no NaN in its gradient."""


class KeyNorm(nn.Module):
    """LayerNorm of the index keys, in float32."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], self.weight, self.bias, EPS).to(x.dtype)


class Indexer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, self.dim, self.rope_dim = shape.index_heads, shape.index_dim, shape.rope
        self.wq_b = Linear(shape.q_rank, shape.index_heads * shape.index_dim)
        self.wk = Linear(shape.hidden, shape.index_dim)
        self.k_norm = KeyNorm(shape.index_dim)
        self.weights_proj = Linear(shape.hidden, shape.index_heads)

    def scores(self, x: Tensor, q_latent: Tensor, rope: Tensor, rows: Tensor) -> Tensor:
        """float32 [B, rows, T]: sum over heads of w_h relu(q_h . k), not masked.

        Args:
            x: [B, T, hidden], the input of the layer's attention.
            q_latent: [B, T, q_rank], after its norm.
            rope: float32 [2, T, rope / 2].
            rows: int64 [rows], the positions that ask.
        """
        q = self.wq_b(q_latent[:, rows]).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)  # [B, heads, rows, dim]
        q = torch.cat([rotate_halves(q[..., : self.rope_dim], rope[:, rows]), q[..., self.rope_dim :]], dim=-1)
        k = self.k_norm(self.wk(x))
        k = torch.cat([rotate_halves(k[..., : self.rope_dim], rope), k[..., self.rope_dim :]], dim=-1)
        weights = self.weights_proj(x[:, rows]).float() * (self.heads * self.dim) ** -0.5  # [B, rows, heads]
        products = F.relu(q @ k[:, None].transpose(-1, -2))  # [B, heads, rows, T]
        return torch.einsum("bhrt,brh->brt", products, weights.to(products.dtype)).float()


def allowed(rows: Tensor, length: int) -> Tensor:
    """bool [rows, length]: what a causal row sees."""
    return torch.arange(length, device=rows.device) <= rows[:, None]


def attention_shares(q: Tensor, k: Tensor, rows: Tensor, scale: float) -> Tensor:
    """float32 [B, rows, T]: attention probabilities summed over heads and divided by their sum. q and k as in `Attention`."""
    scores = (q[:, :, rows] @ k.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~allowed(rows, k.shape[2]), float("-inf"))
    return scores.softmax(-1).mean(1)


def divergence(shares: Tensor, scores: Tensor, rows: Tensor) -> Tensor:
    """Mean over rows of KL(shares || softmax of the index scores): the loss of V3.2's dense warm-up."""
    visible = allowed(rows, scores.shape[-1])
    log_index = scores.masked_fill(~visible, NEVER).log_softmax(-1)
    terms = torch.where(visible, shares * (shares.clamp_min(1e-20).log() - log_index), 0.0)
    return terms.sum(-1).mean()


def selected(scores: Tensor, rows: Tensor, topk: int) -> Tensor:
    """bool [B, rows, T]: the `topk` visible tokens with the best scores, all of them where there are no more."""
    visible = allowed(rows, scores.shape[-1])
    best = scores.masked_fill(~visible, NEVER).topk(min(topk, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & visible
