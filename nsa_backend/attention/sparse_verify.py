"""A kernel of our own for the rows of target_verify and draft_extend: those of a request read each KV slot once, together.

Rows that follow each other choose nearly the same tokens, and every other implementation reads them again for each row.
Forwards of one row a request, and of few requests, are sparse_decode's.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_backend.attention import sparse_decode
from nsa_backend.attention.context_part import ContextPart
from nsa_backend.attention.interface import nvrtc_problems
from nsa_backend.attention.sparse_decode import SparseDecode
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.config import AttentionConfig
from nsa_backend.kernels import sparse_verify as kernel
from nsa_backend.kernels.sparse_verify import Groups, Need, VerifyMemory

FEWEST_GROUPS = {torch.bfloat16: 16, torch.float8_e4m3fn: 8}
"""Tiles of a call that take rows together, by KV cache: with fewer sparse_decode is faster where rows share half of what they
chose, and hardly slower where they share more (benchmarks/results/attention_0_5_23_h200.json, rows_together)."""


def problems(config: AttentionConfig) -> list[str]:
    """Why sparse_verify cannot run."""
    rows = max(config.num_draft_tokens, 1)
    reason = kernel.problem(config.num_heads, config.latent_dim, config.rope_dim, config.index_topk, rows)
    if reason and config.num_heads > kernel.LINES:
        reason += f": {config.fewer_heads}"
    return sparse_decode.problems(config) + ([reason] if reason else []) + nvrtc_problems()


def build(config: AttentionConfig) -> SparseVerify:
    return SparseVerify(config)


class SparseVerify(SparseDecode):
    """The rows of a request in tiles, each read by one block or by some that share what they chose."""

    def __init__(self, config: AttentionConfig):
        super().__init__(config)
        self._config = config
        self._reserved_rows = 0
        self._on_gpu = config.device.type == "cuda"
        if self._on_gpu and config.num_draft_tokens > 1:
            groups = Groups.of(config.num_draft_tokens, config.num_heads)
            ranks = config.context_ranks, config.context_rank
            shape = groups.rows, config.num_heads, config.index_topk
            kernel.compile_ahead(*shape, config.device, *ranks, fp8=config.fp8)

    def reserve(self, max_rows: int) -> None:
        """What is allocated later, for as many rows a request as come then, has room for captured forwards of so many rows."""
        self._reserved_rows = max(max_rows, self._reserved_rows)

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        return self._together(inputs) if self._takes(inputs) else super().forward(inputs)

    def forward_part(self, inputs: SparseInputs, part: ContextPart) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel itself skips what other ranks have."""
        if not self._takes(inputs):
            return super().forward_part(inputs, part)
        lse = torch.empty(inputs.q_nope.shape[:2], dtype=torch.float32, device=inputs.q_nope.device)
        return self._together(inputs, ranks=part.ranks, rank=part.rank, lse=lse), lse

    def _takes(self, inputs: SparseInputs) -> bool:
        """Whether the rows are those of requests of several, and enough; SGLang may pad to any number under DP attention."""
        rows, rows_per_request = len(inputs.q_nope), inputs.rows_per_request
        if not self._on_gpu or rows_per_request == 1 or rows % rows_per_request:
            return False
        groups = rows // rows_per_request * Groups.of(rows_per_request, self._config.num_heads).of_request
        readable = not inputs.logit_cap and len(inputs.kv_cache) <= kernel.MOST_SLOTS
        return readable and groups >= FEWEST_GROUPS[self._config.kv_cache_dtype]

    def _together(self, inputs: SparseInputs, **part: Any) -> torch.Tensor:
        rows, rows_per_request = len(inputs.q_nope), inputs.rows_per_request
        return kernel.sparse_verify(
            inputs.q_nope,
            inputs.q_rope,
            inputs.kv_cache,
            inputs.topk_slots,
            self.lens(inputs),
            inputs.sm_scale,
            rows_per_request,
            self._memory(rows, rows_per_request, inputs.topk_slots.shape[1]),
            num_sms=self._num_sms,
            **part,
        )

    def _memory(self, rows: int, rows_per_request: int, topk: int) -> VerifyMemory:
        config = self._config
        shape = rows_per_request, config.num_heads, topk, self._num_sms
        kept, need = _memories.setdefault((config.device, *shape), []), Need.of(rows, *shape)
        for memory in kept:
            if memory.hold(need):
                return memory
        made = VerifyMemory.allocate(max(rows, self._reserved_rows), *shape, config.device)
        # What a capture allocates belongs to its graph. SGLang runs a forward before it captures it.
        if config.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            kept.append(made)
        return made


_memories: dict[tuple, list[VerifyMemory]] = {}
"""Shared by a process's backends, whose forwards run one after the other; none is freed, as graphs hold their addresses."""
