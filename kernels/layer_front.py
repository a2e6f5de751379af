"""The front of a sparse MLA layer in two launches, each the bytes of SGLang's own sequence of small kernels.

The first stands between the layer's first projections and those of the query, the second between these and the logits:

    x -> qkv_a | wk | weights_proj -> `norm_rope_store` -> q_b | wq_b -> `rope_quantise` -> logits, top-k, attention
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nsa_backend.kernels.blocks import blocks, power_of_two
from nsa_backend.kernels.layer_front_kernel import norm_rope_store_kernel, rope_quantise_kernel
from nsa_backend.kernels.plan import PAGE_SIZE

GROUP = 128
"""Values of the query's latent, of the KV cache and of index keys that share a scale."""
SUMMED_TOGETHER = 256
"""Values of a row that 32 lanes take at once; norms of other widths are summed in another order than SGLang's."""
WIDEST = 3072
"""Values of a row that FlashInfer's norm gives one warp."""
HEADS = 8
"""Heads a program takes of a query."""
INDEX_PAGE_BYTES = PAGE_SIZE * (GROUP + 4)
"""Of a page of index keys: FP8 values, then float32 scales."""


@dataclass(frozen=True)
class FrontWeights:
    """What a layer norms and rotates with; the tensors are the model's own."""

    q_norm: torch.Tensor  # bfloat16 [q rank]
    latent_norm: torch.Tensor  # bfloat16 [latent]
    key_norm: torch.Tensor  # float32 [GROUP]
    key_bias: torch.Tensor  # float32 [GROUP]
    cos_sin: torch.Tensor  # float32 [positions, rope], cosines first
    index_cos_sin: torch.Tensor  # float32 [positions, rope]
    q_eps: float
    latent_eps: float
    key_eps: float
    neox: bool  # RoPE's layout in MLA: halves, or else neighbours
    index_neox: bool

    @property
    def rope(self) -> int:
        return self.cos_sin.shape[1]

    def problem(self) -> str | None:
        """Why the launches cannot compute with these, or None."""
        for name, norm in (("q_a_layernorm", self.q_norm), ("kv_a_layernorm", self.latent_norm)):
            if norm.dtype != torch.bfloat16 or norm.shape[0] % SUMMED_TOGETHER or norm.shape[0] > WIDEST:
                return f"{name} has {norm.dtype} [{norm.shape[0]}]; widths are multiples of {SUMMED_TOGETHER} up to {WIDEST}"
        if self.latent_norm.shape[0] // GROUP & (self.latent_norm.shape[0] // GROUP - 1):
            return f"kv_a_layernorm has {self.latent_norm.shape[0]} values, whose groups of {GROUP} are no power of two"
        for norm in (self.key_norm, self.key_bias):
            if norm.dtype != torch.float32 or norm.shape != (GROUP,):
                return f"the index key's norm has {norm.dtype} {tuple(norm.shape)} and not float32 [{GROUP}]"
        rope = self.rope
        if rope & (rope - 1) or rope > GROUP or self.index_cos_sin.shape[1] != rope:
            return f"RoPE turns {rope} values of a head and {self.index_cos_sin.shape[1]} of an index head"
        if any(table.dtype != torch.float32 or not table.is_contiguous() for table in (self.cos_sin, self.index_cos_sin)):
            return "RoPE's cosines are not contiguous float32"
        return None


def empty_q(rows: int, q_rank: int, quantised: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Room for the query's latent: FP8 with scales as SGLang's block-FP8 GEMM reads them on Hopper, or bfloat16 without.

    Returns:
        ([rows, q rank] contiguous, float32 [rows, q rank / GROUP] whose columns are dense and begin at multiples of 16 bytes).
    """
    if not quantised:
        return torch.empty(rows, q_rank, dtype=torch.bfloat16, device=device), None
    scales = torch.empty(q_rank // GROUP, -(-rows // 4) * 4, dtype=torch.float32, device=device)
    return torch.empty(rows, q_rank, dtype=torch.float8_e4m3fn, device=device), scales.T[:rows]


def norm_rope_store(
    qkv: torch.Tensor,
    key: torch.Tensor,
    weights: FrontWeights,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv_cache: torch.Tensor,
    index_cache: torch.Tensor,
    quantise_q: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Norm the query's latent, write each row's KV and index key; one launch.

    Args:
        qkv: bfloat16 [rows, q rank + latent + rope], rows dense.
        key: bfloat16 [rows, GROUP], rows dense: index keys before their norm.
        weights: of the layer, whose `problem()` is None.
        positions: int64 [rows], contiguous.
        slots: int64 [rows] of any stride. Slot 0 is padding's: its KV is left as it is, as SGLang does, and its index key
            is written. Real slots differ from one another.
        kv_cache: [slots, 1, latent + rope] of bfloat16, or FP8 or uint8 rows as `sparse_decode` reads them.
        index_cache: uint8 [pages, INDEX_PAGE_BYTES], contiguous.
        quantise_q: whether the query's projections have FP8 weights.

    Returns:
        What `empty_q` describes, filled.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    rows, q_rank, latent, rope = qkv.shape[0], weights.q_norm.shape[0], weights.latent_norm.shape[0], weights.rope
    kv_bytes = (latent + rope) * 2 if kv_cache.dtype == torch.bfloat16 else latent + latent // GROUP * 4 + rope * 2
    _refuse(
        {
            "qkv": (qkv, torch.bfloat16, qkv.shape == (rows, q_rank + latent + rope) and qkv.stride(-1) == 1),
            "key": (key, torch.bfloat16, key.shape == (rows, GROUP) and key.stride(-1) == 1),
            "positions": (positions, torch.int64, positions.shape == (rows,) and positions.is_contiguous()),
            "slots": (slots, torch.int64, slots.shape == (rows,)),
            "kv_cache": (
                kv_cache,
                (torch.bfloat16, torch.uint8, torch.float8_e4m3fn),
                kv_cache.shape[1] == 1 and kv_cache.stride(-1) == 1 and kv_cache.shape[2] * kv_cache.element_size() == kv_bytes,
            ),
            "index_cache": (
                index_cache,
                torch.uint8,
                index_cache.shape[1] == INDEX_PAGE_BYTES and index_cache.is_contiguous(),
            ),
        },
        rows,
    )
    q, scales = empty_q(rows, q_rank, quantise_q, qkv.device)
    if rows == 0:
        return q, scales
    latents, latent_scales, k_rope = _parts_of(kv_cache, latent)
    norm_rope_store_kernel[(rows, 3)](
        qkv,
        key,
        weights.q_norm,
        weights.latent_norm,
        weights.key_norm,
        weights.key_bias,
        weights.cos_sin,
        weights.index_cos_sin,
        positions,
        slots,
        slots.stride(0),
        q,
        q if scales is None else scales,
        0 if scales is None else scales.stride(1),
        latents,
        latent_scales,
        k_rope,
        index_cache.view(torch.float8_e4m3fn),
        index_cache.view(torch.float32),
        weights.q_eps,
        weights.latent_eps,
        weights.key_eps,
        Q_RANK=q_rank,
        LATENT=latent,
        ROPE=rope,
        QKV_STRIDE=qkv.stride(0),
        KEY_STRIDE=key.stride(0),
        LATENT_STRIDE=latents.stride(0),
        SCALES_STRIDE=latent_scales.stride(0),
        K_ROPE_STRIDE=k_rope.stride(0),
        Q_GROUPS=power_of_two(q_rank // GROUP),
        Q_FP8=quantise_q,
        KV_FP8=kv_cache.dtype != torch.bfloat16,
        NEOX=weights.neox,
        INDEX_NEOX=weights.index_neox,
        COMPILED=qkv.is_cuda,
    )
    return q, scales


def rope_quantise(
    query: torch.Tensor, gates: torch.Tensor, q_rope: torch.Tensor, weights: FrontWeights, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate both queries, quantise the indexer's, and weigh its gates with the scales; one launch.

    Args:
        query: bfloat16 [rows, index heads, GROUP], heads dense.
        gates: float32 [rows, index heads], contiguous: what weights_proj gives.
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
            "gates": (gates, torch.float32, gates.shape == (rows, index_heads) and gates.is_contiguous()),
            "q_rope": (q_rope, torch.bfloat16, q_rope.shape == (rows, heads, rope) and q_rope.stride(2) == 1),
            "positions": (positions, torch.int64, positions.shape == (rows,) and positions.is_contiguous()),
        },
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
            Q_ROPE_ROW_STRIDE=q_rope.stride(0),
            Q_ROPE_HEAD_STRIDE=q_rope.stride(1),
            HEADS=HEADS,
            GATE_SCALE=index_heads**-0.5,
            SOFTMAX_SCALE=GROUP**-0.5,
            NEOX=weights.neox,
            INDEX_NEOX=weights.index_neox,
        )
    return quantised, weighed, out


def _parts_of(kv_cache: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
