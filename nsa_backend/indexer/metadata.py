"""The metadata of a forward behind the interface of SGLang's indexer, and the transform of its top-k."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.indexer.topk import TopK, slots_of
from nsa_backend.metadata.views import NSAMetadata, Rows, rows_of


@dataclass(eq=False)
class LongRows:
    """Rows of a prefill that have more tokens than are selected, and the others, which select all of theirs."""

    long: Rows
    short: Rows
    count: int  # of long ones
    ranks: int  # that divide them
    own: Rows  # every ranks-th of them
    metadata: IndexerMetadata  # of those
    selected: torch.Tensor  # int32 [short rows, topk], as `topk_transform` returns them

    @property
    def own_count(self) -> int:
        return len(self.metadata.get_seqlens_expanded())

    def room(self, out: torch.Tensor) -> torch.Tensor:
        """For selections of the long rows: their part of `out`, int32 [rows, topk], where they lie together."""
        return out[self.long] if isinstance(self.long, slice) else out.new_empty(self.count, out.shape[1])

    def put(self, of_long: torch.Tensor, out: torch.Tensor) -> None:
        """Write what `room` gave, and selections of the short rows, to `out`."""
        if not isinstance(self.long, slice):
            out.index_copy_(0, self.long, of_long)
        if isinstance(self.short, slice):
            out[self.short] = self.selected
        else:
            out.index_copy_(0, self.short, self.selected)


@dataclass(eq=False)
class IndexerMetadata(adapter.BaseIndexerMetadata):
    """Metadata of one forward behind the interface of SGLang's `Indexer`, and its top-k transform."""

    attn_metadata: NSAMetadata
    selector: TopK
    fuse_topk: bool  # whether `topk_transform` returns what attention reads, or token positions
    is_part: bool = False  # of some rows of a prefill

    force_unfused_topk: ClassVar[bool] = False  # of ROCm
    _all_tokens: torch.Tensor | None = field(default=None, init=False)
    _of_rows: dict[tuple[int, int, int], IndexerMetadata] = field(default_factory=dict, init=False)
    _long_rows: dict[tuple[int, int, int], LongRows | None] = field(default_factory=dict, init=False)
    _room: torch.Tensor | None = field(default=None, init=False)  # for selections to come

    @property
    def paged_mqa_schedule_metadata(self) -> torch.Tensor | None:
        return self.attn_metadata.paged_mqa_schedule_metadata

    @property
    def paged_mqa_ctx_lens_2d(self) -> torch.Tensor | None:
        """int32 [rows / next_n, next_n], lengths of rows that DeepGEMM takes together.

        None where it takes one: SGLang's indexer then makes the [rows, 1] view itself.
        """
        metadata = self.attn_metadata
        return metadata.nsa_seqlens_expanded.view(-1, metadata.next_n) if metadata.next_n > 1 else None

    def get_seqlens_int32(self) -> torch.Tensor:
        """int32 [requests]; or of the groups of rows that DeepGEMM takes together: their number tells SGLang's indexer so."""
        metadata = self.attn_metadata
        if metadata.next_n > 1:
            return metadata.nsa_seqlens_expanded[metadata.next_n - 1 :: metadata.next_n]
        return metadata.cache_seqlens_int32

    def get_page_table_64(self) -> torch.Tensor:
        return self.attn_metadata.real_page_table

    def get_page_table_1(self) -> torch.Tensor | None:
        return self.attn_metadata.page_table_1

    def get_seqlens_expanded(self) -> torch.Tensor:
        return self.attn_metadata.nsa_seqlens_expanded

    def get_indexer_kvcache_range(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.attn_metadata.indexer_k_start_end

    def get_indexer_seq_len(self) -> torch.Tensor | None:
        return self.attn_metadata.indexer_seq_lens

    def get_indexer_seq_len_cpu(self) -> torch.Tensor | None:
        return self.attn_metadata.indexer_seq_lens_cpu

    def get_nsa_extend_len_cpu(self) -> list[int]:
        return self.attn_metadata.nsa_extend_seq_lens_list

    get_dsa_extend_len_cpu = get_nsa_extend_len_cpu  # its name from SGLang 0.5.13 on

    def of_rows(self, rows: slice) -> IndexerMetadata:
        """The same of every rows.step-th row of a prefill, whose keys are those of all; made once a forward."""
        key = rows.start, rows.stop, rows.step
        if key not in self._of_rows:
            self._of_rows[key] = self._part(rows)
        return self._of_rows[key]

    def _part(self, rows: Rows) -> IndexerMetadata:
        return IndexerMetadata(rows_of(self.attn_metadata, rows), self.selector, self.fuse_topk, is_part=True)

    def long_rows(self, topk: int, rank: int = 0, ranks: int = 1) -> LongRows | None:
        """Of a prefill, rows with more than `topk` tokens, which `ranks` divide; None where all have, or none.

        Made once a forward.
        """
        key = topk, rank, ranks
        if key not in self._long_rows:
            self._long_rows[key] = self._find_long_rows(*key)
        return self._long_rows[key]

    def _find_long_rows(self, topk: int, rank: int, ranks: int) -> LongRows | None:
        metadata, begin = self.attn_metadata, 0
        spans: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # by whether they are long
        for new, length in zip(metadata.nsa_extend_seq_lens_list, metadata.indexer_seq_lens_cpu.tolist(), strict=True):
            short = min(max(topk - (length - new), 0), new)
            spans[False].append((begin, begin + short))
            spans[True].append((begin + short, begin + new))
            begin += new
        rows = {is_long: joined(of_kind, metadata.nsa_seqlens_expanded.device) for is_long, of_kind in spans.items()}
        if None in rows.values():
            return None
        long, short = rows[True], rows[False]
        whole, count = isinstance(long, slice), sum(stop - start for start, stop in spans[True])
        own = slice(long.start + rank, long.stop, ranks) if whole else long[rank::ranks].contiguous()
        return LongRows(long, short, count, ranks, own, self._part(own), self._part(short).every_token(topk))

    def get_token_to_batch_idx(self) -> torch.Tensor:
        return self.attn_metadata.token_to_batch_idx

    @contextmanager
    def writing(self, out: torch.Tensor) -> Iterator[None]:
        """Selections that are made meanwhile are written to the rows of `out` [rows, topk], where SGLang copies them in turn.

        A copy of what lies there already is none.
        """
        self._room = out
        try:
            yield
        finally:
            self._room = None

    def _next_room(self, rows: int, topk: int) -> torch.Tensor | None:
        """int32 [rows, topk] of what `writing` was given, behind what was taken before; or None."""
        if self._room is None:
            return None
        room, self._room = self._room[:rows], self._room[rows:]
        return room if room.shape == (rows, topk) and room.dtype == torch.int32 and room.is_contiguous() else None

    def topk_transform(
        self,
        logits: torch.Tensor,
        topk: int,
        ks: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        ke_offset: torch.Tensor | None = None,
        batch_idx_list: torch.Tensor | None = None,
        topk_indices_offset_override: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Best tokens of each row: what attention reads where the transform is fused, positions where it is not.

        Attention reads KV slots, or rows of the ragged KV in a prefill on dequantised KV.

        Args:
            logits: float32 [rows, width]. In a prefill the columns before a row's window may be overwritten.
            topk: tokens to keep.
            ks: int32 [rows], first column of each row (prefill). A prefill without it has rows so short that all of their
                tokens are kept, and SGLang's indexer computed no logits.
            cu_seqlens_q: not used: it describes rows by `batch_idx_list` in another way.
            ke_offset: int32 [rows], row lengths of a chunk of a prefill; the whole batch's where None.
            batch_idx_list: [rows], requests of the rows of that chunk.
            topk_indices_offset_override: int32 [rows], what to add to positions for a chunk of a prefill on dequantised KV.

        Returns:
            int32 [rows, topk], -1 past the end of a short row.
        """
        metadata = self.attn_metadata
        lengths = metadata.nsa_seqlens_expanded if ke_offset is None else ke_offset
        if ks is None and metadata.indexer_k_start_end is not None:
            return self._every_token(topk)
        out = self._next_room(len(logits), topk)
        if not self.fuse_topk:
            return self.selector.positions(logits, lengths, topk, ks, out=out)
        if ks is None:
            return self.selector.slots(logits, lengths, topk, metadata)
        offsets = metadata.topk_indices_offset if topk_indices_offset_override is None else topk_indices_offset_override
        if offsets is not None:
            return self.selector.positions(logits, lengths, topk, ks, offsets, out)
        # One table row a token would have to be gathered for a fused kernel.
        return slots_of(self.selector.positions(logits, lengths, topk, ks), metadata, batch_idx_list, out)

    def _every_token(self, topk: int) -> torch.Tensor:
        """The same for every layer, so made once a forward."""
        if self._all_tokens is None:
            self._all_tokens = self.every_token(topk)
        return self._all_tokens

    def every_token(self, topk: int) -> torch.Tensor:
        """All tokens of rows that have no more than `topk`, as `topk_transform` returns them."""
        lengths = self.attn_metadata.nsa_seqlens_expanded
        column = torch.arange(topk, dtype=torch.int32, device=lengths.device)
        positions = torch.where(column < lengths[:, None], column, -1)
        return slots_of(positions, self.attn_metadata) if self.fuse_topk else positions


def joined(spans: list[tuple[int, int]], device: torch.device) -> Rows | None:
    """Rows of spans [start, stop) in order: a slice where they are one, None where there are none."""
    spans = [span for span in spans if span[0] < span[1]]
    if not spans:
        return None
    if all(before[1] == after[0] for before, after in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1], 1)
    return torch.cat([torch.arange(*span) for span in spans]).to(device, non_blocking=True)
