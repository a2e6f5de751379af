"""A kernel of our own for the rows of target_verify and draft_extend: those of a request read each KV slot once, together.

Rows that follow each other choose nearly the same tokens, and every other implementation reads them again for each row.
Forwards of one row a request are sparse_decode's. Rows of more than 64 heads are attended to by a kernel in Triton.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_backend.attention import sparse_decode
from nsa_backend.attention.context_part import ContextPart
from nsa_backend.attention.interface import nvrtc_problems, part_problems
from nsa_backend.attention.sparse_decode import SparseDecode
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.config import AttentionConfig
from nsa_backend.kernels import sparse_verify_cuda
from nsa_backend.kernels.selection_union import MAX_ROWS_PER_REQUEST
from nsa_backend.kernels.sparse_verify import VerifyMemory, sparse_verify
from nsa_backend.kernels.sparse_verify_cuda import CudaMemory, Groups, Need

FEWEST_GROUPS = 16
"""Tiles of a call that take rows together in bfloat16: with fewer sparse_decode is faster where rows share half of what they
chose, and hardly slower where they share more (benchmarks/results/attention_0_5_23_h200.json, rows_together)."""


def problems(config: AttentionConfig) -> list[str]:
    """Why sparse_verify cannot run."""
    found, most = sparse_decode.problems(config), MAX_ROWS_PER_REQUEST
    if in_cuda(config):
        found += nvrtc_problems()
    elif config.num_draft_tokens > most:
        found.append(
            f"here it takes at most {most} rows of a request together: pass --speculative-num-draft-tokens {most} or less, "
            f"where {config.num_draft_tokens} are asked for"
        )
    return found if in_cuda(config) else found + part_problems(config)


def in_cuda(config: AttentionConfig) -> bool:
    """Whether the kernel in CUDA C++ serves, rather than that in Triton."""
    rows = max(config.num_draft_tokens, 1)
    shape = config.num_heads, config.latent_dim, config.rope_dim, config.index_topk, rows
    return sparse_verify_cuda.problem(*shape) is None


def build(config: AttentionConfig) -> SparseVerify:
    return SparseVerify(config)


class SparseVerify(SparseDecode):
    """The rows of a request in one program, or in some that share what they chose."""

    def __init__(self, config: AttentionConfig):
        super().__init__(config)
        self._config = config
        self._reserved_rows = 0
        self._in_cuda = config.device.type == "cuda" and in_cuda(config)
        if self._in_cuda and config.num_draft_tokens > 1:
            groups = Groups.of(config.num_draft_tokens, config.num_heads)
            ranks = config.context_ranks, config.context_rank
            shape = groups.rows, config.num_heads, config.index_topk
            sparse_verify_cuda.compile_ahead(*shape, config.device, *ranks, fp8=config.fp8)

    def reserve(self, max_rows: int) -> None:
        """What is allocated later, when the number of slots is known, has room for captured forwards of so many rows."""
        self._reserved_rows = max(max_rows, self._reserved_rows)

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        if not _whole_requests(inputs):
            return super().forward(inputs)
        if self._takes(inputs):
            return self._together(inputs) if self._gains(inputs) else super().forward(inputs)
        rows_per_request = inputs.rows_per_request
        requests = len(inputs.q_nope) // rows_per_request
        memory = self._memory(requests, rows_per_request, inputs.topk_slots.shape[1], len(inputs.kv_cache))
        return sparse_verify(*self._arguments(inputs), memory, num_sms=self._num_sms, logit_cap=inputs.logit_cap)

    def forward_part(self, inputs: SparseInputs, part: ContextPart) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel itself skips what other ranks have."""
        if not (_whole_requests(inputs) and self._takes(inputs) and self._gains(inputs)):
            return super().forward_part(inputs, part)
        lse = torch.empty(inputs.q_nope.shape[:2], dtype=torch.float32, device=inputs.q_nope.device)
        return self._together(inputs, ranks=part.ranks, rank=part.rank, lse=lse), lse

    def _takes(self, inputs: SparseInputs) -> bool:
        """Whether the kernel in CUDA C++ can serve this call."""
        return self._in_cuda and not inputs.logit_cap and len(inputs.kv_cache) <= sparse_verify_cuda.MOST_SLOTS

    def _gains(self, inputs: SparseInputs) -> bool:
        """Whether whole requests make enough tiles."""
        groups = Groups.of(inputs.rows_per_request, self._config.num_heads)
        return len(inputs.q_nope) // inputs.rows_per_request * groups.of_request >= FEWEST_GROUPS

    def _together(self, inputs: SparseInputs, **part: Any) -> torch.Tensor:
        memory = self._cuda_memory(len(inputs.q_nope), inputs.rows_per_request, inputs.topk_slots.shape[1])
        return sparse_verify_cuda.sparse_verify_cuda(*self._arguments(inputs), memory, num_sms=self._num_sms, **part)

    def _arguments(self, inputs: SparseInputs) -> tuple:
        return (
            inputs.q_nope, inputs.q_rope, inputs.kv_cache, inputs.topk_slots, self.lens(inputs), inputs.sm_scale,
            inputs.rows_per_request,
        )  # fmt: skip

    def _cuda_memory(self, rows: int, rows_per_request: int, topk: int) -> CudaMemory:
        config = self._config
        shape = rows_per_request, config.num_heads, topk, self._num_sms
        kept, need = _cuda_memories.setdefault((config.device, *shape), []), Need.of(rows, *shape)
        for memory in kept:
            if memory.hold(need):
                return memory
        return self._keep(kept, CudaMemory.allocate(max(rows, self._reserved_rows), *shape, config.device))

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
        return self._keep(kept, made)

    def _keep(self, kept: list[Any], made: Any) -> Any:
        # What a capture allocates belongs to its graph. SGLang runs a forward before it captures it.
        if self._config.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            kept.append(made)
        return made


def _whole_requests(inputs: SparseInputs) -> bool:
    """Whether the rows are those of requests of several; SGLang may pad to any number of rows under DP attention."""
    return inputs.rows_per_request > 1 and len(inputs.q_nope) % inputs.rows_per_request == 0


_memories: dict[tuple, list[VerifyMemory]] = {}
_cuda_memories: dict[tuple, list[CudaMemory]] = {}
"""Shared by a process's backends, whose forwards run one after the other; none is freed, as graphs hold their addresses."""
