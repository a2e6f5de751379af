"""Sparse MLA in plain torch, float32 inside: what runs on a machine without a GPU and what kernels are compared with."""

from __future__ import annotations

import torch

from nsa_backend.attention.context_part import ContextPart, joinable
from nsa_backend.attention.interface import NothingToPrepare
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.config import AttentionConfig


def problems(config: AttentionConfig) -> list[str]:
    """Why the torch reference may not run."""
    return ["it is the reference for machines without a GPU"] if config.device_sm else []


def build(config: AttentionConfig) -> TorchSparseAttention:
    return TorchSparseAttention()


class TorchSparseAttention(NothingToPrepare):
    """softmax(sm_scale * (q_nope . latent + q_rope . rope)) @ latent over the slots of each row.

    A sink is one more score, whose latent is zero.
    """

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        return self._call(inputs)[0]

    def forward_part(self, inputs: SparseInputs, part: ContextPart) -> tuple[torch.Tensor, torch.Tensor]:
        own = part.own(inputs)
        return joinable(*self._call(own), own, natural=True)

    def _call(self, inputs: SparseInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, and the log-sum-exp of the scores in base e."""
        valid = inputs.topk_slots >= 0
        slots = inputs.topk_slots.clamp(min=0).long()
        gathered = inputs.kv_cache[:, 0].float()[slots]  # [rows, index_topk, latent + rope]
        # A masked slot is read through index 0, which may hold anything: 0 * NaN would survive the mask.
        gathered = torch.where(valid[..., None], gathered, 0.0)
        query = torch.cat([inputs.q_nope, inputs.q_rope], dim=-1).float()
        scores = torch.einsum("rhd,rkd->rhk", query, gathered) * inputs.sm_scale
        if inputs.logit_cap:
            scores = inputs.logit_cap * torch.tanh(scores / inputs.logit_cap)
        scores = scores.masked_fill(~valid[:, None], float("-inf"))
        if inputs.attn_sink is not None:
            scores = torch.cat([scores, inputs.attn_sink[:, None].expand(*scores.shape[:2], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : slots.shape[1]]
        weights = torch.where(valid.any(dim=-1)[:, None, None], weights, 0.0)
        latent = gathered[..., : inputs.q_nope.shape[-1]]
        out = torch.einsum("rhk,rkd->rhd", weights, latent).to(inputs.q_nope.dtype)
        return out, torch.logsumexp(scores, dim=-1)
