"""Ranks that divide prefills, one after the other in one process: SGLang's own strategy, and a gather without a network.

The demo's model has one layer, so what a rank contributes to a gather follows from its tokens, and any rank can compute it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.cp import base, interleave, utils
from sglang.srt.runtime_context import get_parallel

from nsa_backend.demo.engine import Engine
from nsa_backend.demo.model import TinySparseMla
from nsa_backend.testing.calls import calls


@contextlib.contextmanager
def rank_of(ranks: int, rank: int) -> Iterator[None]:
    """This process as one of `ranks`, with what SGLang resolves --enable-prefill-cp --cp-strategy interleave to."""
    options = {"enable_prefill_cp": True, "cp_strategy": "interleave", "enable_cp_tp_group_sharing": False}
    widths = dict.fromkeys(("tp_size", "moe_tp_size", "attn_cp_size"), ranks) | {"attn_tp_size": 1}
    groups = dict.fromkeys(
        ("tp_group", "moe_tp_group", "attn_cp_group"), SimpleNamespace(world_size=ranks, pynccl_comm=None, cpu_group=None)
    )
    base._STRATEGY = None
    try:
        with get_parallel().override(**options, **widths, **groups, tp_rank=rank, moe_tp_rank=rank, attn_cp_rank=rank):
            yield
    finally:
        base._STRATEGY = None


class DividedMla(TinySparseMla):
    """The demo's model as SGLang's is with interleave: KV and index keys are gathered, queries are of the rank's tokens."""

    shards: list[tuple[torch.Tensor, torch.Tensor]]  # tokens and positions of every rank, with SGLang's padding
    rows: int  # of this rank, without it

    def _new_kv(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rotated = super()._new_kv(input_ids, positions, batch)
        with self._among_ranks(lambda *shard: torch.cat(super(DividedMla, self)._new_kv(*shard, batch), -1).squeeze(1)):
            return utils.get_cp_strategy().materialize_full_mla_kv(batch, None, latent, rotated)

    def _new_index_keys(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        keys = super()._new_index_keys(input_ids, positions, batch)
        with self._among_ranks(lambda *shard: super(DividedMla, self)._new_index_keys(*shard, batch)):
            return utils.get_cp_strategy().materialize_full_indexer_k_cache(keys, batch)

    def _index(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """Scores as SGLang's indexer has them: of as many rows as windows came, -1 in the others."""
        metadata = self.attention_backend(batch).get_indexer_metadata(0, batch)
        self.pool.set_index_k(batch.out_cache_loc, self._new_index_keys(input_ids, positions, batch))
        start, end = metadata.get_indexer_kvcache_range()
        rows = len(start)
        assert len(end) == len(metadata.get_token_to_batch_idx()) == len(metadata.get_seqlens_expanded()) == rows
        assert sum(metadata.get_dsa_extend_len_cpu()) == rows <= len(positions)
        query = torch.stack([torch.ones(rows), -positions[:rows].float(), torch.ones(rows)], dim=1)
        chosen = metadata.topk_transform(query @ self._gathered_keys(metadata).T, self.shape.index_topk, ks=start)
        return torch.cat([chosen, chosen.new_full((len(positions) - rows, chosen.shape[1]), -1)])

    @contextlib.contextmanager
    def _among_ranks(self, contribution: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """While one tensor is gathered: every rank has computed `contribution` of its shard."""

        def all_gather(gathered: torch.Tensor, mine: torch.Tensor) -> None:
            parts = [contribution(*shard) for shard in self.shards]
            assert torch.equal(mine[: self.rows], parts[get_parallel().attn_cp_rank][: self.rows])
            torch.cat(parts, out=gathered)

        original, interleave.attn_cp_all_gather_into_tensor = interleave.attn_cp_all_gather_into_tensor, all_gather
        try:
            yield
        finally:
            interleave.attn_cp_all_gather_into_tensor = original


def record(engine: Engine) -> list[torch.Tensor]:
    """The list that logits of every row of the target's forwards will be put in, in the order of SGLang's rows on this rank.

    Where SGLang divides a prefill, the model runs as its runner lets it.
    """
    model, outputs = engine.target, []

    def run(batch: Any) -> torch.Tensor:
        with calls.running(model.backend):
            if not utils.is_cp_active(batch):
                outputs.append(model.net.forward(batch.input_ids, batch.positions, batch))
                return outputs[-1]
            utils.prepare_cp_forward(batch)
            rank, net = get_parallel().attn_cp_rank, copy(model.net)
            net.__class__ = DividedMla
            net.shards = shards_of(batch)
            net.rows = batch.attn_cp_metadata.per_rank_logical_token[rank]
            outputs.append(net.forward(*net.shards[rank], batch)[: net.rows])
        return torch.zeros(len(batch.input_ids), model.net.shape.vocab)

    model.run = run
    return outputs


def shards_of(batch: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and positions of every rank, as SGLang's runner divides them."""
    found = []
    for rank in range(get_parallel().attn_cp_size):
        with get_parallel().override(tp_rank=rank, moe_tp_rank=rank, attn_cp_rank=rank):
            tokens = utils.cp_shard_hidden_states(batch.input_ids, batch)
            found.append((tokens, utils.cp_shard_position_ids(batch.positions, batch)))
    return found
