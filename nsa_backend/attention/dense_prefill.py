"""Dense multi-head prefill for contexts so short that sparse attention would select every token anyway."""

from __future__ import annotations

import torch

from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.config import BackendConfig
from nsa_backend.metadata.views import NSAMetadata


class DensePrefill:
    """SGLang's MHA_ONE_SHOT path: decompressed K and V of prefix and new tokens, FA3 with variable lengths."""

    def __init__(self, config: BackendConfig):
        # SGLang's model brings K and V in bfloat16 here, dequantised where the cache is FP8.
        dtypes = (torch.bfloat16, torch.float8_e4m3fn)
        served = config.attention.device_sm == 90 and config.attention.kv_cache_dtype in dtypes
        # Nothing adds sinks here. A rank with some of a prompt's rows has no dense K and V of the others, and one with some
        # of its KV none of its prefix; SGLang's dense forward of drafts takes their KV for divided too.
        self.runs = served and not (config.attention.sinks or config.split_prefill or config.divided_context)
        self._attend = adapter.fa3_functions()[1] if self.runs else None

    def fits(self, batch: sglang_types.ForwardBatch) -> bool:
        """Whether `batch` is a prefill whose longest request and total length stay within SGLang's limits."""
        if not self.runs or not batch.forward_mode.is_extend_without_speculative() or not batch.batch_size:
            return False
        if adapter.in_prefill_graph():
            return False
        return (
            int(batch.seq_lens_cpu.max()) <= adapter.dense_prefill_limit()
            and int(batch.seq_lens_cpu.sum()) <= batch.get_max_chunk_capacity()
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: sglang_types.RadixAttention, metadata: NSAMetadata
    ) -> torch.Tensor:
        """Causal attention of the new tokens over prefix and new tokens.

        Args:
            q: [new tokens, heads * head_dim].
            k: [all tokens, heads * head_dim]; v: [all tokens, heads * v_head_dim].

        Returns:
            [new tokens, heads, v_head_dim].
        """
        return self._attend(
            q=q.view(-1, layer.tp_q_head_num, layer.head_dim),
            k=k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v=v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=metadata.cu_seqlens_k,
            max_seqlen_q=metadata.max_seq_len_q,
            max_seqlen_k=metadata.max_seq_len_k,
            softmax_scale=layer.scaling,
            causal=True,
        )
