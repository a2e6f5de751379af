"""Top-k of the indexer's logits: sgl-kernel's radix select on a GPU, torch elsewhere."""

from __future__ import annotations

from typing import Protocol

import torch

from nsa_backend.kernels.topk_slots import topk_slots
from nsa_backend.metadata import NSAMetadata


class TopK(Protocol):
    """Select the best positions of each row of logits.

    Row i of `logits` [rows, width] counts from column row_starts[i] (0 where None) for lengths[i] columns; what lies outside
    is uninitialised memory and never read.
    """

    def positions(
        self, logits: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None
    ) -> torch.Tensor:
        """int32 [rows, topk], positions relative to the row's start, -1 past the end of a short row."""
        ...

    def slots(
        self,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        row_starts: torch.Tensor | None,
        metadata: NSAMetadata,
    ) -> torch.Tensor:
        """int32 [rows, topk], KV slots of those positions, from the page table of `metadata`."""
        ...


class SglTopK:
    """sgl_kernel's fast_topk kernels, built for topk = 2048."""

    def __init__(self) -> None:
        from sgl_kernel import fast_topk_transform_fused, fast_topk_v2

        self._fast_topk, self._fused = fast_topk_v2, fast_topk_transform_fused

    def positions(
        self, logits: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None
    ) -> torch.Tensor:
        return self._fast_topk(logits, lengths, topk, row_starts=row_starts)

    def slots(
        self,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        row_starts: torch.Tensor | None,
        metadata: NSAMetadata,
    ) -> torch.Tensor:
        # The kernel finds the table row of a query row through cu_seqlens_q, so the table need not be repeated for every
        # draft token.
        return self._fused(
            score=logits,
            lengths=lengths,
            page_table_size_1=metadata.page_table_1,
            cu_seqlens_q=metadata.cu_seqlens_q,
            topk=topk,
            row_starts=row_starts,
        )


class TorchTopK:
    """The same in torch, for any topk; `slots` goes through the kernel of the unfused transform."""

    def positions(
        self, logits: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None
    ) -> torch.Tensor:
        columns = torch.arange(logits.shape[1], device=logits.device)
        starts = torch.zeros_like(lengths) if row_starts is None else row_starts
        valid = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
        scores = torch.where(valid, logits, float("-inf"))
        width = min(topk, logits.shape[1])
        best, index = torch.topk(scores, width, dim=1)
        index = torch.where(torch.isneginf(best), -1, index - starts[:, None])
        return torch.nn.functional.pad(index, (0, topk - width), value=-1).to(torch.int32)

    def slots(
        self,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        row_starts: torch.Tensor | None,
        metadata: NSAMetadata,
    ) -> torch.Tensor:
        positions = self.positions(logits, lengths, topk, row_starts)
        return topk_slots(positions, metadata.page_table_1, metadata.token_to_batch_idx)
