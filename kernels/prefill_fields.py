"""The tensors that one prefill launch writes, as views of one allocation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nsa_backend.kernels.prefix_sums import exclusive_sum

ROW_FIELDS = 7
REQUEST_FIELDS = 3
ALIGNMENT = 64  # int32 values; every field begins at a multiple of 256 bytes


@dataclass(frozen=True)
class PrefillFields:
    """Views of what one launch writes; int32."""

    memory: torch.Tensor  # all of them
    cache_seqlens: torch.Tensor  # [requests], S_r
    cu_seqlens_q: torch.Tensor  # [requests + 1], exclusive prefix sum of a_r
    cu_seqlens_k: torch.Tensor  # [requests + 1], exclusive prefix sum of S_r
    seqlens_expanded: torch.Tensor  # [rows], tokens that a row attends to
    nsa_cache_seqlens: torch.Tensor  # [rows], min(seqlens_expanded, index_topk)
    nsa_cu_seqlens_q: torch.Tensor  # [rows + 1], 0, 1, 2, ...
    nsa_cu_seqlens_k: torch.Tensor  # [rows + 1], exclusive prefix sum of nsa_cache_seqlens
    token_to_batch_idx: torch.Tensor  # [rows], request of each row
    k_start: torch.Tensor  # [rows], cu_seqlens_k of the row's request
    k_end: torch.Tensor  # [rows], k_start + seqlens_expanded
    real_page_table: torch.Tensor  # [requests, pages], page of every 64 tokens, 0 past the end of a request
    flattened_slots: torch.Tensor | None  # [sum of S_r], slots of all tokens, request after request

    @classmethod
    def allocate(cls, requests: int, rows: int, pages: int, flattened: int, device: torch.device) -> PrefillFields:
        """Uninitialised fields in one tensor; `flattened` is 0 where the flattened slots are not wanted."""
        row_stride, request_stride = aligned(rows + 1), aligned(requests + 1)
        sizes = [ROW_FIELDS * row_stride, REQUEST_FIELDS * request_stride, aligned(requests * pages), flattened]
        memory = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        of_rows, of_requests, table, slots = memory.split(sizes)
        lens, clipped, ones, kept, owner, start, end = of_rows.view(ROW_FIELDS, row_stride).unbind()
        tokens, cu_q, cu_k = of_requests.view(REQUEST_FIELDS, request_stride)[:, : requests + 1].unbind()
        return cls(
            memory=memory,
            cache_seqlens=tokens[:requests],
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            seqlens_expanded=lens[:rows],
            nsa_cache_seqlens=clipped[:rows],
            nsa_cu_seqlens_q=ones[: rows + 1],
            nsa_cu_seqlens_k=kept[: rows + 1],
            token_to_batch_idx=owner[:rows],
            k_start=start[:rows],
            k_end=end[:rows],
            real_page_table=table[: requests * pages].view(requests, pages),
            flattened_slots=slots if flattened else None,
        )

    def of_rows(self, rows: slice) -> PrefillFields:
        """The same batch where some of its rows alone are computed: fields of these, in memory of their own.

        Requests and pages stay as they are, those of a request without such a row among them: windows of keys count them all.

        Args:
            rows: every `step`-th row from `start` on, which is less than `step`.
        """
        per_row = (self.seqlens_expanded, self.nsa_cache_seqlens, self.token_to_batch_idx, self.k_start, self.k_end)
        lens, clipped, owner, start, end = (field[rows].contiguous() for field in per_row)
        return replace(
            self,
            cu_seqlens_q=rows_before(self.cu_seqlens_q, rows),
            seqlens_expanded=lens,
            nsa_cache_seqlens=clipped,
            nsa_cu_seqlens_q=self.nsa_cu_seqlens_q[: len(lens) + 1],
            nsa_cu_seqlens_k=exclusive_sum(clipped),
            token_to_batch_idx=owner,
            k_start=start,
            k_end=end,
        )


def rows_before(row: int | torch.Tensor, rows: slice) -> int | torch.Tensor:
    """How many of `rows`, every `step`-th from `start` on, lie before each row of all."""
    return (row + (rows.step - 1 - rows.start)) // rows.step


def aligned(count: int) -> int:
    """`count` rounded up, so that the field after it is aligned."""
    return -(-count // ALIGNMENT) * ALIGNMENT
