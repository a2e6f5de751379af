"""The look at the start of a server whether the two launches write, on this GPU, the bits that SGLang's own kernels write."""

from __future__ import annotations

from typing import Any

import torch

from nsa_backend.adapters.dsa.layer_front import builtin
from nsa_backend.adapters.dsa.layer_front.rule import weights_of
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.kernels.norm_rope_store import INDEX_PAGE_BYTES, norm_rope_store, store_index_keys
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.projection_inputs import quantise
from nsa_backend.kernels.rope_quantise import FEW_ROWS, index_queries, rope_quantise, rope_query

ROWS = 48, FEW_ROWS + 8
"""Of the batches that are looked at, few and more."""
KINDS = ("normal", "zeros", "large", "outliers", "small")


def rows_of(kind: str, *shape: int, device: str | torch.device) -> torch.Tensor:
    """bfloat16 rows of one of `KINDS`: as activations are, or as scales and roundings find them hard."""
    x = torch.randn(*shape, device=device)
    if kind == "zeros":
        x = x * 0
    elif kind == "large":
        x = x.sign() * 1e17  # their squares' sum is finite
    elif kind == "outliers":
        x[..., ::GROUP] *= 1e4
    elif kind == "small":
        x = x * 1e-38
    return x.bfloat16()


@torch.no_grad()
def differing_parts(attention: Any, kv_cache: torch.Tensor, scales: Scales | None, rows: int) -> list[str]:
    """Which results of the launches have other bits than SGLang's, for each kind of rows; a layer on a GPU.

    Args:
        attention: a layer that `rule.layer_problem` finds nothing against.
        kv_cache: of a layer, [slots, 1, width]; its dtype and width are used, its memory is not.
        scales: of the input of the query's projections.
        rows: of a batch.
    """
    weights, device = weights_of(attention), kv_cache.device
    positions = torch.randint(len(weights.cos_sin), (rows,), device=device)
    pages = -(-rows // PAGE_SIZE) + 1
    slots = PAGE_SIZE + torch.randperm((pages - 1) * PAGE_SIZE, device=device)[:rows]
    slots[-1] = 0  # padding
    found, indexer = [], attention.indexer
    for kind in KINDS:
        qkv = rows_of(kind, rows, weights.q_norm.shape[0] + weights.latent_norm.shape[0] + weights.rope, device=device)
        key = None if indexer is None else rows_of(kind, rows, GROUP, device=device)
        caches = [
            (
                torch.zeros(pages * PAGE_SIZE, 1, kv_cache.shape[2], dtype=kv_cache.dtype, device=device),
                torch.zeros(pages, INDEX_PAGE_BYTES, dtype=torch.uint8, device=device),
            )
            for _ in range(2)
        ]
        q = norm_rope_store(qkv, key, weights, positions, slots, *caches[0], scales)
        own_key = None if key is None else key.clone()
        theirs = builtin.norm_rope_store(attention, qkv.clone(), own_key, positions, slots, *caches[1], scales)
        pairs = {"query": (q[0], theirs[0]), "KV": (caches[0][0], caches[1][0]), "index keys": (caches[0][1], caches[1][1])}
        if scales is not None:
            x = rows_of(kind, rows, weights.q_norm.shape[0], device=device)
            inputs = zip(quantise(x, scales), builtin.quantised(x, scales), strict=True)
            pairs |= dict(zip(("input", "scales of the input"), inputs, strict=True))
            pairs["scales of the query"] = q[1], theirs[1]
        q_rope = rows_of(kind, rows, attention.num_local_heads, weights.rope, device=device)
        if indexer is None:
            ours = rope_query(q_rope, weights, positions)
            pairs["rotated query"] = (ours, builtin.rope_query(attention, q_rope.clone(), positions))
        else:
            query = rows_of(kind, rows, indexer.n_heads, GROUP, device=device)
            gates = torch.randn(rows, indexer.n_heads, device=device)
            if weights.index_fused:  # as columns of a product that has the index key's before them
                gates = torch.cat((torch.zeros_like(key), gates.bfloat16()), dim=1)[:, GROUP:]
            ours = rope_quantise(query, gates, q_rope, weights, positions)
            theirs = builtin.rope_quantise(attention, query.clone(), gates, q_rope.clone(), positions)
            if not weights.index_fused:  # prefills in pieces have these alone
                alone = torch.zeros_like(caches[0][1])
                store_index_keys(key, weights, positions, slots, alone)
                pairs["index keys alone"] = (alone, caches[1][1])
                parts = zip(index_queries(query, gates, weights, positions), theirs, strict=False)
                pairs |= dict(zip(("index query alone", "gates alone"), parts, strict=True))
            pairs |= dict(zip(("index query", "gates", "rotated query"), zip(ours, theirs, strict=True), strict=True))
        found += [f"{name} of {kind} rows" for name, pair in pairs.items() if not same_bits(*pair)]
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))
