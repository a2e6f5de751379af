"""Top-k over the indexer's logits: SGLang's kernels on a GPU, torch elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.topk_slots import topk_slots
from nsa_backend.metadata.views import NSAMetadata


class TopK(ABC):
    """Select the best positions of each row of logits.

    Row i of `logits` [rows, width] counts from column row_starts[i] (0 where None) for lengths[i] columns; what lies outside
    is uninitialised memory, never read as a score. `positions` and `slots` return int32 [rows, topk], -1 past the end of a
    short row.
    """

    @abstractmethod
    def prepare(self, lengths: torch.Tensor) -> None:
        """Called before the layers of a prefill with `lengths` int32 [rows] of all of its rows."""

    @abstractmethod
    def positions(
        self,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        row_starts: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Positions relative to the row's start; with `offsets` int32 [rows] added where given, rows of a ragged KV tensor.

        What is returned may be `out`, int32 [rows, topk] and contiguous.
        """

    def slots(self, logits: torch.Tensor, lengths: torch.Tensor, topk: int, metadata: NSAMetadata) -> torch.Tensor:
        """KV slots of those positions, where every query row has a row of `metadata`'s page table."""
        return slots_of(self.positions(logits, lengths, topk), metadata)


def slots_of(
    positions: torch.Tensor,
    metadata: NSAMetadata,
    table_rows: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What attention reads for `positions`, int32 [rows, topk]: KV slots, or rows of the ragged KV where there is one.

    `table_rows` [rows] are rows of the page table, those of the whole forward where None. What is returned may be `out`.
    """
    if metadata.topk_indices_offset is not None:
        return torch.where(positions < 0, -1, positions + metadata.topk_indices_offset[: positions.shape[0], None])
    table_rows = metadata.table_rows if table_rows is None else table_rows
    return topk_slots(positions, metadata.real_page_table, table_rows, PAGE_SIZE, out)


def choose_topk(device: torch.device) -> TopK:
    """What the installed SGLang selects with on `device`."""
    if device.type != "cuda":
        return TorchTopK()
    v2 = adapter.topk_v2()
    return SglTopK() if v2 is None else PagedTopK(*v2)


class SglTopK(TopK):
    """sgl_kernel's fast_topk kernels, built for topk = 2048; the fused one reads a table of one column a token."""

    def __init__(self) -> None:
        from sgl_kernel import fast_topk_transform_fused, fast_topk_transform_ragged_fused, fast_topk_v2

        self._fast_topk, self._fused, self._ragged = fast_topk_v2, fast_topk_transform_fused, fast_topk_transform_ragged_fused

    def prepare(self, lengths):
        """Nothing."""

    def positions(self, logits, lengths, topk, row_starts=None, offsets=None, out=None):
        if offsets is None:
            return self._fast_topk(logits, lengths, topk, row_starts=row_starts)
        return self._ragged(score=logits, lengths=lengths, topk_indices_offset=offsets, topk=topk, row_starts=row_starts)

    def slots(self, logits, lengths, topk, metadata):
        if metadata.page_table_1 is None:
            return super().slots(logits, lengths, topk, metadata)
        # The kernel finds the table row of a query row through cu_seqlens_q, so the table need not be repeated for every
        # draft token.
        return self._fused(
            score=logits,
            lengths=lengths,
            page_table_size_1=metadata.page_table_1,
            cu_seqlens_q=metadata.cu_seqlens_q,
            topk=topk,
        )


class PagedTopK(SglTopK):
    """SGLang's top-k v2 kernel, which reads the table of 64-token pages; its ragged form where the release has it."""

    def __init__(self, paged: Callable, windowed: Callable | None) -> None:
        super().__init__()
        self._paged, self._windowed = paged, windowed
        self._zeros: torch.Tensor | None = None

    def prepare(self, lengths):
        """Zeros that `positions` adds; its kernel reads them before it waits for the one ahead, which must not write them."""
        if self._windowed is not None:
            self._no_offsets(lengths)

    def positions(self, logits, lengths, topk, row_starts=None, offsets=None, out=None):
        if self._windowed is None or row_starts is None:
            return super().positions(logits, lengths, topk, row_starts, offsets)
        out = logits.new_empty((logits.shape[0], topk), dtype=torch.int32) if out is None else out
        added = self._no_offsets(lengths) if offsets is None else offsets
        self._windowed(logits, lengths, out_offsets=added, out_indices=out, row_starts=row_starts)
        return out

    def slots(self, logits, lengths, topk, metadata):
        out = logits.new_empty((logits.shape[0], topk), dtype=torch.int32)
        self._paged(logits, lengths, metadata.real_page_table, out, PAGE_SIZE, metadata.topk_plan)
        return out

    def _no_offsets(self, lengths: torch.Tensor) -> torch.Tensor:
        rows = lengths.shape[0]
        if self._zeros is None or self._zeros.shape[0] < rows:
            self._zeros = torch.zeros(rows, dtype=torch.int32, device=lengths.device)
        return self._zeros[:rows]


class TorchTopK(TopK):
    """The same in torch, for any topk; `slots` goes through the kernel of the unfused transform."""

    def prepare(self, lengths):
        """Nothing."""

    def positions(self, logits, lengths, topk, row_starts=None, offsets=None, out=None):
        columns = torch.arange(logits.shape[1], device=logits.device)
        starts = torch.zeros_like(lengths) if row_starts is None else row_starts
        valid = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
        scores = torch.where(valid, logits, float("-inf"))
        width = min(topk, logits.shape[1])
        best, index = torch.topk(scores, width, dim=1)
        index = torch.where(torch.isneginf(best), -1, index - starts[:, None])
        found = torch.nn.functional.pad(index, (0, topk - width), value=-1).to(torch.int32)
        return found if offsets is None else torch.where(found < 0, -1, found + offsets[:, None])
