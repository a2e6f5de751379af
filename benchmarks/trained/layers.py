"""The parts of a layer, computed as SGLang computes them and named as a DeepSeek-V3.2 checkpoint names them.

Weights are float32 (the optimizer's copy) and cast to the activations' dtype where they are used; norms and RoPE are computed
in float32. Shapes: B sequences, T tokens, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_backend.benchmarks.trained.indexer import Indexer
from nsa_backend.benchmarks.trained.parts import Linear, RMSNorm, rotate_pairs
from nsa_backend.benchmarks.trained.shape import Shape


class Attention(nn.Module):
    """Multi-head latent attention, not absorbed: every head's keys and values are computed from the latent."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.q_a_proj = Linear(shape.hidden, shape.q_rank)
        self.q_a_layernorm = RMSNorm(shape.q_rank)
        self.q_b_proj = Linear(shape.q_rank, shape.heads * shape.qk_dim)
        self.kv_a_proj_with_mqa = Linear(shape.hidden, shape.kv_rank + shape.rope)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank)
        self.kv_b_proj = Linear(shape.kv_rank, shape.heads * (shape.nope + shape.v_dim))
        self.o_proj = Linear(shape.heads * shape.v_dim, shape.hidden)
        self.indexer = Indexer(shape)

    def queries_keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q [B, H, T, 192], k [B, H, T, 192], v [B, H, T, 128], query latent [B, T, q_rank]); `rope` is [2, T, rope / 2]."""
        shape, (b, t, _) = self.shape, x.shape
        latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(latent).view(b, t, shape.heads, shape.qk_dim).transpose(1, 2)
        q_nope, q_rope = q.split([shape.nope, shape.rope], dim=-1)
        kv_latent, k_rope = self.kv_a_proj_with_mqa(x).split([shape.kv_rank, shape.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(kv_latent)).view(b, t, shape.heads, shape.nope + shape.v_dim).transpose(1, 2)
        k_nope, v = kv.split([shape.nope, shape.v_dim], dim=-1)
        k_rope = rotate_pairs(k_rope[:, None], rope).expand(-1, shape.heads, -1, -1)
        return torch.cat([q_nope, rotate_pairs(q_rope, rope)], -1), torch.cat([k_nope, k_rope], -1), v, latent

    def forward(self, x: Tensor, rope: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, T, hidden]. Causal, or over what `mask` (bool, [B or 1, 1, T, T]) lets a row see."""
        shape, (b, t, _) = self.shape, x.shape
        q, k, v, _ = self.queries_keys_values(x, rope)
        v = F.pad(v, (0, shape.qk_dim - shape.v_dim))  # FlashAttention wants one head size
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)[..., : shape.v_dim]
        return self.o_proj(out.transpose(1, 2).reshape(b, t, shape.heads * shape.v_dim))


class Mlp(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.mlp)
        self.up_proj = Linear(shape.hidden, shape.mlp)
        self.down_proj = Linear(shape.mlp, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SharedExperts(nn.Module):
    """The MTP layer's MLP: its routed experts add nothing, so its shared experts are all of it."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shared_experts = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared_experts(x)


class Layer(nn.Module):
    """A decoder layer; the input of its attention is what the distillation of its indexer needs."""

    def __init__(self, shape: Shape, mlp: type[nn.Module] = Mlp):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.mlp = mlp(shape)

    def forward(self, x: Tensor, rope: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpLayer(Layer):
    """Multi-token prediction of depth 1: a decoder layer over the hidden state of token i and the embedding of token i + 1."""

    def __init__(self, shape: Shape):
        super().__init__(shape, SharedExperts)
        self.enorm = RMSNorm(shape.hidden)
        self.hnorm = RMSNorm(shape.hidden)
        self.eh_proj = Linear(2 * shape.hidden, shape.hidden)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(shape.hidden)})

    def combined(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Input of the layer. The embedding comes first, as in SGLang; `hidden` is the target's after its final norm."""
        return self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))

    def forward(self, embedding: Tensor, hidden: Tensor, rope: Tensor, mask: Tensor | None = None) -> Tensor:
        """Hidden state after the head's norm [B, T, hidden], which the next draft step takes in the target's place."""
        return self.shared_head["norm"](super().forward(self.combined(embedding, hidden), rope, mask))
