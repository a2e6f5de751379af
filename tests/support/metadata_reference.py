"""Plain-Python metadata of every mode, written from the definitions of the fields and from nothing else.

`expected_buffers` starts from poison and fills exactly what a launch must write, so that comparing whole storages shows an
element that was left out as well as one that was written too far.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

POISON = -7777
PAGE = 64
SPLIT_KV = 256


@dataclass(frozen=True)
class Batch:
    """One random batch, as SGLang would hand it over."""

    mode: str  # decode | draft_decode | target_verify | draft_extend_v2 | draft_extend_v1
    seq_lens: list[int]
    slots: list[int]
    req_to_token: np.ndarray  # int32 [pool, width]
    index_topk: int
    num_sms: int  # 0: no schedule
    surplus_last: bool = False  # which SMs get a segment more
    num_steps: int = 3  # N
    num_draft_tokens: int = 4  # D
    extend_lens: list[int] = field(default_factory=list)
    tail_rows: int = 0  # rows of a captured graph past sum(extend_lens)
    wide: bool = True  # whether page_table_1 is wanted
    next_n: int = 1  # rows of a request that DeepGEMM's logits take together
    planned: bool = False  # whether the plan of the top-k is wanted


def row_lengths(batch: Batch) -> list[list[tuple[int, int]]]:
    """For every step, (request, length before clamping) of every row."""
    n, d = batch.num_steps, batch.num_draft_tokens
    requests = list(enumerate(batch.seq_lens))
    if batch.mode == "decode":
        return [[(r, length) for r, length in requests]]
    if batch.mode == "draft_decode":
        return [[(r, length + i + 1) for r, length in requests] for i in range(n - 1)]
    if batch.mode == "target_verify":
        return [[(r, length + j + 1) for r, length in requests for j in range(d)]]
    if batch.mode == "draft_extend_v2":
        return [[(r, length - d + j + 1) for r, length in requests for j in range(d)]]
    assert batch.mode == "draft_extend_v1"
    rows = [(r, length - batch.extend_lens[r] + j + 1) for r, length in requests for j in range(batch.extend_lens[r])]
    return [rows + [(len(requests) - 1, 1)] * batch.tail_rows]


def cache_lengths(batch: Batch) -> list[list[int]]:
    """For every step, cache_seqlens of every request before clamping."""
    n, d = batch.num_steps, batch.num_draft_tokens
    extra = {"decode": [0], "draft_decode": range(1, n), "target_verify": [d]}.get(batch.mode, [0])
    return [[length + e for length in batch.seq_lens] for e in extra]


def table_lengths(batch: Batch) -> list[int]:
    """Columns of the page table that must be valid for every request, before clamping."""
    reach = {"draft_decode": batch.num_steps, "target_verify": batch.num_draft_tokens}.get(batch.mode, 0)
    return [length + reach for length in batch.seq_lens]


def schedule(lengths: list[int], num_sms: int, surplus_last: bool = False) -> np.ndarray:
    """DeepGEMM's schedule by walking over all segments one by one; the surplus goes to the last SMs or to the first."""
    segments = [(row, split) for row, length in enumerate(lengths) for split in range(-(-length // SPLIT_KV))]
    segments.append((len(lengths), 0))
    share, rest = divmod(len(segments) - 1, num_sms)
    takes = [share + (sm >= num_sms - rest if surplus_last else sm < rest) for sm in range(num_sms)]
    first = np.cumsum([0, *takes])
    return np.array([segments[g] for g in first], dtype=np.int32)


PLAN_CAPS = {65536: 30, 98304: 45, 131072: 60, 196608: 80, 262144: 112, 393216: 128}
"""Of SGLang's top-k v2 kernel on Hopper: threshold to the most rows that may exceed it."""


def topk_plan(lengths: list[int]) -> np.ndarray:
    """(threshold, listed rows), then (row, length) of every row beyond the threshold."""
    crowded = [t for t, cap in PLAN_CAPS.items() if sum(length > t for length in lengths) > cap]
    usable = [t for t in PLAN_CAPS if not crowded or t > max(crowded)]
    threshold = min(usable, default=max(PLAN_CAPS))
    listed = [(row, length) for row, length in enumerate(lengths) if length > threshold]
    return np.array([(threshold, len(listed)), *listed], dtype=np.int32)


def expected_buffers(batch: Batch, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Whole storages after one launch into poisoned buffers of these shapes."""
    out = {name: np.full(shape, POISON, dtype=np.int32) for name, shape in shapes.items()}
    width = min(batch.req_to_token.shape[1], PAGE * shapes["real_page_table"][1])

    def clamp(value: int) -> int:
        return min(max(value, 1), width)

    for step, (rows, cache) in enumerate(zip(row_lengths(batch), cache_lengths(batch), strict=True)):
        lengths = [clamp(length) for _, length in rows]
        clipped = [min(length, batch.index_topk) for length in lengths]
        cache = [clamp(length) for length in cache]
        out["cache_seqlens"][step, : len(cache)] = cache
        out["cu_seqlens_k"][step, : len(cache) + 1] = np.cumsum([0, *cache])
        out["nsa_cache_seqlens"][step, : len(rows)] = clipped
        out["nsa_cu_seqlens_k"][step, : len(rows) + 1] = np.cumsum([0, *clipped])
        out["seqlens_expanded"][step, : len(rows)] = lengths
        if batch.num_sms:
            out["schedule"][step] = schedule(lengths[batch.next_n - 1 :: batch.next_n], batch.num_sms, batch.surplus_last)
        if batch.planned and len(rows) <= 512:
            listed = topk_plan(lengths)
            out["topk_plan"][step, : len(listed)] = listed
    _expect_tables(batch, out, [clamp(length) for length in table_lengths(batch)])
    return out


def _expect_tables(batch: Batch, out: dict[str, np.ndarray], lengths: list[int]) -> None:
    for request, length in enumerate(lengths):
        slots = batch.req_to_token[batch.slots[request], :length]
        if "page_table_1" in out:
            out["page_table_1"][request, :length] = slots
        for row, (owner, _) in enumerate(row_lengths(batch)[0]):
            if owner == request:
                for page in range(-(-length // PAGE)):
                    out["real_page_table"][row, page] = slots[page * PAGE] // PAGE
    if batch.mode == "draft_extend_v1":
        owners = [owner for owner, _ in row_lengths(batch)[0]]
        out["token_to_batch_idx"][: len(owners)] = owners
        ends = np.cumsum([0, *batch.extend_lens])
        ends[-1] += batch.tail_rows
        out["cu_seqlens_q"][: len(ends)] = ends


def expected_prefill(prefixes: list[int], extends: list[int], slots: np.ndarray, index_topk: int) -> dict[str, np.ndarray]:
    """Every field of a prefill of `extends` new tokens behind `prefixes`; `slots` has a row of the request table each."""
    rows = [(r, prefix + j + 1) for r, (prefix, new) in enumerate(zip(prefixes, extends, strict=True)) for j in range(new)]
    tokens = [prefix + new for prefix, new in zip(prefixes, extends, strict=True)]
    starts = np.cumsum([0, *tokens])
    clipped = [min(length, index_topk) for _, length in rows]
    pages = -(-max(tokens) // PAGE)
    table = [[slots[r, PAGE * p] // PAGE if PAGE * p < n else 0 for p in range(pages)] for r, n in enumerate(tokens)]
    return {
        "cache_seqlens": tokens,
        "cu_seqlens_q": np.cumsum([0, *extends]),
        "cu_seqlens_k": starts,
        "seqlens_expanded": [length for _, length in rows],
        "nsa_cache_seqlens": clipped,
        "nsa_cu_seqlens_q": range(len(rows) + 1),
        "nsa_cu_seqlens_k": np.cumsum([0, *clipped]),
        "token_to_batch_idx": [r for r, _ in rows],
        "k_start": [starts[r] for r, _ in rows],
        "k_end": [starts[r] + length for r, length in rows],
        "real_page_table": table,
        "flattened_slots": np.concatenate([slots[r, :n] for r, n in enumerate(tokens)]),
    }
