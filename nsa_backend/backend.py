"""The attention backend of one model: metadata of every mode, eager and captured, and attention on top of it."""

from __future__ import annotations

import logging

import torch

from nsa_backend import __version__
from nsa_backend.adapters import sglang_types
from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.context_part import ContextPart
from nsa_backend.attention.dense_prefill import DensePrefill
from nsa_backend.attention.fp8 import ragged_kv, rope_in_fp8, slots_of_ragged
from nsa_backend.attention.implementations import build_decode, build_prefill, with_choices
from nsa_backend.attention.interface import SparseAttention
from nsa_backend.attention.sparse_inputs import append_rows, refuse_unapplied, sparse_inputs, write_kv
from nsa_backend.config import BackendConfig
from nsa_backend.error_notes import Activity, noted
from nsa_backend.indexer.metadata import IndexerMetadata
from nsa_backend.indexer.schedule_check import check_schedule
from nsa_backend.indexer.topk import choose_topk, slots_of
from nsa_backend.kernels.batch_inputs import PADDING_LENGTH, BatchInputs
from nsa_backend.kernels.plan import plan_decode
from nsa_backend.metadata.captured import CapturedLaunches
from nsa_backend.metadata.modes import eager_metadata, is_paged, plan_for
from nsa_backend.metadata.views import NSAMetadata, with_padding_rows
from nsa_backend.metadata.writer import MetadataWriter

logger = logging.getLogger(__name__)


class NativeSparseAttnBackend(adapter.BackendEntryPoints):
    """DeepSeek sparse attention behind SGLang's `AttentionBackend` interface; its generation's part of it is in `adapters`."""

    def __init__(self, model_runner: sglang_types.ModelRunner, skip_prefill: bool = False, *, shares_selections: bool = False):
        """Build for `model_runner`; raises ValueError where the model, the GPU or an option cannot be served.

        Args:
            model_runner: target or draft model, with its KV pool and request-to-token pool allocated.
            skip_prefill: accepted because SGLang's factories pass it; prefill is always ready.
            shares_selections: whether it makes or takes the selection that all draft steps of a round attend with.
        """
        super().__init__()
        self.config = with_choices(BackendConfig.from_runner(model_runner))
        if self.config.num_sms:
            for next_n in (1,) if self.config.pairs_from is None else (1, 2):
                check_schedule(self.config.num_sms, self.config.surplus_last, next_n)
        self.writer = MetadataWriter(self.config, model_runner.req_to_token_pool.req_to_token)
        # Read by SGLang's models, forward context and draft workers.
        self.kv_cache_dtype = model_runner.kv_cache_dtype
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.max_context_len = model_runner.model_config.context_len
        self.decode_attention = build_decode(self.config)
        self.prefill_attention = build_prefill(self.config)
        self.dense_prefill = DensePrefill(self.config)
        attention = self.config.attention
        divided = attention.context_ranks > 1
        self.context_part = ContextPart(attention.context_ranks, attention.context_rank) if divided else None
        self.topk = choose_topk(self.config.attention.device)
        self.fuse_topk = adapter.fuse_topk(shares_selections)
        self.captured = CapturedLaunches(self.writer)
        self.rows = CapturedLaunches(self.writer, "graph of a prefill")
        self._most_captured = (0, 0)  # requests, rows
        self._indexer: IndexerMetadata | None = None
        self.forward_metadata: NSAMetadata | None = None
        self.activity = Activity()
        self.use_mha = False  # SGLang's model reads it to choose between dense and absorbed prefill

    # Metadata

    @noted
    def init_forward_metadata(self, forward_batch: sglang_types.ForwardBatch) -> None:
        """Metadata of an eager forward, in memory of its own."""
        self.activity.begin("preparing", forward_batch.forward_mode, forward_batch.batch_size)
        self.captured.leave()
        self.rows.leave()
        self.use_mha = self.dense_prefill.fits(forward_batch)
        metadata = eager_metadata(self.writer, forward_batch, dense=self.use_mha)
        if is_paged(forward_batch.forward_mode):
            metadata = self.decode_attention.prepare(metadata)
        elif not self.use_mha:
            metadata = self.prefill_attention.prepare(metadata)
            self.topk.prepare(metadata.nsa_seqlens_expanded)
        self.forward_metadata = metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Remember how large captured batches get; metadata buffers are allocated when the first mode is captured."""
        self._most_captured = (max_bs, max_num_tokens)
        self.captured.clear()
        self.decode_attention.reserve(max_num_tokens)

    @noted
    def before_capture(self, mode: sglang_types.ForwardMode, num_rows: int, inputs: BatchInputs) -> None:
        self.activity.begin("capturing", mode, inputs.num_requests)
        self.rows.leave()
        self.use_mha = False
        plan = plan_for(mode, inputs.num_requests, num_rows, self.config.next_n(inputs.num_requests))
        room = plan_for(mode, *self._most_captured)
        self.forward_metadata = self.captured.capture(mode, plan, room, inputs).steps[0]

    @noted
    def before_replay(self, mode: sglang_types.ForwardMode, num_requests: int, inputs: BatchInputs) -> None:
        self.activity.begin("replaying", mode, num_requests)
        self.rows.leave()
        self.use_mha = False
        self.forward_metadata = self.captured.replay(mode, num_requests, inputs).steps[0]

    @noted
    def at_graph_head(self) -> None:
        self.captured.write()
        self.prepare_decode()

    @property
    def runs_captured(self) -> bool:
        return self.captured.current is not None

    # Prefills that are captured whole: each row is a request that decodes its newest token

    @noted
    def keep_rows(self, width: int, inputs: BatchInputs) -> None:
        """Allocate what a captured prefill fills at its head.

        Args:
            width: most tokens of a request.
            inputs: static tensors of every row, padding included: tokens of its request up to its own, and the request's row
                in SGLang's pool.
        """
        self.decode_attention.reserve(inputs.num_requests)
        plan = plan_decode(inputs.num_requests)
        self.rows.capture(None, plan, plan, inputs, width)
        self.rows.leave()

    @noted
    def replay_rows(self, rows: int) -> None:
        """Nothing on the device: the graph writes its own metadata. Raises ValueError where no such prefill was captured."""
        self.activity.begin("replaying a prefill, a row a request", None, rows)
        self.captured.leave()
        self.use_mha = False
        self.forward_metadata = self.rows.replay(None, rows).steps[0]

    @noted
    def at_head_of_rows(self, rows: int) -> None:
        """Write the metadata of the captured prefill that runs on the CPU, and prepare the decode implementation for it."""
        self.replay_rows(rows)
        self.rows.write()
        self.prepare_decode()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padding request, in tokens."""
        return PADDING_LENGTH

    def update_verify_buffers_to_fill_after_draft(self, spec_info: sglang_types.SpecInput, cuda_graph_bs: int | None) -> None:
        """Nothing depends on the drafted tokens, so nothing planned before them has to be corrected."""

    @noted
    def indexer_metadata(self, forward_batch: sglang_types.ForwardBatch) -> IndexerMetadata:
        """The metadata of the forward under way, behind the interface of SGLang's indexer; the same for all of its layers."""
        if self._indexer is None or self._indexer.attn_metadata is not self.forward_metadata:
            self._indexer = IndexerMetadata(self.forward_metadata, self.topk, self.fuse_topk)
        return self._indexer

    @noted
    def selection_for_drafts(self, topk_indices: torch.Tensor) -> torch.Tensor:
        if not self.fuse_topk or self.forward_metadata.topk_indices_offset is None:
            return topk_indices
        return slots_of_ragged(topk_indices, self.forward_metadata)

    @noted
    def prepare_decode(self) -> None:
        """What the decode implementation needs beyond the metadata launch, which has just been made."""
        self.forward_metadata = self.decode_attention.prepare(self.forward_metadata)

    # Attention

    @noted
    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: sglang_types.RadixAttention,
        forward_batch: sglang_types.ForwardBatch,
        save_kv_cache: bool = True,
        **mla_args: torch.Tensor | bool | None,
    ) -> torch.Tensor:
        """Write the new tokens' KV and attend with the decode implementation; see `_forward_sparse`."""
        return self._forward_sparse(self.decode_attention, q, k, layer, forward_batch, save_kv_cache, decode=True, **mla_args)

    @noted
    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: sglang_types.RadixAttention,
        forward_batch: sglang_types.ForwardBatch,
        save_kv_cache: bool = True,
        **mla_args: torch.Tensor | bool | None,
    ) -> torch.Tensor:
        """Dense prefill for short contexts, else sparse.

        target_verify, draft_extend and prefills that are captured whole use the decode implementation.
        """
        mode = forward_batch.forward_mode
        if self.rows.current is not None:
            mla_args["decode"] = True
            attention = self.decode_attention
        elif mode.is_target_verify() or adapter.is_draft_extend(mode):
            attention = self.decode_attention
        elif self.use_mha:
            if save_kv_cache and k is not None:
                raise ValueError("dense prefill got KV to save, which SGLang saves itself: it would be written twice")
            return self.dense_prefill.forward(q, k, v, layer, self.forward_metadata)
        else:
            attention = self.prefill_attention
        return self._forward_sparse(attention, q, k, layer, forward_batch, save_kv_cache, **mla_args)

    def _forward_sparse(
        self,
        attention: SparseAttention,
        q: torch.Tensor,
        k: torch.Tensor | None,
        layer: sglang_types.RadixAttention,
        forward_batch: sglang_types.ForwardBatch,
        save_kv_cache: bool,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
        cos_sin_cache: torch.Tensor | None = None,
        is_neox: bool = False,
        llama_4_scaling: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        decode: bool = False,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Absorbed MLA over the chosen slots.

        Args:
            q: [rows, heads * latent], or [rows, heads * (latent + rope)] where `q_rope` is None.
            k: [rows, 1, latent], the latent KV of the new tokens; `k_rope` [rows, 1, rope].
            q_rope: [rows, heads * rope].
            topk_indices: int32 [rows, index_topk], what `IndexerMetadata.topk_transform` returned.
            cos_sin_cache: where SGLang leaves RoPE to the backend, which it does for trtllm on an FP8 KV cache; query and KV
                then still lack it. `is_neox` is its layout.
            llama_4_scaling: belongs to models that are not served.
            attn_sink: float32 [heads], the score of a key without a value, where the model has learned one.
            decode: whether a row is a request.
            return_lse: what layers say whose KV ranks divide.

        Returns:
            [rows, heads, latent]; where ranks divide the KV, beside the log-sum-exp of this rank's part, as
            `SparseAttention.forward_part` has both.
        """
        refuse_unapplied(llama_4_scaling, attn_sink, self.config.attention.sinks)
        if cos_sin_cache is not None:
            q, k, k_rope = rope_in_fp8(
                q, q_rope, k, k_rope, layer, forward_batch.positions[: q.shape[0]], cos_sin_cache, is_neox
            )
            q_rope = None
        pool = adapter.kv_pool(forward_batch, self)
        if k is not None and save_kv_cache:
            write_kv(pool, layer, forward_batch.out_cache_loc, k, k_rope)
        metadata = self._metadata_of_rows(attention, q.shape[0])
        slots = self._slots(topk_indices, metadata, q.shape[0])
        kv_cache = pool.get_key_buffer(layer.layer_id)
        if metadata.topk_indices_offset is not None:
            kv_cache = ragged_kv(kv_cache, metadata, k, k_rope)
        out = adapter.attention_output(forward_batch)
        inputs = sparse_inputs(q, q_rope, layer, kv_cache, slots, metadata, attn_sink=attn_sink, decode=decode, out=out)
        if self.context_part is None:
            return attention.forward(inputs)
        return attention.forward_part(inputs, self.context_part.at(topk_indices, metadata, layer.layer_id))

    def _metadata_of_rows(self, attention: SparseAttention, rows: int) -> NSAMetadata:
        """The metadata of the forward under way, with padding rows where SGLang has added some.

        Under DP attention SGLang pads some batches after they were planned, and to a size that it alone decides.
        """
        metadata = self.forward_metadata
        if rows > metadata.nsa_cache_seqlens_int32.shape[0]:
            metadata = self.forward_metadata = attention.prepare(with_padding_rows(metadata, rows))
        return metadata

    def _slots(self, topk_indices: torch.Tensor, metadata: NSAMetadata, rows: int) -> torch.Tensor:
        """int32 [rows, index_topk]: what attention reads for what the indexer chose, -1 in padding rows."""
        if not self.fuse_topk:
            topk_indices = slots_of(topk_indices[: metadata.table_rows.shape[0]], metadata)
        return append_rows(topk_indices, rows, -1)

    def log_start(self, draft_steps: int) -> None:
        """The one line that tells an operator that this backend serves."""
        logger.info(
            "nsa_backend %s is active: decode=%s, prefill=%s (dense MHA %s), draft steps=%d, page size=64",
            __version__,
            self.config.decode_impl,
            self.config.prefill_impl,
            f"up to {adapter.dense_prefill_limit()} tokens" if self.dense_prefill.runs else "off",
            draft_steps,
        )
