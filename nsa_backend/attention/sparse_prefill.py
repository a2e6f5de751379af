"""A kernel of our own for the rows of a prefill on ranks of few heads: neighbouring rows read each KV slot once, together.

FlashMLA's sparse prefill pads 8 or 16 heads to the 64 lines of a tensor-core tile; here the heads of four to eight rows fill
them, and rows that follow each other choose much alike. Rows of two prompts in one tile share nothing, and are right as well.
"""

from __future__ import annotations

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.context_part import ContextPart
from nsa_backend.attention.interface import (
    NothingToPrepare,
    device_title,
    nvrtc_problems,
    sinks_problems,
)
from nsa_backend.attention.sparse_decode import SparseDecode, kv_problems, sms_of
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.config import AttentionConfig
from nsa_backend.kernels import sparse_verify as kernel
from nsa_backend.kernels.sparse_verify import LINES, Need, VerifyMemory, rows_of_tile

MOST_HEADS = LINES // 2
"""Two rows at least share a tile."""
WAVES = 8
"""Tiles an SM takes of one launch; the lists of more would take more memory, 35 MB for 16 heads on an H200."""


def problems(config: AttentionConfig) -> list[str]:
    """Why sparse_prefill cannot run."""
    found = []
    if not config.prefill:
        found.append(f"it is made for the rows of a prompt: name it for {adapter.PREFILL_OPTION} alone")
    if config.device_sm != 90:
        found.append(f"it is written for Hopper (SM90) and this device is {device_title(config.device_sm)}")
    if config.num_heads > MOST_HEADS:
        most = f"it takes rows of up to {MOST_HEADS} heads together and this rank has {config.num_heads}"
        found.append(f"{most}: {config.fewer_heads}")
    elif reason := kernel.problem(
        config.num_heads, config.latent_dim, config.rope_dim, config.index_topk, rows_of_tile(config.num_heads)
    ):
        found.append(reason)
    return found + kv_problems(config) + nvrtc_problems() + sinks_problems(config)


def build(config: AttentionConfig) -> SparsePrefill:
    return SparsePrefill(config)


class SparsePrefill(NothingToPrepare):
    """As many launches as the rows need, in pieces of whole tiles."""

    def __init__(self, config: AttentionConfig):
        self._config, self._rows, self._num_sms = config, rows_of_tile(config.num_heads), sms_of(config.device)
        if config.device.type == "cuda":
            ranks = config.context_ranks, config.context_rank
            shape = self._rows, config.num_heads, config.index_topk
            kernel.compile_ahead(*shape, config.device, *ranks, fp8=config.fp8)

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        return self._call(inputs)

    def forward_part(self, inputs: SparseInputs, part: ContextPart) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel itself skips what other ranks have."""
        lse = torch.empty(inputs.q_nope.shape[:2], dtype=torch.float32, device=inputs.q_nope.device)
        return self._call(inputs, lse, ranks=part.ranks, rank=part.rank), lse

    def _call(self, inputs: SparseInputs, lse: torch.Tensor | None = None, **part: int) -> torch.Tensor:
        query, lens = inputs.q_nope, SparseDecode.lens(inputs)
        in_place = inputs.out is not None and lse is None
        out = inputs.out if in_place else torch.empty(query.shape, dtype=query.dtype, device=query.device)
        rows, most = len(out), WAVES * self._num_sms * self._rows
        memory = self._memory_for(min(most, rows)) if rows else None
        for begin in range(0, rows, most):
            piece = slice(begin, begin + most)
            kernel.sparse_verify(
                query[piece],
                inputs.q_rope[piece],
                inputs.kv_cache,
                inputs.topk_slots[piece],
                lens[piece],
                inputs.sm_scale,
                self._rows,
                memory,
                num_sms=self._num_sms,
                out=out[piece],
                lse=None if lse is None else lse[piece],
                **part,
            )
        return out

    def _memory_for(self, rows: int) -> VerifyMemory:
        shape = self._rows, self._config.num_heads, self._config.index_topk, self._num_sms
        key = self._config.device, *shape
        if key not in _memories or not _memories[key].hold(Need.of(rows, *shape)):
            _memories[key] = VerifyMemory.allocate(rows, *shape, self._config.device)
        return _memories[key]


_memories: dict[tuple, VerifyMemory] = {}
"""Kept for all layers and backends of a process, whose forwards run one after the other, and grown where a chunk is larger."""
