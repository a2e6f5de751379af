"""The plan of a metadata launch: what it must write, decided on the host from shapes and configuration alone.

Every mode of the backend is one rule with other numbers. With L_r the length that SGLang hands over for request r, step s
counting draft forwards from 0 and j counting the query tokens of a request:

    len(s, r, j)        = L_r + row_offset + j + s        rows of a fixed number per request
    len(r, j)           = S_r - a_r + 1 + j               ragged rows, a_r = extend_lens[r]
    cache_seqlens(s, r) = L_r + cache_offset + s

| mode              | rows per request | row_offset | cache_offset | table_offset | steps |
|-------------------|------------------|------------|--------------|--------------|-------|
| decode            | 1                | 0          | 0            | 0            | 1     |
| draft decode      | 1                | 1          | 1            | N            | N - 1 |
| shared draft      | 1                | 0          | 0            | 0            | 1     |
| target_verify     | D                | 1          | D            | D            | 1     |
| draft_extend v2   | D                | 1 - D      | 0            | 0            | 1     |
| draft_extend v1   | a_r (ragged)     | -          | 0            | 0            | 1     |

`table_offset` says how far past L_r the page tables reach; the draft steps share one table that reaches L + N. All lengths
are clamped to [1, table_width]: a padding row never becomes an empty one (DeepGEMM's schedule reads out of bounds when every
length is zero) and a request at the context limit never reads past its table.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE_SIZE = 64
"""Tokens in a KV page; DeepGEMM's paged MQA kernel and the index-K layout fix it."""

SCHEDULE_SPLIT_KV = 256
"""Tokens in one segment of DeepGEMM's paged-MQA schedule: SPLIT_KV = BLOCK_KV (64) * 4 math warpgroups on SM90."""


@dataclass(frozen=True)
class MetadataPlan:
    """The shape of one metadata launch. Holds integers only; `rows_per_request` is 0 where rows are ragged."""

    num_requests: int
    num_rows: int
    rows_per_request: int
    num_steps: int = 1
    row_offset: int = 0
    cache_offset: int = 0
    table_offset: int = 0
    next_n: int = 1
    """Rows of a request that DeepGEMM's logits take together; the schedule is that of the last row of each such group."""

    @property
    def ragged(self) -> bool:
        return self.rows_per_request == 0

    @property
    def expanded(self) -> bool:
        """Whether a query row and a request are different things."""
        return self.rows_per_request != 1


def plan_decode(num_requests: int) -> MetadataPlan:
    """One row a request, which attends to the L tokens that the cache will hold (the new one included)."""
    return MetadataPlan(num_requests, num_requests, 1)


def plan_draft_decode(num_requests: int, speculative_num_steps: int) -> MetadataPlan:
    """All N - 1 draft forwards of a round: step i writes position L + i and attends to L + i + 1 tokens."""
    return MetadataPlan(
        num_requests,
        num_requests,
        1,
        num_steps=speculative_num_steps - 1,
        row_offset=1,
        cache_offset=1,
        table_offset=speculative_num_steps,
    )


def plan_shared_draft_decode(num_requests: int) -> MetadataPlan:
    """A draft round over one selection: every step attends to the L tokens that the row it was made for attended to."""
    return MetadataPlan(num_requests, num_requests, 1)


def plan_target_verify(num_requests: int, num_draft_tokens: int, next_n: int = 1) -> MetadataPlan:
    """D rows a request; row j attends to the L cached tokens, the drafts before it and itself.

    `next_n` rows are taken together by DeepGEMM's logits, where they divide D.
    """
    return MetadataPlan(
        num_requests,
        num_requests * num_draft_tokens,
        num_draft_tokens,
        row_offset=1,
        cache_offset=num_draft_tokens,
        table_offset=num_draft_tokens,
        next_n=next_n if num_draft_tokens % next_n == 0 else 1,
    )


def plan_draft_extend_v2(num_requests: int, num_draft_tokens: int) -> MetadataPlan:
    """D rows a request; `seq_lens` already counts the D tokens (SGLang's spec v2 worker)."""
    return MetadataPlan(num_requests, num_requests * num_draft_tokens, num_draft_tokens, row_offset=1 - num_draft_tokens)


def plan_draft_extend_v1(num_requests: int, num_rows: int) -> MetadataPlan:
    """Rows packed by accepted tokens; `num_rows` is their sum, or the rows of the captured graph, which is never less.

    Rows past the sum belong to the last request and have length 1.
    """
    return MetadataPlan(num_requests, num_rows, 0)
