"""Device functions that copy page tables, and slots in ragged order, from the request-to-token pool."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend.kernels.lengths import clip_length
from nsa_backend.kernels.prefix_sums import requests_passed


@triton.jit
def _count_rows_before(extend_lens_ptr, request, BLOCK: tl.constexpr):
    rows = 0
    for start in range(0, request, BLOCK):
        r = start + tl.arange(0, BLOCK)
        rows += tl.sum(tl.load(extend_lens_ptr + r, mask=r < request, other=0).to(tl.int32), 0)
    return rows


@triton.jit
def copy_page_tables(
    request,
    split,
    splits,
    seq_lens_ptr,
    req_pool_indices_ptr,  # int32 | int64 [num_requests]
    req_to_token_ptr,  # int32 [pool, table_width]
    req_to_token_stride,
    extend_lens_ptr,
    page_table_1_ptr,  # int32 [num_requests, page_table_1_stride], not written where WIDE is False
    page_table_1_stride,
    real_page_table_ptr,  # int32 [num_rows, real_page_table_stride]
    real_page_table_stride,
    num_requests,
    num_rows,
    table_offset,
    max_len,
    ROWS_PER_REQUEST: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Copy the page tables of one request, as one of `splits` programs that take turns at pieces of PIECE pages.

    A program asks for the COLUMN_BLOCK tokens of several pieces at once. Turns leave no program with many of them while others
    have none, however long the request is.
    """
    PAGES: tl.constexpr = COLUMN_BLOCK // PAGE
    table_len = tl.load(seq_lens_ptr + request).to(tl.int32) + table_offset
    table_len = clip_length(table_len, max_len)
    slot = tl.load(req_pool_indices_ptr + request).to(tl.int64)
    # A slot is never negative. As the exit of programs without a column asks for it, its load is issued beside that of the
    # length; the compiler moves it behind the exit otherwise, where it is one wait more before the first column.
    table_len = tl.where(slot >= 0, table_len, 0)
    source_ptr = req_to_token_ptr + slot * req_to_token_stride
    target_ptr = page_table_1_ptr + request.to(tl.int64) * page_table_1_stride
    if ROWS_PER_REQUEST == 0:
        row_begin = _count_rows_before(extend_lens_ptr, request, ROW_BLOCK)
        row_end = row_begin + tl.load(extend_lens_ptr + request).to(tl.int32)
        row_end = tl.where(request == num_requests - 1, num_rows, row_end)
    else:
        row_begin = request * ROWS_PER_REQUEST
        row_end = row_begin + ROWS_PER_REQUEST
    place = tl.arange(0, PAGES)
    turns = place // PIECE * splits * PIECE + place % PIECE
    for first in range(split * PIECE, tl.cdiv(table_len, PAGE), splits * PAGES):
        page = first + turns
        page_mask = page * PAGE < table_len
        page_slot = tl.load(source_ptr + page * PAGE, mask=page_mask)
        if WIDE:
            tl.static_assert(PIECE == PAGES)
            column = first * PAGE + tl.arange(0, COLUMN_BLOCK)
            mask = column < table_len
            tl.store(target_ptr + column, tl.load(source_ptr + column, mask=mask), mask=mask)
        for row in range(row_begin, row_end):
            tl.store(real_page_table_ptr + row * real_page_table_stride + page, page_slot // PAGE, mask=page_mask)


@triton.jit
def write_request_pages(
    seq_lens_ptr, pool_ptr, req_to_token_ptr, pool_stride, table_ptr, request, block, pages,
    PAGE: tl.constexpr, PAGE_BLOCK: tl.constexpr,
):  # fmt: skip
    page = block * PAGE_BLOCK + tl.arange(0, PAGE_BLOCK)
    tokens = tl.load(seq_lens_ptr + request).to(tl.int32)
    source = req_to_token_ptr + tl.load(pool_ptr + request).to(tl.int64) * pool_stride
    slot = tl.load(source + page * PAGE, mask=page * PAGE < tokens, other=0)
    tl.store(table_ptr + request.to(tl.int64) * pages + page, slot // PAGE, mask=page < pages)


@triton.jit
def write_flattened_slots(
    seq_lens_ptr, pool_ptr, req_to_token_ptr, pool_stride, slots_ptr, block, num_requests, flattened,
    BLOCK: tl.constexpr, REQUEST_BLOCK: tl.constexpr,
):  # fmt: skip
    key = block * BLOCK + tl.arange(0, BLOCK)
    mask = key < flattened
    request = tl.zeros_like(key)
    begin = tl.zeros_like(key)
    carry = 0
    for start in range(0, num_requests, REQUEST_BLOCK):
        _, _, tokens, passed = requests_passed(seq_lens_ptr, key, start, carry, num_requests, REQUEST_BLOCK)
        request += tl.sum(passed.to(tl.int32), 1)
        begin += tl.sum(tl.where(passed, tokens[None, :], 0), 1)
        carry += tl.sum(tokens, 0)
    source = tl.load(pool_ptr + request, mask=mask, other=0).to(tl.int64) * pool_stride
    tl.store(slots_ptr + key, tl.load(req_to_token_ptr + source + key - begin, mask=mask, other=0), mask=mask)
