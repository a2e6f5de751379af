"""FlashMLA's decode kernel on FP8 KV: 512 fp8_e4m3 latents, four float32 scales and 64 bfloat16 RoPE values a token."""

from __future__ import annotations

from dataclasses import replace

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.context_part import ContextPart, joinable
from nsa_backend.attention.interface import package_problems, sinks_problems
from nsa_backend.attention.joined_query import QueryJoiner
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.config import AttentionConfig
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.metadata.views import FlashMlaTiles, NSAMetadata

HEAD_COUNTS = (64, 128)
"""Query-head counts the kernel is built for; fewer heads are padded to the next one."""

TOPK_MULTIPLE = 64
"""Tokens of one block of the kernel."""


def problems(config: AttentionConfig) -> list[str]:
    """Why flashmla_kv cannot run."""
    found = []
    if config.device_sm != 90:
        found.append("nsa_backend runs FlashMLA on Hopper (SM90) alone so far")
    if not config.fp8:
        found.append(f"it reads an fp8_e4m3 KV cache and this one is {config.kv_cache_dtype}: pass --kv-cache-dtype fp8_e4m3")
    if config.num_heads > HEAD_COUNTS[-1]:
        found.append(
            f"it takes at most {HEAD_COUNTS[-1]} query heads a rank and this model has {config.num_heads}: {config.fewer_heads}"
        )
    if config.page_size != PAGE_SIZE:
        found.append(f"it reads pages of {PAGE_SIZE} tokens and this cache has pages of {config.page_size}")
    if config.index_topk % TOPK_MULTIPLE:
        found.append(f"it takes an index_topk in multiples of {TOPK_MULTIPLE} and this model has {config.index_topk}")
    return found + sinks_problems(config) + package_problems(adapter.FLASH_MLA_DISTRIBUTION)


def build(config: AttentionConfig) -> FlashMlaKv:
    return FlashMlaKv(config)


class FlashMlaKv:
    """Needs FlashMLA's tile schedule: which SM works on which part of which row.

    Sparse rows are scheduled by index_topk whatever their lengths (tests/gpu/test_schedules_of_attention.py), so a schedule
    holds for every forward of as many rows. Those of captured forwards are kept.
    """

    def __init__(self, config: AttentionConfig):
        flash_mla = adapter.flash_mla()
        self._attend, self._schedule = flash_mla.flash_mla_with_kvcache, flash_mla.get_mla_metadata
        self._config = config
        self._query = QueryJoiner(config, next(count for count in HEAD_COUNTS if config.num_heads <= count))
        self._max_kept_rows = 0

    def reserve(self, max_rows: int) -> None:
        self._query.reserve(max_rows)
        self._max_kept_rows = max(max_rows, self._max_kept_rows)

    def prepare(self, metadata: NSAMetadata) -> NSAMetadata:
        """Add the schedule of these rows. SGLang runs a forward before it captures it, so a capture finds it made."""
        return replace(metadata, schedule=self._tiles(metadata.nsa_cache_seqlens_int32))

    def _tiles(self, cache_seqlens: torch.Tensor) -> FlashMlaTiles:
        rows = cache_seqlens.shape[0]
        key = (cache_seqlens.device, rows, self._query.padded_heads, self._config.index_topk)
        kept = _tiles_by_rows.get(key)
        if kept is not None:
            return kept
        tiles, num_splits = self._schedule(
            cache_seqlens=cache_seqlens,
            num_q_tokens_per_head_k=self._query.padded_heads,
            num_heads_k=1,
            num_heads_q=self._query.padded_heads,
            is_fp8_kvcache=True,
            topk=self._config.index_topk,
        )
        made = FlashMlaTiles(tiles, num_splits)
        # What a capture allocates belongs to its graph.
        if rows <= self._max_kept_rows and not torch.cuda.is_current_stream_capturing():
            _tiles_by_rows[key] = made
        return made

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        return self._call(inputs)[0]

    def forward_part(self, inputs: SparseInputs, part: ContextPart) -> tuple[torch.Tensor, torch.Tensor]:
        own = part.own(inputs)
        # The schedule of rows holds whatever their lengths are.
        out, lse = self._call(replace(own, schedule=inputs.schedule))
        return joinable(out, lse[:, : out.shape[1], 0], own, natural=True)

    def _call(self, inputs: SparseInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp, in base e: [rows, heads, latent] and [rows, padded heads, 1]."""
        rows, heads, latent_dim = inputs.q_nope.shape
        # Of a prefill padded for DP attention SGLang hands over the real rows alone where it captures prefill in pieces.
        tiles = inputs.schedule or self._tiles(inputs.nsa_cache_seqlens)
        out, lse = self._attend(
            q=self._query.join(inputs).unsqueeze(1),
            k_cache=inputs.kv_cache.view(-1, PAGE_SIZE, 1, inputs.kv_cache.shape[-1]),
            cache_seqlens=inputs.nsa_cache_seqlens,
            head_dim_v=latent_dim,
            tile_scheduler_metadata=tiles.tile_scheduler_metadata,
            num_splits=tiles.num_splits,
            softmax_scale=inputs.sm_scale,
            indices=inputs.topk_slots.unsqueeze(1),
            # Sparse attention does not read it, but the binding wants a tensor.
            block_table=inputs.topk_slots.new_empty(rows, 0),
            is_fp8_kvcache=True,
        )
        return out[:, 0, :heads], lse


_tiles_by_rows: dict[tuple, FlashMlaTiles] = {}
"""Shared by all backends of a process: target, draft steps and draft-extend."""
