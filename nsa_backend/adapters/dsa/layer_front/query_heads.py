"""Which heads of the query a rank projects: its own, or where SGLang has laid the weights of all on every rank, all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nsa_backend.adapters.sglang_types import ForwardBatch

if TYPE_CHECKING:
    from sglang.srt.layers.linear import LinearBase


@dataclass(frozen=True)
class QueryHeads:
    """Of one DeepseekV2AttentionMLA in one forward.

    Ranks that divide the KV of requests attend with the heads of all of them. They gather what each projects, or with
    --dcp-replicate-q-proj each projects all: SGLang then adds the gathered weights to the layer once its backend is built.
    """

    attention: Any
    of_all_ranks: bool

    @classmethod
    def of(cls, attention: Any, batch: ForwardBatch) -> QueryHeads:
        """As SGLang's own sequence decides it."""
        return cls(attention, attention.is_dcp_q_replicate_phase(batch) and attention.w_kc_qrep is not None)

    @property
    def q_b(self) -> LinearBase:
        """What projects the query's latent, where its weights are block FP8."""
        return self.attention.q_b_proj_qrep if self.of_all_ranks else self.attention.q_b_proj

    def projected(self, q: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """q_b's product, by SGLang's own layer; `q` has 8 bits where there are scales."""
        attention = self.attention
        if self.of_all_ranks:
            return attention.q_b_proj_replicated_forward(q if scales is None else (q, scales))
        return attention.q_b_proj_forward(q) if scales is None else attention.q_b_proj((q, scales))[0]

    def parts(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the part that is absorbed, the part that is rotated) of q_b's product, each [rows, heads, its width]."""
        attention = self.attention
        q_nope, q_rope = query.view(len(query), -1, attention.qk_head_dim).split(
            [attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=-1
        )
        return q_nope, q_rope

    def absorbed(self, q_nope: torch.Tensor) -> torch.Tensor:
        """[rows, heads, kv_lora_rank]."""
        w_kc = self.attention.w_kc_qrep if self.of_all_ranks else self.attention.w_kc
        return torch.bmm(q_nope.transpose(0, 1), w_kc).transpose(0, 1)

    def gathered(self, q_nope_out: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both parts of the query of all heads that this rank attends with."""
        from sglang.srt.layers.dcp import all_gather_q_for_mla_decode

        if self.attention.dcp_size == 1 or self.of_all_ranks:
            return q_nope_out, q_rope
        return all_gather_q_for_mla_decode(q_nope_out, q_rope)
