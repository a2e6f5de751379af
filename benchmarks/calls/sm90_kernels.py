"""SGLang's sparse-attention kernels for SM90 as bare calls, on arguments that exist already.

A maker takes a case and returns the call to time, which takes the number of the call; it raises where the release or the
shape has no such kernel. What a kernel needs beside its call, once a layer, is a variant of its own ("q8, casting the query").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.fa3 import MAX_SCHEDULED_ROWS, Fa3
from nsa_backend.benchmarks.calls.attention_case import HEAD_BLOCK
from nsa_backend.benchmarks.calls.sm90_case import Shape, Sm90Case
from nsa_backend.config import AttentionConfig
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.testing.shape import LATENT, QK_DIM, SCALE, TOPK

Call = Callable[[int], Any]
SPLITS, MAX_SPLIT_ROWS = (1, 2, 4, 8, 16), 128
MOST_TRITON_HEADS = 32  # SGLang refuses triton_sparse_mla with more
AUTOTUNED_HEADS = 16  # `triton` compiles 27 configurations a head count in prefill: one is enough to place it


@dataclass(frozen=True)
class Variant:
    """One way to call a kernel, or a part of what has to come before it."""

    make: Callable[[Sm90Case], Call]
    attends: bool = True  # whether its result is the attention, and is compared with float32
    captured: bool = True  # False: it waits for the GPU, and CUDA events time it


def variants(shape: Shape) -> dict[str, Variant]:
    """What is worth measuring at `shape`, by name."""
    prefill, found = shape.phase == "prefill", {}
    if shape.kv == "fp8":
        found["flashmla_kv"] = Variant(flashmla_kv)
        if prefill:
            found["dequantising the context"] = Variant(dequantise, attends=False)
            found["q8, requantising the context"] = Variant(q8_requantise, attends=False)
        return found
    found["fa3"] = Variant(fa3)
    if shape.rows <= MAX_SCHEDULED_ROWS:
        found["fa3, schedule kept"] = Variant(functools.partial(fa3, scheduled=True))
    if shape.rows <= MAX_SPLIT_ROWS and not prefill:
        found |= {f"fa3, {n} splits": Variant(functools.partial(fa3, num_splits=n)) for n in SPLITS}
    found["flashmla_sparse, every column"] = Variant(functools.partial(flashmla_sparse, lengths=False))
    found["flashmla_sparse"] = Variant(flashmla_sparse)
    found["flashmla_sparse, no statistics"] = Variant(flashmla_without_statistics)
    if shape.heads <= MOST_TRITON_HEADS:
        found["triton_sparse_mla"] = Variant(triton_sparse_mla)
    if prefill:
        if shape.heads in (8, 16):
            found["triton_sparse_mla, union 2"] = Variant(functools.partial(triton_sparse_mla, union=2))
        if shape.heads == AUTOTUNED_HEADS:
            found["triton"] = Variant(triton_prefill)
        found["q8"] = Variant(q8)
        found["q8, lengths"] = Variant(functools.partial(q8, lengths=True), captured=False)  # it checks them on the host
        found["q8, casting the query"] = Variant(q8_query, attends=False)
        found["q8, casting the context"] = Variant(q8_context, attends=False)
    else:
        found["triton"] = Variant(triton_decode)
    return found


def fa3(case: Sm90Case, scheduled: bool = False, num_splits: int = 0) -> Call:
    """FA3 with page size 1; 0 splits leaves their number to its heuristic, `scheduled` its schedule to a call before.

    The schedule is the one of our forward, which leaves the number of splits to the heuristic.
    """
    assert not (scheduled and num_splits)
    attend, _ = adapter.fa3_functions()
    rows, lengths = case.shape.rows, case.lengths
    cu = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    config = AttentionConfig(device_sm=90, num_heads=case.shape.heads, kv_cache_dtype=torch.bfloat16, index_topk=TOPK)
    schedule = Fa3(config).schedule(lengths, cu) if scheduled else None
    arguments = dict(
        q=case.q_rope, qv=case.q_nope, k_cache=case.cache[..., LATENT:].unsqueeze(1),
        v_cache=case.cache[..., :LATENT].unsqueeze(1), cache_seqlens=lengths, cu_seqlens_q=cu, cu_seqlens_k_new=ends,
        max_seqlen_q=1, softmax_scale=SCALE, causal=True, softcap=0.0, return_softmax_lse=False, num_splits=num_splits,
        scheduler_metadata=schedule,
    )  # fmt: skip
    return lambda i: attend(**arguments, page_table=case.chosen(i))


def flashmla_sparse(case: Sm90Case, lengths: bool = True) -> Call:
    """FlashMLA's prefill kernel, told the length of each row or not."""
    attend, query = adapter.flash_mla().flash_mla_sparse_fwd, case.joined(HEAD_BLOCK)
    told = {"topk_length": case.lengths} if lengths else {}
    return lambda i: attend(
        q=query, kv=case.cache, indices=case.chosen(i).unsqueeze(1), sm_scale=SCALE, d_v=LATENT, **told
    )[0]  # fmt: skip


def flashmla_without_statistics(case: Sm90Case) -> Call:
    """The same kernel from FlashMLA's own package, whose releases can leave out the largest logit and the sum."""
    from flash_mla import flash_mla_sparse_fwd

    query = case.joined(HEAD_BLOCK)
    return lambda i: flash_mla_sparse_fwd(
        q=query, kv=case.cache, indices=case.chosen(i).unsqueeze(1), sm_scale=SCALE, d_v=LATENT, topk_length=case.lengths,
        use_legacy=True, return_log2_lse=False,
    )[0]  # fmt: skip


def flashmla_kv(case: Sm90Case) -> Call:
    """FlashMLA's decode kernel on packed FP8 pages, its schedule made before."""
    flash_mla, rows = adapter.flash_mla(), case.shape.rows
    query = case.joined(HEAD_BLOCK).unsqueeze(1)
    heads = query.shape[2]
    tiles, num_splits = flash_mla.get_mla_metadata(
        cache_seqlens=case.lengths, num_q_tokens_per_head_k=heads, num_heads_k=1, num_heads_q=heads, is_fp8_kvcache=True,
        topk=TOPK,
    )  # fmt: skip
    pages = case.cache.view(-1, PAGE_SIZE, 1, case.cache.shape[-1])
    table = torch.empty(rows, 0, dtype=torch.int32, device="cuda")
    return lambda i: flash_mla.flash_mla_with_kvcache(
        q=query, k_cache=pages, cache_seqlens=case.lengths, head_dim_v=LATENT, tile_scheduler_metadata=tiles,
        num_splits=num_splits, softmax_scale=SCALE, indices=case.chosen(i).unsqueeze(1), block_table=table,
        is_fp8_kvcache=True,
    )[0][:, 0]  # fmt: skip


def dequantise(case: Sm90Case) -> Call:
    """What a kernel that reads bfloat16 needs before a prefill on an FP8 cache."""
    return lambda i: adapter.dequantize_k_cache_paged(case.cache, case.flattened)


def triton_sparse_mla(case: Sm90Case, union: int = 0) -> Call:
    """SGLang's prefill kernel in Triton; `union` neighbouring rows gather their KV once."""
    from sglang.kernels.ops.attention.dsa.triton_sparse_mla_prefill import sparse_mla_prefill

    query = case.joined(1)
    return lambda i: sparse_mla_prefill(query, case.cache, case.chosen(i), SCALE, LATENT, topk_length=case.lengths, union=union)


def triton_prefill(case: Sm90Case) -> Call:
    """What SGLang's option value `triton` runs in prefill."""
    from sglang.kernels.ops.attention.dsa.triton_sparse_mla import triton_sparse_mla_fwd

    longest = int(case.lengths.max())
    return lambda i: triton_sparse_mla_fwd(
        q_nope=case.q_nope, q_rope=case.q_rope, kv=case.cache, indices=case.chosen(i).unsqueeze(1), sm_scale=SCALE,
        d_v=LATENT, topk_length=None, max_topk_length=longest,
    )[0]  # fmt: skip


def triton_decode(case: Sm90Case) -> Call:
    """What SGLang's option value `triton` runs in decode."""
    from sglang.kernels.ops.attention.dsa.triton_sparse_mla_decode import triton_sparse_mla_decode_splitk

    workspace = []
    return lambda i: triton_sparse_mla_decode_splitk(
        q_nope=case.q_nope, q_rope=case.q_rope, kv=case.cache, indices=case.chosen(i).unsqueeze(1), sm_scale=SCALE,
        d_v=LATENT, workspace=workspace,
    )[0]  # fmt: skip


def q8(case: Sm90Case, lengths: bool = False) -> Call:
    """flashmla_sparse_q8's kernel on a query and a context that were cast before. The context ends in TOPK rows of zero."""
    from sglang.kernels.ops.attention.sparse_mla_q8kv8_prefill_sm90 import sparse_mla_q8kv8_prefill_fwd

    query = case.joined(HEAD_BLOCK).to(torch.float8_e4m3fn)
    context = torch.zeros(case.shape.context + TOPK, 1, QK_DIM, device="cuda").to(torch.float8_e4m3fn)
    context[:-TOPK] = case.values[: case.shape.context].to(torch.float8_e4m3fn)
    one = torch.ones(1, device="cuda")
    told = case.lengths if lengths else None
    return lambda i: sparse_mla_q8kv8_prefill_fwd(
        q=query, kv=context, indices=case.chosen(i).unsqueeze(1), sm_scale=SCALE, q_scale=one, kv_scale=one, d_v=LATENT,
        topk_length=told,
    )[0]  # fmt: skip


def q8_query(case: Sm90Case) -> Call:
    """Joins, pads and casts the query."""
    from sglang.kernels.ops.attention.mla_qk_prep import concat_and_cast_q_fp8_pad

    out = case.joined(HEAD_BLOCK).to(torch.float8_e4m3fn)
    return lambda i: concat_and_cast_q_fp8_pad(out, case.q_nope, case.q_rope, case.shape.heads)


def q8_context(case: Sm90Case) -> Call:
    """Gathers and casts a context of bfloat16."""
    from sglang.kernels.ops.attention.dsa.dequant_k_cache import gather_cast_kv_fp8_pad_paged

    out = _room_of_context(case)
    return lambda i: gather_cast_kv_fp8_pad_paged(out, case.cache, case.flattened, LATENT)


def q8_requantise(case: Sm90Case) -> Call:
    """Gathers a packed context and requantises it without scales."""
    from sglang.kernels.ops.attention.dsa.dequant_k_cache import gather_dequant_requant_fp8_paged_dsa

    out = _room_of_context(case)
    return lambda i: gather_dequant_requant_fp8_paged_dsa(case.cache, case.flattened, extra_rows=TOPK, out=out)


def _room_of_context(case: Sm90Case) -> torch.Tensor:
    return torch.empty(case.shape.context + TOPK, QK_DIM, dtype=torch.float8_e4m3fn, device="cuda")
