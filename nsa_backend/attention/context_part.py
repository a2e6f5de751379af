"""A rank's part of the KV of every request (decode context parallel): its own of the selected slots, once a selection.

SGLang gathers the query heads of all ranks that divide a request's KV, asks each for attention to its part with all of them,
and joins the parts by their log-sum-exps. It expects those in the base that `is_mla_dcp_lse_base_on_e` says of a backend's
name: 2 for this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.kernels.local_slots import local_slots
from nsa_backend.kernels.partial_lse import partial_lse


@dataclass(frozen=True, slots=True)
class Selection:
    """What tells one selection from others."""

    chosen: torch.Tensor  # what the indexer returned
    metadata: Any  # of the forward
    layer_id: int


class ContextPart:
    """Rank `rank` of `ranks` that divide slots among them."""

    def __init__(self, ranks: int, rank: int):
        self.ranks, self.rank = ranks, rank
        self._at: Selection | None = None
        self._kept: tuple[Selection, torch.Tensor, torch.Tensor] | None = None

    def at(self, chosen: torch.Tensor, metadata: Any, layer_id: int) -> ContextPart:
        """This part at one layer, which attends with what its indexer has `chosen`, or an earlier layer's."""
        self._at = Selection(chosen, metadata, layer_id)
        return self

    def own(self, inputs: SparseInputs) -> SparseInputs:
        """The same call over this rank's slots alone, in rows of its KV cache; lengths count them.

        One launch for each selection: a layer that attends with the selection of the layer before it finds it made.
        """
        kept, at = self._kept, self._at
        follows = (
            kept is not None
            and kept[0].chosen is at.chosen
            and kept[0].metadata is at.metadata
            and kept[0].layer_id == at.layer_id - 1
        )
        slots, counts = kept[1:] if follows else local_slots(inputs.topk_slots, self.ranks, self.rank)
        self._kept = at, slots, counts
        # Schedules and sums of the forward are of all slots of its rows.
        return replace(inputs, topk_slots=slots, nsa_cache_seqlens=counts, nsa_cu_seqlens_k=None, schedule=None)


def joinable(out: torch.Tensor, lse: torch.Tensor, own: SparseInputs, *, natural: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`SparseAttention.forward_part`'s answer from a kernel's.

    Args:
        out: [rows, heads, latent].
        lse: float32 [rows, heads] with any strides.
        own: the call's inputs, as `ContextPart.own` makes them.
        natural: whether the kernel takes logarithms in base e; else in base 2.
    """
    return out, partial_lse(out, lse, own.nsa_cache_seqlens, natural=natural)
