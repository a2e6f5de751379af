"""The whole model: target, MTP layer, their losses. Parameter names are those of the checkpoint."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_backend.benchmarks.trained.indexer import selected
from nsa_backend.benchmarks.trained.layers import Layer, MtpLayer
from nsa_backend.benchmarks.trained.parts import Linear, RMSNorm, rope_table
from nsa_backend.benchmarks.trained.shape import Shape


class Stack(nn.Module):
    """Embedding, the target's layers, then the MTP layer, and the target's final norm."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList([*(Layer(shape) for _ in range(shape.layers)), MtpLayer(shape)])
        self.norm = RMSNorm(shape.hidden)


class TrainedModel(nn.Module):
    """DeepSeek-V3.2 with one MTP layer. Forwards compute in `dtype`; the residual stream has that dtype too.

    `mtp_depth` draft steps are trained with that one layer: 1 as DeepSeek does, 3 as GLM-5, which shares its weights.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16, mtp_depth: int = 1):
        super().__init__()
        self.shape, self.dtype, self.mtp_depth = shape, dtype, mtp_depth
        self.model = Stack(shape)
        self.lm_head = Linear(shape.hidden, shape.vocab)

    @property
    def layers(self) -> list[Layer]:
        """The target's."""
        return list(self.model.layers)[:-1]

    @property
    def mtp(self) -> MtpLayer:
        return self.model.layers[-1]

    def initialize(self, seed: int) -> None:
        """Normal weights; what is added to the residual stream starts smaller, the deeper the model is."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            std = 0.02 if not name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02 / math.sqrt(2 * self.shape.layers)
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def rope(self, length: int) -> Tensor:
        """float32 [2, length, rope / 2]."""
        return rope_table(length, self.shape.rope, self.lm_head.weight.device)

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed_tokens(ids).to(self.dtype)

    def hidden(self, ids: Tensor, *, sparse: bool = False) -> Tensor:
        """The target's hidden states after the final norm [B, T, hidden], which the MTP layer takes too.

        Args:
            ids: int64 [B, T].
            sparse: attend to the index_topk tokens that each layer's indexer chooses, as a server does; slow and large.
        """
        rope, x = self.rope(ids.shape[1]), self.embed(ids)
        for layer in self.layers:
            x = layer(x, rope, self.sparse_mask(layer, layer.input_layernorm(x), rope) if sparse else None)
        return self.model.norm(x)

    def mtp_hidden(self, ids: Tensor, hidden: Tensor, *, sparse: bool = False) -> Tensor:
        """Hidden states of the MTP layer [B, T, hidden]: row i sees `hidden` of token i and `ids` of token i + 1."""
        rope, embedding = self.rope(ids.shape[1]), self.embed(ids)
        if not sparse:
            return self.mtp(embedding, hidden, rope)
        x = self.mtp.input_layernorm(self.mtp.combined(embedding, hidden))
        return self.mtp(embedding, hidden, rope, self.sparse_mask(self.mtp, x, rope))

    def sparse_mask(self, layer: Layer, x: Tensor, rope: Tensor) -> Tensor | None:
        """bool [B, 1, T, T] of what the layer's indexer selects, None where every row sees all there is."""
        length = x.shape[1]
        if length <= self.shape.index_topk:
            return None
        latent = layer.self_attn.q_a_layernorm(layer.self_attn.q_a_proj(x))
        parts = []
        for rows in torch.arange(length, device=x.device).split(512):
            scores = layer.self_attn.indexer.scores(x, latent, rope, rows)
            parts.append(selected(scores, rows, self.shape.index_topk))
        return torch.cat(parts, dim=1)[:, None]

    def losses(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """(target's, MTP layer's) mean cross entropy in nats over blocks of ids, int64 [B, T + 1 + mtp_depth]."""
        target, *drafted = self.losses_by_depth(blocks, self.mtp_depth)
        return target, sum(drafted) / self.mtp_depth

    def losses_by_depth(self, blocks: Tensor, depth: int) -> list[Tensor]:
        """Mean losses over blocks of ids, int64 [B, T + 1 + depth]: the target's, then of each step of drafting."""
        return [self.head_loss(state, following) for state, following in self.states(blocks, depth)]

    def states(self, blocks: Tensor, depth: int) -> list[tuple[Tensor, Tensor]]:
        """(hidden states [B, T, hidden], ids int64 [B, T] that they predict) of the target, then of each step of drafting.

        Row i of step d takes the hidden state of row i of the step before, the target's in the first, and the embedding of
        token i + d, and predicts token i + d + 1.

        Args:
            blocks: ids, int64 [B, T + 1 + depth].
            depth: steps of drafting.
        """
        rows = blocks.shape[1] - 1 - depth
        ids = [blocks[:, d : d + rows] for d in range(depth + 2)]
        state = self.hidden(ids[0])
        found = [(state, ids[1])]
        for embedded, following in pairwise(ids[1:]):
            state = self.mtp_hidden(embedded, state)
            found.append((state, following))
        return found

    def head_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(hidden).flatten(0, 1).float(), targets.flatten())

    def compile_layers(self) -> None:
        """Compile each layer and the head by torch.compile; layers of one class share their code."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        self.head_loss = torch.compile(self.head_loss, dynamic=False)


def parameters_of(model: TrainedModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(the language model's, the indexers')."""
    named = list(model.named_parameters())
    return [p for n, p in named if ".indexer." not in n], [p for n, p in named if ".indexer." in n]
