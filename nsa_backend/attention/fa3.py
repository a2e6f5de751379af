"""FlashAttention 3 with MLA's split query: K is the RoPE part, V the latent part, and `qv` scores queries against V."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.context_part import ContextPart, joinable
from nsa_backend.attention.interface import (
    NothingToPrepare,
    bfloat16_problems,
    device_title,
    package_problems,
    sinks_problems,
)
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.config import AttentionConfig
from nsa_backend.metadata.views import NSAMetadata


def problems(config: AttentionConfig) -> list[str]:
    """Why fa3 cannot run."""
    found = []
    if config.device_sm != 90:
        found.append(f"FA3 is built for Hopper (SM90) and this device is {device_title(config.device_sm)}")
    return found + bfloat16_problems(config) + sinks_problems(config) + package_problems("sglang-kernel")


def build(config: AttentionConfig) -> Fa3:
    return Fa3(config)


MAX_SCHEDULED_ROWS = 992
"""Above the rows of captured batches; a prefill has more, and its tiles are scheduled in every call."""


class Fa3(NothingToPrepare):
    """One query row is one sequence of FA3 with page size 1; its page table is the row of top-k slots.

    FA3 schedules the tiles of its sequences in a kernel of its own before every call; all layers of a forward have the same
    lengths, so `prepare` does it once.
    """

    def __init__(self, config: AttentionConfig):
        self._attend, _ = adapter.fa3_functions()
        self._scheduler = adapter.fa3_scheduler()
        self._config = config

    def prepare(self, metadata: NSAMetadata) -> NSAMetadata:
        """Schedule the rows that the metadata launch has just measured; one launch, capturable.

        Of slots that ranks divide, a row's number is known once its layer has selected, and FA3 schedules in every call.
        """
        lengths = metadata.nsa_cache_seqlens_int32
        if self._scheduler is None or self._config.context_ranks > 1 or not 0 < lengths.shape[0] <= MAX_SCHEDULED_ROWS:
            return metadata
        return replace(metadata, schedule=self.schedule(lengths, metadata.nsa_cu_seqlens_q))

    def schedule(self, lengths: torch.Tensor, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
        """FA3's tiles of rows of these lengths, its `scheduler_metadata`, where the release has a scheduler; one launch.

        Args:
            lengths: int32 [rows], KV tokens of each row.
            cu_seqlens_q: int32 [rows + 1], 0 to rows.
        """
        config = self._config
        return self._scheduler(
            batch_size=lengths.shape[0],
            max_seqlen_q=1,
            max_seqlen_k=config.index_topk,
            num_heads=config.num_heads,
            num_heads_k=1,
            headdim=config.rope_dim,
            headdim_v=config.latent_dim,
            cache_seqlens=lengths,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=cu_seqlens_q,
            page_size=1,
            causal=True,
            num_splits=0,
        )

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        return self._call(inputs, return_softmax_lse=False)

    def forward_part(self, inputs: SparseInputs, part: ContextPart) -> tuple[torch.Tensor, torch.Tensor]:
        own = part.own(inputs)
        out, lse, *_ = self._call(own, return_softmax_lse=True)
        return joinable(out, lse.T, own, natural=True)

    def _call(self, inputs: SparseInputs, *, return_softmax_lse: bool) -> Any:
        latent_dim = inputs.q_nope.shape[-1]
        return self._attend(
            q=inputs.q_rope,
            k_cache=inputs.kv_cache[:, :, latent_dim:].unsqueeze(1),
            v_cache=inputs.kv_cache[:, :, :latent_dim].unsqueeze(1),
            qv=inputs.q_nope,
            page_table=inputs.topk_slots,
            cache_seqlens=inputs.nsa_cache_seqlens,
            cu_seqlens_q=inputs.nsa_cu_seqlens_q,
            cu_seqlens_k_new=inputs.nsa_cu_seqlens_k,
            max_seqlen_q=1,
            softmax_scale=inputs.sm_scale,
            causal=True,
            softcap=inputs.logit_cap,
            return_softmax_lse=return_softmax_lse,  # [heads, rows]
            scheduler_metadata=inputs.schedule,
            num_splits=0,  # FA3 splits long rows over SMs by its own heuristic
        )
