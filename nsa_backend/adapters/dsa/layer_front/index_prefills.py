"""Index queries and keys of prefills by two launches, where SGLang 0.5.23 has ten kernels a layer.

A prefill that is captured in pieces leaves its graph for the indexer of every layer. Of DeepSeek-V3.2, SGLang then rotates
queries by RoPE, by Hadamard, and quantises them in kernels of their own: each reads and writes 67 MB for 4096 tokens. These
launches write the same bits. GLM-5's indexers have two kernels of SGLang's.

A row of at most index_topk tokens selects all of them. Of such rows only the keys are made: neither queries nor scores.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.layers.attention.dsa import dsa_prefill_cuda_graph as sglangs

from nsa_backend.adapters import divided_indexer
from nsa_backend.adapters.dsa.layer_front.kept_input import KEPT
from nsa_backend.adapters.dsa.layer_front.projections import scales_of
from nsa_backend.adapters.dsa.layer_front.rule import weights_of
from nsa_backend.adapters.sglang_types import ForwardBatch, HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.kernels import norm_rope_store, rope_quantise
from nsa_backend.kernels.layer_front_weights import FrontWeights
from nsa_backend.kernels.projection_inputs import ALIGNED

logger = logging.getLogger(__name__)

MODULE = "sglang.srt.layers.attention.dsa.dsa_indexer"
NAME = "bcg_dsa_indexer_prefill_split"
"""What an indexer calls in a prefill that is captured in pieces."""

_LAYERS: WeakKeyDictionary[Any, tuple[Any, tuple[type, ...]]] = WeakKeyDictionary()
"""By indexer: its layer, and our attention backends."""


def take(layers: Iterable[Any], backends: tuple[type, ...]) -> None:
    """Have the indexers of these layers, which have our front, make queries and keys of prefills so."""
    served = [layer for layer in layers if layer.indexer is not None]
    for layer in served:
        _LAYERS[layer.indexer] = layer, backends
    if served:
        hook(f"{MODULE}.{NAME}", _in_pieces, HookType.AROUND)


def _in_pieces(original: Callable, **given: Any) -> None:
    """Around SGLang's piece outside of graphs. It is no other piece: what runs in it is decided in every replay.

    What the norm has quantised, in a graph, stays where it is until the piece has run: it is what the norm's replay writes.
    """
    indexer, x = sglangs.get_tc_piecewise_forward_context().dsa_indexers[given["layer_id"]], given["x"]
    if indexer in _LAYERS and not indexer.use_dsa_indexer_fusion:
        kept = KEPT.take(x, scales_of(_LAYERS[indexer][0].fused_qkv_a_proj_with_mqa))  # wk's too, as in the front
        if kept is not None and not len(x) % ALIGNED:
            given |= {"values": kept[0], "scales": kept[1].T}
    _piece()(**given)


@functools.cache
def _piece() -> Callable:
    return sglangs.eager_on_graph(True)(select)


def select(
    layer_id: int,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    topk_result: torch.Tensor,
    x_s: torch.Tensor | None = None,
    x_bf16: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """Write the selection of a prefill's rows to `topk_result`, and their index keys; SGLang's own where ours is not served.

    Beside SGLang's arguments: `values` and `scales`, float32 [groups, rows], are `x` in FP8 where the norm has quantised it.
    """
    context = sglangs.get_tc_piecewise_forward_context()
    batch, indexer = context.forward_batch, context.dsa_indexers[layer_id]
    if x_s is not None or not _serves(indexer, batch, topk_result):
        given = {"layer_id": layer_id, "x": x, "q_lora": q_lora, "positions": positions, "topk_result": topk_result}
        return sglangs.pcg_dsa_indexer_prefill_split(**given, x_s=x_s, x_bf16=x_bf16)
    metadata = sglangs.get_attn_backend().get_indexer_metadata(layer_id, batch)
    tokens = slice(batch.extend_num_tokens)  # of the graph's rows, those that are no padding
    fused = indexer.use_dsa_indexer_fusion
    divided = divided_indexer.rows_of_rank(batch) if divided_indexer.divides(fused=fused) else None
    group = None if divided is None else divided_indexer.ranks()
    among = (group.rank_in_group, group.world_size) if group else (0, 1)
    long = metadata.long_rows(indexer.index_topk, *among)
    if fused:
        from sglang.kernels.ops.quantization.act_quant_triton import act_quant

        gates = divided_indexer.store_fused(indexer, x, positions, batch, layer_id, tokens, act_quant)
        scored = functools.partial(divided_indexer.score_fused, indexer, q_lora, gates, positions)
    else:
        weights = weights_of(_LAYERS[indexer][0])
        quantised = None if values is None else (values, scales.T)
        gates = store(indexer, weights, x, positions, batch, layer_id, tokens, quantised)
        scored = functools.partial(score, indexer, weights, q_lora, gates, positions)
    if long is None:
        select_scored(indexer, batch, layer_id, scored(divided or tokens), metadata, topk_result)
    else:
        select_long(indexer, batch, layer_id, long, scored, topk_result)
    _tell(fused)
    return None


def store(
    indexer: Any,
    weights: FrontWeights,
    x: torch.Tensor,
    positions: torch.Tensor,
    batch: ForwardBatch,
    layer_id: int,
    tokens: slice,
    quantised: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Write the index keys of these tokens of x [rows, hidden], which may be there in FP8 too; gates of all rows."""
    key, gates = indexer.wk(quantised or x)[0][tokens], indexer._weights_proj_bf16_in_fp32_out(x)
    index_cache = _pool().get_index_k_with_scale_buffer(layer_id=layer_id)
    norm_rope_store.store_index_keys(key, weights, positions[tokens], batch.out_cache_loc[tokens], index_cache)
    return gates


def score(
    indexer: Any,
    weights: FrontWeights,
    q_lora: torch.Tensor,
    gates: torch.Tensor,
    positions: torch.Tensor,
    rows: slice | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of these rows in 8 bits, and their gates."""
    query = divided_indexer.query_of(indexer, q_lora, rows)
    return rope_quantise.index_queries(query, gates[rows], weights, positions[rows].contiguous())


def select_scored(
    indexer: Any,
    batch: ForwardBatch,
    layer_id: int,
    scored: tuple[torch.Tensor, torch.Tensor],
    metadata: Any,
    topk_result: torch.Tensor,
) -> None:
    """SGLang's `_get_topk_ragged` for these queries and gates, without its copies of selections to `topk_result`."""
    with metadata.writing(topk_result):
        indexer._get_topk_ragged(False, batch, layer_id, *scored, metadata, topk_result)


def select_long(
    indexer: Any,
    batch: ForwardBatch,
    layer_id: int,
    long: Any,
    scored: Callable[[slice | torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    topk_result: torch.Tensor,
) -> None:
    """Write the selection where some rows have no more tokens than are selected: only others are scored.

    Args:
        indexer, batch, layer_id: as SGLang's `_get_topk_ragged` has them.
        long: the batch's `LongRows` of `nsa_backend.indexer.metadata`.
        scored: queries and gates of some rows.
        topk_result: int32 [rows of the graph, topk].
    """
    whole = long.room(topk_result)
    mine = whole if long.ranks == 1 else whole.new_empty(long.own_count, whole.shape[1])
    if len(mine):
        select_scored(indexer, batch, layer_id, scored(long.own), long.metadata, mine)
    if long.ranks > 1:
        divided_indexer.gather(mine, whole)
        divided_indexer.tell(long.ranks)
    long.put(whole, topk_result)


def _serves(indexer: Any, batch: ForwardBatch, topk_result: torch.Tensor) -> bool:
    """Whether the launches do what SGLang's piece would here: of long requests, on a pool that keeps every index key."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    layer, backends = _LAYERS.get(indexer, (None, ()))
    return (
        layer is not None
        and isinstance(sglangs.get_attn_backend(), backends)
        and type(_pool()) is DSATokenToKVPool
        and topk_result.numel() > 0
        and not indexer.dsa_enable_prefill_cp
        and not indexer._should_skip_logits_computation(batch)
        and batch.out_cache_loc.is_contiguous()
    )


def _pool() -> Any:
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return get_token_to_kv_pool()


@functools.cache
def _tell(fused: bool) -> None:
    """The log has it once."""
    if fused:
        logger.info("nsa_backend: prefills in pieces score those rows alone that have more tokens than are selected")
    else:
        logger.info("nsa_backend: index queries and keys of prefills in pieces are a launch each")
