"""The torch twin of `metadata.write_metadata`: the same fields, into the same buffers, by the formulas of `plan`.

It is what the kernel is compared with, field by field and exactly. It allocates and, for ragged rows, synchronises.
"""

from __future__ import annotations

import torch

from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.plan import PAGE_SIZE, SCHEDULE_SPLIT_KV, MetadataPlan
from nsa_backend.kernels.prefix_sums import exclusive_sum
from nsa_backend.kernels.topk_plan import CAPS, MAX_ROWS, THRESHOLDS


def write_metadata_torch(
    plan: MetadataPlan,
    buffers: MetadataBuffers,
    inputs: BatchInputs,
    *,
    req_to_token: torch.Tensor,
    index_topk: int,
    surplus_last: bool = False,
) -> None:
    """Write every field of `plan` into `buffers`; arguments as `metadata.write_metadata` takes them."""
    requests, rows = plan.num_requests, plan.num_rows
    max_len = min(req_to_token.shape[1], buffers.table_width)
    seq_lens, extend_lens = inputs.seq_lens.long(), inputs.extend_lens
    request_of_row, base_len = _rows(plan, seq_lens, extend_lens)
    if plan.ragged:
        buffers.token_to_batch_idx[:rows] = request_of_row
        buffers.cu_seqlens_q[: requests + 1] = exclusive_sum(extend_lens)
        buffers.cu_seqlens_q[requests] = rows

    for step in range(plan.num_steps):
        cache_seqlens = (seq_lens + plan.cache_offset + step).clamp(1, max_len)
        lens = (base_len + step).clamp(1, max_len)
        clipped = lens.clamp(max=index_topk)
        buffers.cache_seqlens[step, :requests] = cache_seqlens
        buffers.cu_seqlens_k[step, : requests + 1] = exclusive_sum(cache_seqlens)
        buffers.seqlens_expanded[step, :rows] = lens
        buffers.nsa_cache_seqlens[step, :rows] = clipped
        buffers.nsa_cu_seqlens_k[step, : rows + 1] = exclusive_sum(clipped)
        if buffers.schedule is not None:
            buffers.schedule[step] = paged_mqa_schedule(
                lens[plan.next_n - 1 :: plan.next_n], buffers.schedule.shape[1] - 1, surplus_last
            )
        if buffers.topk_plan is not None and rows <= MAX_ROWS:
            listed = topk_plan(lens)
            buffers.topk_plan[step, : len(listed)] = listed

    table_lens = (seq_lens + plan.table_offset).clamp(1, max_len)
    for request in range(requests):
        length = int(table_lens[request])
        slots = req_to_token[int(inputs.req_pool_indices[request]), :length]
        if buffers.page_table_1 is not None:
            buffers.page_table_1[request, :length] = slots
        pages = torch.div(slots[::PAGE_SIZE], PAGE_SIZE, rounding_mode="floor")
        buffers.real_page_table[:rows][request_of_row == request, : pages.shape[0]] = pages


def paged_mqa_schedule(lens: torch.Tensor, num_sms: int, surplus_last: bool = False) -> torch.Tensor:
    """DeepGEMM's schedule, int32 [num_sms + 1, 2], of rows with lengths `lens` [num_rows].

    Row m is (query row, split) where SM m starts; `nsa_backend.kernels.schedule` has the rule and its two releases.
    """
    ends = torch.cumsum((lens.long() + SCHEDULE_SPLIT_KV - 1) // SCHEDULE_SPLIT_KV, 0)
    total = int(ends[-1]) if len(ends) else 0
    sm = torch.arange(num_sms + 1, device=lens.device)
    surplus = total % num_sms
    extra = (sm - (num_sms - surplus)).clamp(min=0) if surplus_last else sm.clamp(max=surplus)
    first = sm * (total // num_sms) + extra
    row = torch.searchsorted(ends, first, right=True)
    padded = torch.cat([ends.new_zeros(1), ends])
    return torch.stack([row, first - padded[row]], dim=1).to(torch.int32)


def topk_plan(lens: torch.Tensor) -> torch.Tensor:
    """The plan of SGLang's top-k v2 kernel, int32 [1 + listed rows, 2]; `nsa_backend.kernels.topk_plan` has the rule."""
    threshold = THRESHOLDS[-1]
    for candidate, cap in zip(reversed(THRESHOLDS), reversed(CAPS), strict=True):
        if int((lens > candidate).sum()) > cap:
            break
        threshold = candidate
    rows = torch.nonzero(lens > threshold).flatten()
    head = torch.tensor([[threshold, len(rows)]], device=lens.device)
    return torch.cat([head, torch.stack([rows, lens[rows].long()], dim=1)]).to(torch.int32)


def _rows(plan: MetadataPlan, seq_lens: torch.Tensor, extend_lens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Request of every row, and its length at step 0 before clamping."""
    row = torch.arange(plan.num_rows, device=seq_lens.device)
    if not plan.ragged:
        request = row // plan.rows_per_request
        return request, seq_lens[request] + plan.row_offset + row % plan.rows_per_request
    ends = torch.cumsum(extend_lens.long(), 0)
    request = torch.searchsorted(ends, row, right=True)
    past = request >= plan.num_requests
    request = request.clamp(max=plan.num_requests - 1)
    return request, torch.where(past, 1, seq_lens[request] + 1 + row - ends[request])
