"""What is behind a layer's attention: values of all heads and their quantisation in one launch, where SGLang has two.

Of few rows its weights come early, and so do o_proj's behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nsa_backend.adapters.dsa.layer_front.projections import scales_of, take_output
from nsa_backend.adapters.sglang_types import ForwardBatch
from nsa_backend.kernels.head_products import compile_values_ahead, head_values, served_values
from nsa_backend.kernels.layer_front_weights import GROUP
from nsa_backend.kernels.value_products import DIVIDED, few_rows, value_counters, value_products


def values_problem(attention: Any) -> str | None:
    """Why SGLang's own sequence serves behind this layer's attention, or None; a layer that has our front."""
    weight = attention.w_vc
    if weight is None or weight.dtype != torch.bfloat16 or attention.use_deep_gemm_bmm:
        return "its weights of values are not bfloat16"
    if attention.v_head_dim % GROUP or attention.kv_lora_rank % (DIVIDED * GROUP):
        return f"its values are {attention.v_head_dim} wide, of latents of {attention.kv_lora_rank}"
    if attention.dcp_size > 1:
        return "ranks divide its KV"
    if getattr(attention.kv_b_proj, "set_lora", False):
        return "kv_b_proj has LoRA adapters"
    try:
        return "o_proj has weights of bfloat16" if scales_of(attention.o_proj) is None else None
    except ValueError as problem:
        return str(problem)


class LayerValues:
    """Of one DeepseekV2AttentionMLA that has our front and that `values_problem` finds nothing against.

    Calls that our front has served, of few rows, have their values from here; all others go to SGLang's own sequence.
    """

    def __init__(self, attention: Any):
        """Stand in for `attention.forward_absorb_core`."""
        self.attention = attention
        self.own: Callable = attention.forward_absorb_core
        self.scales, self.arrived = scales_of(attention.o_proj), value_counters(attention.w_vc)
        self.most_of_heads, self.most_early = served_values(attention.w_vc), take_output(attention.o_proj)
        self.most_rows = max(self.most_of_heads, few_rows(attention.v_head_dim))
        if self.most_of_heads and attention.w_vc.is_cuda:
            compile_values_ahead(attention.w_vc, self.scales)

    def __call__(
        self,
        q_pe: torch.Tensor,
        k_pe: torch.Tensor | None,
        q_nope_out: torch.Tensor,
        k_nope: torch.Tensor | None,
        forward_batch: ForwardBatch,
        zero_allocator: Any,
        positions: torch.Tensor,
        topk_indices: torch.Tensor | None,
        llama_4_scaling: torch.Tensor | None,
        fusion_plan: Any = None,
        attention_output_gate: torch.Tensor | None = None,
    ) -> Any:
        """What SGLang's `forward_absorb_core` returns: o_proj's output, with the selection where another layer takes it."""
        attention, of_front = self.attention, k_nope is None and k_pe is None
        if not of_front or not 0 < len(q_nope_out) <= self.most_rows:
            before = q_pe, k_pe, q_nope_out, k_nope, forward_batch, zero_allocator, positions, topk_indices, llama_4_scaling
            return self.own(*before, fusion_plan, attention_output_gate)
        selection = {} if topk_indices is None else {"topk_indices": topk_indices}
        attended = attention.attn_mqa(q_nope_out, None, None, forward_batch, q_rope=q_pe, k_rope=None, **selection)
        attended = attended.view(-1, attention.num_local_heads, attention.kv_lora_rank)
        output, _ = attention.o_proj(self._values(attended))
        if attention.next_skip_topk is None:
            return output
        return output, topk_indices if attention.next_skip_topk else None

    def _values(self, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """o_proj's input of these rows, in FP8 with its scales."""
        rows, weight = len(attended), self.attention.w_vc
        if rows <= self.most_of_heads:
            return head_values(attended, weight, self.scales, before_ours=rows <= self.most_early)
        return value_products(attended, weight, self.scales, self.arrived)
