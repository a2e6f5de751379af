"""One layer's front: what stands in place of `forward_absorb_prepare` while captured forwards are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from nsa_backend.adapters.dsa.layer_front.projections import FirstProducts, QueryProducts, quantised, scales_of
from nsa_backend.adapters.dsa.layer_front.rule import weights_of
from nsa_backend.adapters.dsa.layer_front.streams import SideStream
from nsa_backend.adapters.sglang_types import ForwardBatch
from nsa_backend.kernels.layer_front import norm_rope_store, rope_quantise
from nsa_backend.kernels.split_products import MOST_ROWS


class LayerFront:
    """Of one DeepseekV2AttentionMLA that `rule.layer_problem` finds nothing against.

    Forwards that are captured for decode, target_verify, draft_extend and draft steps are served; all others, and whatever a
    call has that a layer alone does not tell, go to SGLang's own sequence.
    """

    def __init__(self, attention: Any, backends: tuple[type, ...]):
        """Stand in for `attention.forward_absorb_prepare`; `backends` are our attention backends."""
        self.attention = attention
        self.own: Callable = attention.forward_absorb_prepare
        self.backends = backends
        self.first_products, self.query_products = FirstProducts.of(attention), QueryProducts.of(attention)
        # Of the KV of requests, where ranks divide it; an MTP layer has all.
        self.part = {"ranks": attention.dcp_size, "rank": get_parallel().attn_dcp_rank} if attention.dcp_size > 1 else {}

    def __call__(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: ForwardBatch,
        zero_allocator: Any,
        llama_4_scaling: torch.Tensor | None = None,
        prev_topk_indices: torch.Tensor | None = None,
    ) -> tuple:
        """What SGLang's `forward_absorb_prepare` returns, without KV: the launches have written it."""
        metadata = None
        if llama_4_scaling is None and self.attention.should_run_indexer(prev_topk_indices):
            metadata = self._metadata(positions, hidden_states, forward_batch)
        if metadata is None:
            return self.own(positions, hidden_states, forward_batch, zero_allocator, llama_4_scaling, prev_topk_indices)
        q_rope, q_nope_out, topk_indices = self._forward(positions, hidden_states, forward_batch, metadata)
        return q_rope, None, q_nope_out, None, forward_batch, zero_allocator, positions, topk_indices, None, None

    def _metadata(self, positions: torch.Tensor, hidden_states: Any, batch: ForwardBatch) -> Any:
        """The indexer's metadata of a forward that is served, or None."""
        from sglang.srt.layers.attention.dsa.dsa_indexer import get_is_capture_mode
        from sglang.srt.layers.layer_boundary import get_attn_tp_context
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
        from sglang.srt.model_executor.forward_context import get_attn_backend
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph
        from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

        mode, backend = batch.forward_mode, get_attn_backend()
        served = (
            get_is_capture_mode()
            and not is_in_breakable_cuda_graph()
            and get_capture_attention_variant() is None
            and (mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2())
            and isinstance(backend, self.backends)
            and type(backend.token_to_kv_pool) is DSATokenToKVPool
            and not self.attention._fuse_rope_for_trtllm_mla(batch)
            and not get_attn_tp_context().input_scattered
            and isinstance(hidden_states, torch.Tensor)
            and positions.shape == batch.out_cache_loc.shape == hidden_states.shape[:1]
        )
        return backend.get_indexer_metadata(self.attention.layer_id, batch) if served else None

    def _forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, batch: ForwardBatch, metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rotated part of the query, its absorbed part, chosen slots).

        The absorption of the query runs beside the indexer; its projection too, where it has a launch of its own.
        """
        from sglang.srt.layers.attention.dsa import dsa_indexer
        from sglang.srt.layers.dcp import all_gather_q_for_mla_decode
        from sglang.srt.layers.deep_gemm_wrapper import configure_deep_gemm_num_sms
        from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

        attention, indexer, pool = self.attention, self.attention.indexer, get_token_to_kv_pool()
        weights, side = weights_of(attention), SideStream(attention.alt_stream)
        x_scales, q_scales = scales_of(attention.fused_qkv_a_proj_with_mqa), scales_of(indexer.wq_b)

        x = quantised(hidden_states, x_scales)
        if self.first_products is not None and 0 < len(hidden_states) <= MOST_ROWS:
            qkv, key, gates = self.first_products(hidden_states, x)
        else:
            side.fork()
            if x_scales is None:
                qkv = attention.prepare_qkv_latent(hidden_states, batch)
            else:
                qkv = attention.fused_qkv_a_proj_with_mqa(x)[0]
            with side.running():
                if weights.index_fused:
                    key, gates = indexer.wk_weights_proj(hidden_states)[0].split([indexer.head_dim, indexer.n_heads], dim=-1)
                else:
                    key, gates = indexer.wk(x)[0], indexer._weights_proj_bf16_in_fp32_out(hidden_states)
            side.join()
        if hasattr(pool, "invalidate_index_buffer_for_layer"):
            pool.invalidate_index_buffer_for_layer(attention.layer_id)
        kv_cache = pool.get_key_buffer(attention.layer_id)
        index_cache = pool.get_index_k_with_scale_buffer(layer_id=attention.layer_id)
        slots = batch.out_cache_loc
        q, scales = norm_rope_store(qkv, key, weights, positions, slots, kv_cache, index_cache, q_scales, **self.part)
        normed = q if scales is None else (q, scales)

        if self.query_products is not None and 0 < len(hidden_states) <= MOST_ROWS:
            query, index_query = self.query_products(normed)
        else:
            side.fork()
            if attention.alt_stream is None:
                index_query = indexer.wq_b(normed)[0]
            else:
                with configure_deep_gemm_num_sms(indexer.half_device_sm_count):  # as SGLang does where it runs two at once
                    index_query = indexer.wq_b(normed)[0]
            with side.running():
                query = attention.q_b_proj_forward(q) if scales is None else attention.q_b_proj(normed)[0]
            side.join()
        query = query.view(-1, attention.num_local_heads, attention.qk_head_dim)
        side.fork()
        q_nope, q_rope = query.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=-1)
        index_query = index_query.view(-1, indexer.n_heads, indexer.head_dim)
        index_q, gates, q_rope = rope_quantise(index_query, gates, q_rope, weights, positions)
        with side.running():
            q_nope_out = torch.bmm(q_nope.transpose(0, 1), attention.w_kc).transpose(0, 1)
        topk_indices = indexer._get_topk_paged(batch, attention.layer_id, index_q, gates, metadata)
        topk_indices = dsa_indexer._broadcast_indexer_topk_from_rank0(topk_indices)
        topk_indices = dsa_indexer.maybe_capture_indexer_topk(attention.layer_id, topk_indices)
        side.join()
        if self.part:
            q_nope_out, q_rope = all_gather_q_for_mla_decode(q_nope_out, q_rope)
        return q_rope, q_nope_out, topk_indices
