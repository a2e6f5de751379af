"""Metadata of a prefill in one launch: a ragged number of new tokens a request, on top of a prefix that may be cached.

With S_r the tokens of request r, a_r the new ones among them and j counting these, row cu_seqlens_q[r] + j attends to
S_r - a_r + j + 1 tokens. The indexer gathers keys request after request, so the window of a row begins at cu_seqlens_k[r].

Grid: blocks of rows, one program for what exists once a request, page tables (as in `metadata`), and blocks of the flattened
slots where they are wanted. A block finds the request of each of its elements by itself, in tiles over all requests, so no
program waits for another one. All fields lie in one tensor, whose layout `PrefillFields` gives.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import check_device, check_pool, check_vector
from nsa_backend.kernels.page_tables import write_flattened_slots, write_request_pages
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.prefill_fields import REQUEST_FIELDS, ROW_FIELDS, PrefillFields, aligned
from nsa_backend.kernels.prefix_sums import requests_passed

BLOCK = 64  # rows or flattened slots of a program
REQUEST_BLOCK = 64
PAGE_BLOCK = 256


@triton.jit
def _kept_before(prefix, count, index_topk):
    """Sum of min(prefix + j + 1, index_topk) over j < count."""
    whole = tl.minimum(tl.maximum(index_topk - prefix, 0), count)
    return whole * prefix + whole * (whole + 1) // 2 + (count - whole) * index_topk


@triton.jit
def _write_rows(
    seq_lens_ptr,
    extend_lens_ptr,
    out_ptr,
    row_stride,
    block,
    num_requests,
    num_rows,
    index_topk,
    BLOCK: tl.constexpr,
    REQUEST_BLOCK: tl.constexpr,
):
    row = block * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    request = tl.zeros_like(row)
    row_begin = tl.zeros_like(row)
    k_start = tl.zeros_like(row)
    kept = tl.zeros_like(row)
    carry = 0
    for start in range(0, num_requests, REQUEST_BLOCK):
        r, real, extend, passed = requests_passed(extend_lens_ptr, row, start, carry, num_requests, REQUEST_BLOCK)
        tokens = tl.load(seq_lens_ptr + r, mask=real, other=0).to(tl.int32)
        request += tl.sum(passed.to(tl.int32), 1)
        row_begin += tl.sum(tl.where(passed, extend[None, :], 0), 1)
        k_start += tl.sum(tl.where(passed, tokens[None, :], 0), 1)
        kept += tl.sum(tl.where(passed, _kept_before(tokens - extend, extend, index_topk)[None, :], 0), 1)
        carry += tl.sum(extend, 0)
    tokens = tl.load(seq_lens_ptr + request, mask=mask, other=0).to(tl.int32)
    prefix = tokens - tl.load(extend_lens_ptr + request, mask=mask, other=0).to(tl.int32)
    count = row - row_begin + 1
    length = prefix + count
    tl.store(out_ptr + row, length, mask=mask)
    tl.store(out_ptr + row_stride + row, tl.minimum(length, index_topk), mask=mask)
    tl.store(out_ptr + 2 * row_stride + row, row, mask=row <= num_rows)
    tl.store(out_ptr + 3 * row_stride + 1 + row, kept + _kept_before(prefix, count, index_topk), mask=mask)
    tl.store(out_ptr + 4 * row_stride + row, request, mask=mask)
    tl.store(out_ptr + 5 * row_stride + row, k_start, mask=mask)
    tl.store(out_ptr + 6 * row_stride + row, k_start + length, mask=mask)


@triton.jit
def _write_requests(
    seq_lens_ptr, extend_lens_ptr, out_ptr, request_stride, kept_ptr, num_requests, REQUEST_BLOCK: tl.constexpr
):
    tl.store(kept_ptr, 0)
    tl.store(out_ptr + request_stride, 0)
    tl.store(out_ptr + 2 * request_stride, 0)
    rows = 0
    keys = 0
    for start in range(0, num_requests, REQUEST_BLOCK):
        r = start + tl.arange(0, REQUEST_BLOCK)
        real = r < num_requests
        tokens = tl.load(seq_lens_ptr + r, mask=real, other=0).to(tl.int32)
        extend = tl.load(extend_lens_ptr + r, mask=real, other=0).to(tl.int32)
        tl.store(out_ptr + r, tokens, mask=real)
        tl.store(out_ptr + request_stride + 1 + r, rows + tl.cumsum(extend, 0), mask=real)
        tl.store(out_ptr + 2 * request_stride + 1 + r, keys + tl.cumsum(tokens, 0), mask=real)
        rows += tl.sum(extend, 0)
        keys += tl.sum(tokens, 0)


# As in `metadata_kernel`.
UNSPECIALIZED = [
    "seq_lens_ptr", "extend_lens_ptr", "req_pool_indices_ptr",
    "num_requests", "num_rows", "row_stride", "request_stride", "pages", "page_blocks", "flattened", "table_offset",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def prefill_kernel(
    seq_lens_ptr,  # int32 | int64 [num_requests], S_r
    extend_lens_ptr,  # int32 | int64 [num_requests], a_r
    req_pool_indices_ptr,  # int32 | int64 [num_requests]
    req_to_token_ptr,  # int32 [pool, req_to_token_stride]
    out_ptr,  # int32, the memory of PrefillFields
    req_to_token_stride,
    num_requests,
    num_rows,
    row_stride,
    request_stride,
    pages,
    page_blocks,
    flattened,
    table_offset,
    index_topk,
    ROW_FIELDS: tl.constexpr,
    REQUEST_FIELDS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUEST_BLOCK: tl.constexpr,
    PAGE_BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row_blocks = num_rows // BLOCK + 1  # nsa_cu_seqlens_q has one row more
    of_requests = out_ptr + ROW_FIELDS * row_stride
    table = of_requests + REQUEST_FIELDS * request_stride
    if program < row_blocks:
        _write_rows(
            seq_lens_ptr, extend_lens_ptr, out_ptr, row_stride, program, num_requests, num_rows, index_topk,
            BLOCK=BLOCK, REQUEST_BLOCK=REQUEST_BLOCK,
        )  # fmt: skip
    elif program == row_blocks:
        _write_requests(
            seq_lens_ptr, extend_lens_ptr, of_requests, request_stride, out_ptr + 3 * row_stride, num_requests,
            REQUEST_BLOCK=REQUEST_BLOCK,
        )  # fmt: skip
    elif program <= row_blocks + num_requests * page_blocks:
        copied = program - row_blocks - 1
        write_request_pages(
            seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, req_to_token_stride, table,
            copied // page_blocks, copied % page_blocks, pages, PAGE=PAGE, PAGE_BLOCK=PAGE_BLOCK,
        )  # fmt: skip
    else:
        write_flattened_slots(
            seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, req_to_token_stride, table + table_offset,
            program - row_blocks - 1 - num_requests * page_blocks, num_requests, flattened,
            BLOCK=BLOCK, REQUEST_BLOCK=REQUEST_BLOCK,
        )  # fmt: skip


def write_prefill(
    inputs: BatchInputs,
    *,
    req_to_token: torch.Tensor,
    index_topk: int,
    num_rows: int,
    longest: int,
    flattened: int = 0,
) -> PrefillFields:
    """All fields of one prefill; one allocation and one launch, no synchronisation.

    Args:
        inputs: `seq_lens` counts prefix and new tokens of each request, `extend_lens` the new ones.
        req_to_token: int32 [pool, width], rows contiguous; KV slot of every token.
        index_topk: tokens the sparse attention keeps.
        num_rows: sum of `inputs.extend_lens`, from the host.
        longest: largest of `inputs.seq_lens`, from the host; at most the width of `req_to_token`.
        flattened: sum of `inputs.seq_lens`, from the host, where the flattened slots are wanted, else 0.

    Raises:
        ValueError: a tensor has another shape, dtype, device or layout.
    """
    requests, pages = inputs.seq_lens.shape[0], blocks(longest, PAGE_SIZE)
    for name in ("seq_lens", "extend_lens", "req_pool_indices"):
        tensor = getattr(inputs, name)
        check_vector(name, tensor, requests)
        check_device(name, tensor, "req_to_token", req_to_token.device)
    check_pool(req_to_token)
    if longest > req_to_token.shape[1]:
        raise ValueError(
            f"longest is {longest} and a row of req_to_token holds {req_to_token.shape[1]} tokens: it would be read past"
        )
    fields = PrefillFields.allocate(requests, num_rows, pages, flattened, req_to_token.device)
    page_blocks = blocks(pages, PAGE_BLOCK)
    grid = num_rows // BLOCK + 2 + requests * page_blocks + blocks(flattened, BLOCK)
    prefill_kernel[(grid,)](
        inputs.seq_lens,
        inputs.extend_lens,
        inputs.req_pool_indices,
        req_to_token,
        fields.memory,
        req_to_token.stride(0),
        requests,
        num_rows,
        aligned(num_rows + 1),
        aligned(requests + 1),
        pages,
        page_blocks,
        flattened,
        aligned(requests * pages),
        index_topk,
        ROW_FIELDS=ROW_FIELDS,
        REQUEST_FIELDS=REQUEST_FIELDS,
        PAGE=PAGE_SIZE,
        BLOCK=BLOCK,
        REQUEST_BLOCK=REQUEST_BLOCK,
        PAGE_BLOCK=PAGE_BLOCK,
    )
    return fields
