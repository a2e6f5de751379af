"""One layer's front: what stands in place of `forward_absorb_prepare` while captured forwards are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from nsa_backend.adapters.dsa.layer_front import prefills
from nsa_backend.adapters.dsa.layer_front.kept_input import quantised_input
from nsa_backend.adapters.dsa.layer_front.projections import (
    EarlyProduct,
    FirstProducts,
    QueryProducts,
    has,
    has_early,
    scales_of,
)
from nsa_backend.adapters.dsa.layer_front.query_heads import QueryHeads
from nsa_backend.adapters.dsa.layer_front.rule import weights_of
from nsa_backend.adapters.dsa.layer_front.short import EveryToken, is_short
from nsa_backend.adapters.dsa.layer_front.streams import SideStream
from nsa_backend.adapters.sglang_types import ForwardBatch, ForwardMode
from nsa_backend.kernels.head_products import compile_queries_ahead, head_queries, served_queries
from nsa_backend.kernels.layer_front_weights import FrontWeights
from nsa_backend.kernels.norm_rope_store import compile_ahead as compile_norms
from nsa_backend.kernels.norm_rope_store import norm_rope_store
from nsa_backend.kernels.rope_quantise import compile_ahead as compile_queries
from nsa_backend.kernels.rope_quantise import rope_quantise, rope_query


class LayerFront:
    """Of one DeepseekV2AttentionMLA that `rule.layer_problem` finds nothing against.

    Forwards that are captured for decode, target_verify, draft_extend and draft steps are served, and prefills that are
    captured whole; all others, and whatever a call has that a layer alone does not tell, go to SGLang's own sequence.
    """

    def __init__(self, attention: Any, backends: tuple[type, ...], every_token: EveryToken | None = None):
        """Stand in for `attention.forward_absorb_prepare`.

        Args:
            attention: the layer.
            backends: our attention backends.
            every_token: of short requests, shared by the layers of a model; its own if None.
        """
        self.attention = attention
        self.own: Callable = attention.forward_absorb_prepare
        self.backends = backends
        self.every_token = every_token or EveryToken()
        self.first_products, self.query_products = FirstProducts.of(attention), QueryProducts.of(attention)
        # Rows up to which MLA's query is made ready in one launch, where it is what attention waits for.
        self.most_ready = served_queries(attention.w_kc) if attention.dcp_size == 1 else 0
        self.latent, self.query = EarlyProduct.of(attention.fused_qkv_a_proj_with_mqa), EarlyProduct.of(attention.q_b_proj)
        # Of the KV of requests, where ranks divide it; an MTP layer has all.
        self.part = {"ranks": attention.dcp_size, "rank": get_parallel().attn_dcp_rank} if attention.dcp_size > 1 else {}

    def compile_ahead(self, kv_dtype: torch.dtype) -> None:
        """Compile what this layer launches: while a forward is captured nothing can be compiled.

        Raises:
            RuntimeError: NVRTC or the driver refuses.
        """
        attention, weights = self.attention, weights_of(self.attention)
        device, q_scales = attention.w_kc.device, scales_of(attention.q_b_proj)
        compile_norms(device, weights, q_scales, kv_fp8=kv_dtype != torch.bfloat16, **self.part)
        compile_queries(device, 0, weights)
        if attention.indexer is not None:
            compile_queries(device, attention.indexer.n_heads, weights)
        if self.most_ready:
            compile_queries_ahead(attention.w_kc, neox=weights.neox)

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
        found, arguments = None, (positions, hidden_states, forward_batch)
        if llama_4_scaling is None and self._serves(*arguments):
            if not self.attention.should_run_indexer(prev_topk_indices):
                found = self._with_selection(*arguments, prev_topk_indices)
            elif (metadata := self._metadata(forward_batch)) is not None:
                found = (self._short if is_short() else self._forward)(*arguments, metadata)
        if found is None:
            return self.own(*arguments, zero_allocator, llama_4_scaling, prev_topk_indices)
        q_rope, q_nope_out, topk_indices = found
        return q_rope, None, q_nope_out, None, forward_batch, zero_allocator, positions, topk_indices, None, None

    def begins_with_ours(self, rows: int) -> bool:
        """Whether the first launch of so many rows, behind their norm, is of this package and better there early."""
        return has_early(self.latent if self.attention.indexer is None else self.first_products, rows)

    def _serves(self, positions: torch.Tensor, hidden_states: Any, batch: ForwardBatch) -> bool:
        """Whether a forward is one of those that are served."""
        from sglang.srt.layers.attention.dsa.dsa_indexer import get_is_capture_mode

        if not get_is_capture_mode():  # of every layer of an eager prefill too
            return False
        from sglang.srt.layers.attention.graph_variants import DSA_DENSE, DSA_SPARSE
        from sglang.srt.layers.layer_boundary import get_attn_tp_context
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
        from sglang.srt.model_executor.forward_context import get_attn_backend
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph
        from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

        mode, backend, whole = batch.forward_mode, get_attn_backend(), prefills.recorded() is not None
        return (
            (mode == ForwardMode.EXTEND if whole else mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2())
            and whole == is_in_breakable_cuda_graph()
            and get_capture_attention_variant() in (None, DSA_DENSE, DSA_SPARSE)
            and isinstance(backend, self.backends)
            and type(backend.token_to_kv_pool) is DSATokenToKVPool
            and not self.attention._fuse_rope_for_trtllm_mla(batch)
            and not get_attn_tp_context().input_scattered
            and isinstance(hidden_states, torch.Tensor)
            and positions.shape == batch.out_cache_loc.shape == hidden_states.shape[:1]
        )

    def _metadata(self, batch: ForwardBatch) -> Any:
        """The indexer's; None where it has nothing to select."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        return get_attn_backend().get_indexer_metadata(self.attention.layer_id, batch)

    def _first(
        self, hidden_states: torch.Tensor, batch: ForwardBatch, side: SideStream, indexed: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """qkv_a's product, and where the layer selects the index key and the gates."""
        attention, indexer, products = self.attention, self.attention.indexer, self.first_products
        if indexed and has(products, len(hidden_states)):
            return products(hidden_states)
        x_scales = scales_of(attention.fused_qkv_a_proj_with_mqa)
        if not indexed and has(self.latent, len(hidden_states)):
            return self.latent(quantised_input(hidden_states, x_scales, before_ours=True)), None, None
        x = hidden_states if x_scales is None else quantised_input(hidden_states, x_scales)
        if indexed:
            side.fork()
        if x_scales is None:
            qkv = attention.prepare_qkv_latent(hidden_states, batch)
        else:
            qkv = attention.fused_qkv_a_proj_with_mqa(x)[0]
        if not indexed:
            return qkv, None, None
        with side.running():
            if indexer.use_dsa_indexer_fusion:
                key, gates = indexer.wk_weights_proj(hidden_states)[0].split([indexer.head_dim, indexer.n_heads], dim=-1)
            else:
                key, gates = indexer.wk(x)[0], indexer._weights_proj_bf16_in_fp32_out(hidden_states)
        side.join()
        return qkv, key, gates

    def _stored(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        batch: ForwardBatch,
        weights: FrontWeights,
        side: SideStream,
        indexed: bool,
        before_ours: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(the query's latent, its scales, gates), with KV and where the layer selects index keys written.

        `before_ours`: whether what is launched next on the stream is a kernel of this package.
        """
        from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

        layer_id, pool, index_cache = self.attention.layer_id, get_token_to_kv_pool(), None
        qkv, key, gates = self._first(hidden_states, batch, side, indexed)
        if indexed:
            index_cache = pool.get_index_k_with_scale_buffer(layer_id=layer_id)
        q_scales = scales_of(self.attention.q_b_proj)  # wq_b's too
        written = (positions, batch.out_cache_loc, pool.get_key_buffer(layer_id), index_cache, q_scales)
        q, scales = norm_rope_store(qkv, key, weights, *written, **self.part, before_ours=before_ours)
        return q, scales, gates

    def _with_selection(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, batch: ForwardBatch, selection: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(rotated part of the query, its absorbed part, `selection`), where attention is to what an earlier layer chose."""
        return self._without_scores(positions, hidden_states, batch, selection, indexed=False)

    def _short(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, batch: ForwardBatch, metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The same where every row attends to all of its tokens; the layer's index keys are written."""
        selection = self.every_token.of(self.attention.layer_id, metadata, self.attention.indexer.index_topk)
        return self._without_scores(positions, hidden_states, batch, selection, indexed=True)

    def _without_scores(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        batch: ForwardBatch,
        selection: torch.Tensor | None,
        indexed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        from sglang.srt.layers.attention.dsa import dsa_indexer

        attention, weights, side = self.attention, weights_of(self.attention), SideStream(self.attention.alt_stream)
        heads = QueryHeads.of(attention, batch)
        early = has(self.query, len(hidden_states)) and not heads.of_all_ranks
        q, scales, _ = self._stored(positions, hidden_states, batch, weights, side, indexed, before_ours=early)
        q_nope, q_rope = heads.parts(self.query((q, scales)) if early else heads.projected(q, scales))
        if 0 < len(q_nope) <= self.most_ready:
            q_nope_out, q_rope = head_queries(q_nope, q_rope, attention.w_kc, weights, positions)
        else:
            side.fork()
            q_rope = rope_query(q_rope, weights, positions)
            with side.running():
                q_nope_out = heads.absorbed(q_nope)
            side.join()
        q_nope_out, q_rope = heads.gathered(q_nope_out, q_rope)
        return q_rope, q_nope_out, dsa_indexer.maybe_capture_indexer_topk(attention.layer_id, selection)

    def _forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, batch: ForwardBatch, metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rotated part of the query, its absorbed part, chosen slots).

        The absorption of the query runs beside the indexer; its projection too, where it has a launch of its own.
        """
        from sglang.srt.layers.attention.dsa import dsa_indexer
        from sglang.srt.layers.deep_gemm_wrapper import configure_deep_gemm_num_sms

        attention, indexer = self.attention, self.attention.indexer
        weights, side, heads = weights_of(attention), SideStream(attention.alt_stream), QueryHeads.of(attention, batch)
        divided = has(self.query_products, len(hidden_states))
        early = has_early(self.query_products, len(hidden_states))
        q, scales, gates = self._stored(positions, hidden_states, batch, weights, side, indexed=True, before_ours=early)
        normed = q if scales is None else (q, scales)

        if divided:
            query, index_query = self.query_products(normed, heads.q_b)
        else:
            side.fork()
            if attention.alt_stream is None:
                index_query = indexer.wq_b(normed)[0]
            else:
                with configure_deep_gemm_num_sms(indexer.half_device_sm_count):  # as SGLang does where it runs two at once
                    index_query = indexer.wq_b(normed)[0]
            with side.running():
                query = heads.projected(q, scales)
            side.join()
        q_nope, q_rope = heads.parts(query)
        side.fork()
        index_query = index_query.view(-1, indexer.n_heads, indexer.head_dim)
        index_q, gates, q_rope = rope_quantise(index_query, gates, q_rope, weights, positions)
        with side.running():
            q_nope_out = heads.absorbed(q_nope)
        topk_indices = indexer._get_topk_paged(batch, attention.layer_id, index_q, gates, metadata)
        topk_indices = dsa_indexer._broadcast_indexer_topk_from_rank0(topk_indices)
        topk_indices = dsa_indexer.maybe_capture_indexer_topk(attention.layer_id, topk_indices)
        side.join()
        q_nope_out, q_rope = heads.gathered(q_nope_out, q_rope)
        return q_rope, q_nope_out, topk_indices
