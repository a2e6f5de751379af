"""The front of a sparse MLA layer in two launches, each the bytes of SGLang's own sequence of small kernels.

The first stands between the layer's first projections and those of the query, the second between these and the logits, or
where an earlier layer has selected, attention:

    x -> qkv_a | wk | weights_proj -> `norm_rope_store` -> q_b | wq_b -> `rope_quantise` -> logits, top-k, attention
    x -> qkv_a                     -> `norm_rope_store` -> q_b        -> `rope_query`    -> attention
"""

from __future__ import annotations

import torch

from nsa_backend.kernels.blocks import blocks, power_of_two
from nsa_backend.kernels.dependent_launch import early
from nsa_backend.kernels.layer_front_kernel import (
    norm_rope_store_kernel,
    quantise_kernel,
    rope_quantise_kernel,
    rope_query_kernel,
)
from nsa_backend.kernels.layer_front_weights import GROUP, FrontWeights, Scales
from nsa_backend.kernels.local_slots import check_rank
from nsa_backend.kernels.plan import PAGE_SIZE

HEADS = 8
"""Heads a program takes of a query."""
GROUPS = 8
"""Groups a program takes of a row that it quantises."""
INDEX_PAGE_BYTES = PAGE_SIZE * (GROUP + 4)
"""Of a page of index keys: FP8 values, then float32 scales."""
ALIGNED = 4
"""Rows of a projection's input: of a multiple of so many, scales leave no room between groups."""


def empty_input(rows: int, width: int, scales: Scales | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Room for a projection's input: FP8 with scales as DeepGEMM reads them, or bfloat16 without any.

    SGLang has the scales of a row beside each other where they are powers of two, and a kernel more a projection moves them.

    Returns:
        ([rows, width] contiguous, float32 [rows, width / GROUP], columns dense from multiples of 16 bytes on).
    """
    if scales is None:
        return torch.empty(rows, width, dtype=torch.bfloat16, device=device), None
    of_groups = torch.empty(width // GROUP, blocks(rows, ALIGNED) * ALIGNED, dtype=torch.float32, device=device)
    return torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device), of_groups.T[:rows]


def quantise(x: torch.Tensor, scales: Scales, *, before_ours: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A projection's input in FP8, values and scales to the bit of SGLang's own for block-FP8 projections; one launch.

    Args:
        x: bfloat16 [rows, a multiple of GROUP], contiguous.
        scales: of the result.
        before_ours: whether what is launched next on this stream is a kernel of this package that waits for this one.

    Returns:
        What `empty_input` describes, filled.

    Raises:
        ValueError: x has another dtype or layout.
    """
    rows, width = x.shape
    _refuse({"x": (x, torch.bfloat16, x.is_contiguous() and not width % GROUP)}, rows)
    out, out_scales = empty_input(rows, width, scales, x.device)
    if rows:
        quantise_kernel[(rows, blocks(width // GROUP, GROUPS))](
            x, out, out_scales, *out_scales.stride(), WIDTH=width, GROUPS=GROUPS, POWERS=scales is Scales.POWERS_OF_TWO,
            BEFORE_OURS=before_ours, COMPILED=x.is_cuda, **early(x.is_cuda),
        )  # fmt: skip
    return out, out_scales


def norm_rope_store(
    qkv: torch.Tensor,
    key: torch.Tensor | None,
    weights: FrontWeights,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv_cache: torch.Tensor,
    index_cache: torch.Tensor | None,
    q_scales: Scales | None,
    *,
    ranks: int = 1,
    rank: int = 0,
    before_ours: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Norm the query's latent, write each row's KV and index key; one launch.

    Args:
        qkv: bfloat16 [rows, q rank + latent + rope], rows dense.
        key: bfloat16 [rows, GROUP], rows dense: index keys before their norm; None where none is written.
        weights: of the layer, whose `problem()` is None.
        positions: int64 [rows], contiguous.
        slots: int64 [rows] of any stride. Slot 0 is padding's: its KV is left as it is, as SGLang does, and its index key
            is written. Real slots differ from one another.
        kv_cache: [slots, 1, latent + rope] of bfloat16, or FP8 or uint8 rows as `sparse_decode` reads them.
        index_cache: uint8 [pages, INDEX_PAGE_BYTES], contiguous; None as `key` is.
        q_scales: of the query's latent, for projections with FP8 weights; None for bfloat16.
        ranks: that divide slots among them, as `local_slots` says; this one is `rank`, and has KV of its own slots alone.
        before_ours: as `quantise` has it.

    Returns:
        What `empty_input` describes, filled.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    check_rank(ranks, rank)
    rows, q_rank, latent, rope = qkv.shape[0], weights.q_norm.shape[0], weights.latent_norm.shape[0], weights.rope
    kv_bytes = (latent + rope) * 2 if kv_cache.dtype == torch.bfloat16 else latent + latent // GROUP * 4 + rope * 2
    _refuse(
        {
            "qkv": (qkv, torch.bfloat16, qkv.shape == (rows, q_rank + latent + rope) and qkv.stride(-1) == 1),
            "positions": (positions, torch.int64, positions.shape == (rows,) and positions.is_contiguous()),
            "slots": (slots, torch.int64, slots.shape == (rows,)),
            "kv_cache": (
                kv_cache,
                (torch.bfloat16, torch.uint8, torch.float8_e4m3fn),
                kv_cache.shape[1] == 1 and kv_cache.stride(-1) == 1 and kv_cache.shape[2] * kv_cache.element_size() == kv_bytes,
            ),
        }
        | ({} if key is None else _index_tensors(key, index_cache, rows)),
        rows,
    )
    q, scales = empty_input(rows, q_rank, q_scales, qkv.device)
    if rows == 0:
        return q, scales
    latents, latent_scales, k_rope = parts_of_cache(kv_cache, latent)
    indexed = key is not None
    unread = weights.cos_sin  # stands where nothing is read or written
    norm_rope_store_kernel[(rows, 3 if indexed else 2)](
        qkv,
        key if indexed else unread,
        weights.q_norm,
        weights.latent_norm,
        weights.key_norm if indexed else unread,
        weights.key_bias if indexed else unread,
        weights.cos_sin,
        weights.index_cos_sin if indexed else unread,
        positions,
        slots,
        slots.stride(0),
        q,
        q if scales is None else scales,
        *((0, 0) if scales is None else scales.stride()),
        latents,
        latent_scales,
        k_rope,
        index_cache.view(torch.float8_e4m3fn) if indexed else unread,
        index_cache.view(torch.float32) if indexed else unread,
        weights.q_eps,
        weights.latent_eps,
        weights.key_eps,
        Q_RANK=q_rank,
        LATENT=latent,
        ROPE=rope,
        QKV_STRIDE=qkv.stride(0),
        KEY_STRIDE=key.stride(0) if indexed else 0,
        LATENT_STRIDE=latents.stride(0),
        SCALES_STRIDE=latent_scales.stride(0),
        K_ROPE_STRIDE=k_rope.stride(0),
        Q_GROUPS=power_of_two(q_rank // GROUP),
        Q_FP8=q_scales is not None,
        Q_POWERS=q_scales is Scales.POWERS_OF_TWO,
        KV_FP8=kv_cache.dtype != torch.bfloat16,
        NEOX=weights.neox,
        INDEX_NEOX=weights.index_neox,
        INDEX_FUSED=weights.index_fused,
        INDEXED=indexed,
        COMPILED=qkv.is_cuda,
        RANKS=ranks,
        RANK=rank,
        BEFORE_OURS=before_ours,
        **early(qkv.is_cuda),
    )
    return q, scales


def rope_quantise(
    query: torch.Tensor, gates: torch.Tensor, q_rope: torch.Tensor, weights: FrontWeights, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate both queries, quantise the indexer's, and weigh its gates with the scales; one launch.

    Args:
        query: bfloat16 [rows, index heads, GROUP], heads dense.
        gates: float32 [rows, index heads], heads dense: what weights_proj gives; bfloat16 where `weights.index_fused`.
        q_rope: bfloat16 [rows, heads, rope], the last dimension dense: the part of MLA's query that is rotated.
        weights: of the layer, whose `problem()` is None.
        positions: int64 [rows], contiguous.

    Returns:
        (FP8 [rows, index heads, GROUP], float32 [rows, index heads, 1] that weigh the heads' logits,
        bfloat16 [rows, heads, rope]), all contiguous.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    rows, index_heads, rope, heads = query.shape[0], query.shape[1], weights.rope, q_rope.shape[1]
    dense_heads = query.shape[2] == GROUP and query.stride()[1:] == (GROUP, 1) and index_heads % HEADS == 0
    _refuse(
        {
            "query": (query, torch.bfloat16, dense_heads),
            "gates": (
                gates,
                torch.bfloat16 if weights.index_fused else torch.float32,
                gates.shape == (rows, index_heads) and gates.stride(1) == 1,
            ),
        }
        | _query_tensors(q_rope, rope, positions, rows),
        rows,
    )
    quantised = torch.empty(rows, index_heads, GROUP, dtype=torch.float8_e4m3fn, device=query.device)
    out = torch.empty(rows, heads, rope, dtype=torch.bfloat16, device=query.device)
    weighed = torch.empty(rows, index_heads, 1, dtype=torch.float32, device=query.device)
    if rows:
        rope_quantise_kernel[(rows, index_heads // HEADS + blocks(heads, HEADS))](
            query,
            gates,
            q_rope,
            weights.cos_sin,
            weights.index_cos_sin,
            positions,
            quantised,
            weighed,
            out,
            heads,
            INDEX_HEADS=index_heads,
            ROPE=rope,
            QUERY_STRIDE=query.stride(0),
            GATES_STRIDE=gates.stride(0),
            Q_ROPE_ROW_STRIDE=q_rope.stride(0),
            Q_ROPE_HEAD_STRIDE=q_rope.stride(1),
            HEADS=HEADS,
            GATE_SCALE=index_heads**-0.5,
            SOFTMAX_SCALE=GROUP**-0.5,
            NEOX=weights.neox,
            INDEX_NEOX=weights.index_neox,
            INDEX_FUSED=weights.index_fused,
            COMPILED=query.is_cuda,
            **early(query.is_cuda),
        )
    return quantised, weighed, out


def rope_query(q_rope: torch.Tensor, weights: FrontWeights, positions: torch.Tensor) -> torch.Tensor:
    """Rotate MLA's query alone; one launch. Arguments, result and errors are those of `rope_quantise`."""
    rows, heads = q_rope.shape[:2]
    _refuse(_query_tensors(q_rope, weights.rope, positions, rows), rows)
    out = torch.empty(rows, heads, weights.rope, dtype=torch.bfloat16, device=q_rope.device)
    if rows:
        rope_query_kernel[(rows, blocks(heads, HEADS))](
            q_rope,
            weights.cos_sin,
            positions,
            out,
            heads,
            ROPE=weights.rope,
            ROW_STRIDE=q_rope.stride(0),
            HEAD_STRIDE=q_rope.stride(1),
            HEADS=HEADS,
            NEOX=weights.neox,
            COMPILED=q_rope.is_cuda,
            **early(q_rope.is_cuda),
        )
    return out


def _query_tensors(q_rope: torch.Tensor, rope: int, positions: torch.Tensor, rows: int) -> dict[str, tuple]:
    fits = q_rope.shape == (rows, q_rope.shape[1], rope) and q_rope.stride(2) == 1
    return {
        "q_rope": (q_rope, torch.bfloat16, fits),
        "positions": (positions, torch.int64, positions.shape == (rows,) and positions.is_contiguous()),
    }


def _index_tensors(key: torch.Tensor, index_cache: torch.Tensor, rows: int) -> dict[str, tuple]:
    fits = index_cache.shape[1] == INDEX_PAGE_BYTES and index_cache.is_contiguous()
    return {
        "key": (key, torch.bfloat16, key.shape == (rows, GROUP) and key.stride(-1) == 1),
        "index_cache": (index_cache, torch.uint8, fits),
    }


def parts_of_cache(kv_cache: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of every slot's latent, scales and rotated part, each of its own dtype; no scales in bfloat16."""
    if kv_cache.dtype == torch.bfloat16:
        return kv_cache, kv_cache, kv_cache[..., latent:]
    packed, after_scales = kv_cache.view(torch.float8_e4m3fn), latent + latent // GROUP * 4
    return packed, packed[..., latent:after_scales].view(torch.float32), packed[..., after_scales:].view(torch.bfloat16)


def _refuse(tensors: dict[str, tuple], rows: int) -> None:
    """Raise ValueError for the first that has another dtype than what is named beside it, or that does not fit."""
    for name, (tensor, dtypes, fits) in tensors.items():
        if tensor.dtype not in (dtypes if isinstance(dtypes, tuple) else (dtypes,)) or not fits:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}, which does not fit {rows} "
                "rows of this layer: the kernel would misread it or write elsewhere"
            )
