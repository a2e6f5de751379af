"""A kernel of our own for the rows of target_verify and draft_extend: those of a request read each KV slot once, together.

Rows that follow each other choose nearly the same tokens, and every other implementation reads them again for each row.
Forwards of one row a request are sparse_decode's. Written for 8 to 32 heads a rank; no server has run it yet.
"""

from __future__ import annotations

import torch

from nsa_backend.attention import sparse_decode
from nsa_backend.attention.interface import part_problems
from nsa_backend.attention.sparse_decode import SparseDecode
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.config import AttentionConfig
from nsa_backend.kernels.selection_union import MAX_ROWS_PER_REQUEST
from nsa_backend.kernels.sparse_verify import VerifyMemory, sparse_verify


def problems(config: AttentionConfig) -> list[str]:
    """Why sparse_verify cannot run."""
    found = sparse_decode.problems(config)
    if config.num_draft_tokens > MAX_ROWS_PER_REQUEST:
        found.append(
            f"it takes at most {MAX_ROWS_PER_REQUEST} rows of a request together: pass --speculative-num-draft-tokens "
            f"{MAX_ROWS_PER_REQUEST} or less, where {config.num_draft_tokens} are asked for"
        )
    return found + part_problems(config)


def build(config: AttentionConfig) -> SparseVerify:
    return SparseVerify(config)


class SparseVerify(SparseDecode):
    """One program for the rows of a request, or for a stretch of what they chose."""

    def __init__(self, config: AttentionConfig):
        super().__init__(config)
        self._config = config
        self._reserved_rows = 0

    def reserve(self, max_rows: int) -> None:
        """What is allocated later, when the number of slots is known, has room for captured forwards of so many rows."""
        self._reserved_rows = max(max_rows, self._reserved_rows)

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        rows, rows_per_request = inputs.q_nope.shape[0], inputs.rows_per_request
        if rows_per_request < 2 or rows % rows_per_request:  # SGLang may pad to any number of rows under DP attention
            return super().forward(inputs)
        return sparse_verify(
            inputs.q_nope,
            inputs.q_rope,
            inputs.kv_cache,
            inputs.topk_slots,
            self._lens(inputs),
            inputs.sm_scale,
            rows_per_request,
            self._memory(rows // rows_per_request, rows_per_request, *inputs.topk_slots.shape[1:], len(inputs.kv_cache)),
            num_sms=self._num_sms,
            logit_cap=inputs.logit_cap,
        )

    def _memory(self, requests: int, rows_per_request: int, topk: int, num_slots: int) -> VerifyMemory:
        config = self._config
        kept = _memories.setdefault((config.device, config.num_heads, config.latent_dim, self._num_sms), [])
        for memory in kept:
            if memory.hold(requests, rows_per_request, topk, num_slots):
                return memory
        most = max(requests, self._reserved_rows // rows_per_request)
        made = VerifyMemory.allocate(
            most, rows_per_request, config.num_heads, config.latent_dim, topk, num_slots, self._num_sms, config.device
        )
        # What a capture allocates belongs to its graph. SGLang runs a forward before it captures it.
        if config.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            kept.append(made)
        return made


_memories: dict[tuple, list[VerifyMemory]] = {}
"""Shared by a process's backends, whose forwards run one after the other; none is freed, as graphs hold their addresses."""
