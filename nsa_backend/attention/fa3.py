"""FlashAttention 3 with MLA's split query: K is the RoPE part, V the latent part, and `qv` scores queries against V."""

from __future__ import annotations

import torch

from nsa_backend import host
from nsa_backend.attention.common import AttentionConfig, NothingToPrepare, SparseInputs, device_title


def supports(config: AttentionConfig) -> str | None:
    """Why fa3 cannot run, or None."""
    if config.device_sm != 90:
        return f"FA3 is built for Hopper (SM90) and this device is {device_title(config.device_sm)}"
    if config.kv_cache_dtype != torch.bfloat16:
        return f"it reads a bfloat16 KV cache and this one is {config.kv_cache_dtype}"
    return host.package_problem("sglang-kernel")


def build(config: AttentionConfig) -> Fa3:
    return Fa3(config)


class Fa3(NothingToPrepare):
    """One query row is one sequence of FA3 with page size 1; its page table is the row of top-k slots."""

    def __init__(self, config: AttentionConfig):
        self._attend, _ = host.fa3_functions()

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        latent_dim = inputs.q_nope.shape[-1]
        return self._attend(
            q=inputs.q_rope,
            k_cache=inputs.kv_cache[:, :, latent_dim:].unsqueeze(1),
            v_cache=inputs.kv_cache[:, :, :latent_dim].unsqueeze(1),
            qv=inputs.q_nope,
            page_table=inputs.topk_slots,
            cache_seqlens=inputs.cache_seqlens,
            cu_seqlens_q=inputs.cu_seqlens_q,
            cu_seqlens_k_new=inputs.cu_seqlens_k,
            max_seqlen_q=1,
            softmax_scale=inputs.sm_scale,
            causal=True,
            softcap=inputs.logit_cap,
            return_softmax_lse=False,
            num_splits=0,  # FA3 splits long rows over SMs by its own heuristic
        )
