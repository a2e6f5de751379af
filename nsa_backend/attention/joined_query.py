"""The query in one tensor, heads padded to what a kernel is built for, without clearing the padding at every call."""

from __future__ import annotations

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.config import AttentionConfig
from nsa_backend.kernels.join_query import join_query
from nsa_backend.metadata.graph_memory import shared_rows

WITHIN_SGLANGS = 2**31
"""Values from a row's first head to its last, which SGLang's kernel counts in 32 bits; heads may lie all rows apart."""


class QueryJoiner:
    """Joins q_nope and q_rope; one launch, SGLang's where no heads are padded, none where the query already is joined.

    Where heads are padded, captured forwards share one buffer whose padding heads were zeroed once: a layer's query is read
    before the next layer's is written, because a rank runs its graphs on one stream.
    """

    def __init__(self, config: AttentionConfig, padded_heads: int):
        """`padded_heads` is at least `config.num_heads`."""
        self.padded_heads = padded_heads
        self._pads = padded_heads > config.num_heads
        self._width = config.latent_dim + config.rope_dim
        self._device = config.device
        self._buffer: torch.Tensor | None = None

    def reserve(self, max_rows: int) -> None:
        """Keep the padded query of up to `max_rows` rows. A larger request gets new memory; graphs captured keep theirs."""
        if not self._pads:
            return
        self._buffer = shared_rows(
            "padded query", max_rows, self.padded_heads, self._width, dtype=torch.bfloat16, device=self._device
        )

    def join(self, inputs: SparseInputs) -> torch.Tensor:
        """[rows, padded heads, latent + rope]; the added heads are zero."""
        q_nope, q_rope = inputs.q_nope, inputs.q_rope
        if self._pads:
            return join_query(q_nope, q_rope, self._room(q_nope))
        if inputs.q_joined is not None:
            return inputs.q_joined
        rows, heads, _ = q_nope.shape
        if heads * max(q_nope.stride(1), q_rope.stride(1)) < WITHIN_SGLANGS:
            return adapter.concat_query(q_nope, q_rope)
        return join_query(q_nope, q_rope, q_nope.new_empty(rows, heads, self._width))

    def _room(self, q_nope: torch.Tensor) -> torch.Tensor:
        shape = (q_nope.shape[0], self.padded_heads, self._width)
        if self._buffer is not None and shape[0] <= self._buffer.shape[0] and q_nope.dtype == self._buffer.dtype:
            return self._buffer[: shape[0]]
        return q_nope.new_zeros(shape)
