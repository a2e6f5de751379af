"""The tensors one metadata launch writes: replay buffers of a captured graph, or fresh ones for an eager forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.plan import PAGE_SIZE, MetadataPlan

PAGES_MULTIPLE = 4
"""Entries of a page-table row come in multiples of this, so that every row begins at 16 bytes."""


@dataclass(frozen=True)
class MetadataBuffers:
    """Storage for up to `max_requests` requests, `max_rows` query rows and `num_steps` draft steps.

    Lengths, prefix sums and schedules exist once a step; page tables once for all steps, because the columns of a request
    are the same for every step. A captured graph holds these addresses: they are written in place, never replaced.
    """

    cache_seqlens: torch.Tensor  # int32 [num_steps, max_requests]
    cu_seqlens_k: torch.Tensor  # int32 [num_steps, max_requests + 1], exclusive prefix sum of cache_seqlens
    seqlens_expanded: torch.Tensor  # int32 [num_steps, max_rows], len of each row; is cache_seqlens where rows are requests
    nsa_cache_seqlens: torch.Tensor  # int32 [num_steps, max_rows], min(len, index_topk)
    nsa_cu_seqlens_k: torch.Tensor  # int32 [num_steps, max_rows + 1], exclusive prefix sum of nsa_cache_seqlens
    schedule: torch.Tensor | None  # int32 [num_steps, num_sms + 1, 2], DeepGEMM's paged-MQA schedule; None without DeepGEMM
    topk_plan: torch.Tensor | None  # int32 [num_steps, max_rows + 1, 2], work list of SGLang's top-k v2 kernel; None without it
    page_table_1: torch.Tensor | None  # int32 [max_requests, pages * 64], slot of every token; None where nothing reads it
    real_page_table: torch.Tensor  # int32 [max_rows, pages], page of every 64 tokens
    cu_seqlens_q: torch.Tensor  # int32 [max_requests + 1], rows before each request
    token_to_batch_idx: torch.Tensor  # int32 [max_rows], request of each row
    arange: torch.Tensor  # int32 [max_rows + 1], 0, 1, 2, ...: nsa_cu_seqlens_q

    @classmethod
    def allocate(
        cls,
        plan: MetadataPlan,
        *,
        table_width: int,
        num_sms: int,
        device: torch.device | str,
        wide: bool,
        planned: bool,
        new_table: Callable[[str, int, int], torch.Tensor] | None = None,
    ) -> MetadataBuffers:
        """Room for `plan` and for every plan of the same mode with fewer requests.

        Args:
            plan: the largest plan to serve.
            table_width: tokens that a row of the page tables must reach.
            num_sms: SMs that DeepGEMM schedules for; 0 where no schedule is wanted.
            device: where to allocate.
            wide: whether the top-k reads page_table_1, one column a token.
            planned: whether the top-k reads a plan.
            new_table: from a table's name, rows and columns to its int32 memory, zeros when new, where page tables are shared
                with other buffers; None for tables of one's own.

        Raises:
            ValueError: the page table would have 2**31 entries or more, 8 GiB, which offsets of 32 bits do not reach.
        """
        steps, requests, rows = plan.num_steps, plan.num_requests, plan.num_rows
        pages = blocks(table_width, PAGE_SIZE * PAGES_MULTIPLE) * PAGES_MULTIPLE
        if rows * pages >= 2**31:
            raise ValueError(
                f"a page table of {rows} rows of {pages} pages has more entries than the kernel reaches: serve fewer requests "
                "or draft tokens at a time, or a shorter context"
            )

        def int32(*shape: int, fill: int = 0) -> torch.Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        def table(name: str, *shape: int) -> torch.Tensor:
            return int32(*shape) if new_table is None else new_table(name, *shape)

        cache_seqlens = int32(steps, requests, fill=1)
        rows_are_requests = not plan.expanded
        arange = torch.arange(rows + 1, dtype=torch.int32, device=device)
        return cls(
            cache_seqlens=cache_seqlens,
            cu_seqlens_k=int32(steps, requests + 1),
            seqlens_expanded=cache_seqlens if rows_are_requests else int32(steps, rows, fill=1),
            nsa_cache_seqlens=int32(steps, rows, fill=1),
            nsa_cu_seqlens_k=int32(steps, rows + 1),
            schedule=int32(steps, num_sms + 1, 2) if num_sms else None,
            topk_plan=int32(steps, rows + 1, 2) if planned else None,
            page_table_1=table("page_table_1", requests, pages * PAGE_SIZE) if wide else None,
            real_page_table=table("real_page_table", rows, pages),
            cu_seqlens_q=(
                int32(requests + 1) if plan.ragged else arange[:: plan.rows_per_request][: requests + 1].contiguous()
            ),
            token_to_batch_idx=(
                int32(rows) if plan.ragged else torch.div(arange[:rows], plan.rows_per_request, rounding_mode="floor")
            ),
            arange=arange,
        )

    @property
    def table_width(self) -> int:
        """Tokens that a row of the page tables holds."""
        return PAGE_SIZE * self.real_page_table.shape[1]
