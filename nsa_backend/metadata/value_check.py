"""The check of NSA_BACKEND_CHECK=1: values of a batch, before its metadata launch reads them. Waits for the GPU; for debugging.

The launch itself checks shapes, dtypes, devices and strides alone. What it cannot see is a request slot, a length or a page
entry that points outside its pool, and such a value reads or writes memory of others.
"""

from __future__ import annotations

import torch

from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.plan import MetadataPlan


class ValueCheck:
    """Holds the bounds; raises ValueError that names the first request row, field and value outside of them."""

    def __init__(self, req_to_token: torch.Tensor, num_kv_slots: int):
        """`num_kv_slots` counts the tokens that the KV pool has memory for, its padding page included."""
        self._req_to_token = req_to_token
        self._num_kv_slots = num_kv_slots

    def check(self, plan: MetadataPlan, inputs: BatchInputs) -> None:
        """Check one batch."""
        seq_lens, req_pool_indices = inputs.seq_lens, inputs.req_pool_indices
        pool, width = self._req_to_token.shape
        _within("req_pool_indices", req_pool_indices, 0, pool - 1, f"the request pool of {pool} rows")
        _within("seq_lens", seq_lens, 0, width, f"the {width} tokens of a request table row")
        if plan.ragged:
            _within("extend_lens", inputs.extend_lens, 0, plan.num_rows, f"the {plan.num_rows} query rows of the batch")
        reach = (seq_lens.long() + plan.table_offset).clamp(1, width)
        table = self._req_to_token[req_pool_indices.long()]
        read = torch.arange(width, device=table.device) < reach[:, None]
        outside = read & ((table < 0) | (table >= self._num_kv_slots))
        if outside.any():
            row, column = outside.nonzero()[0].tolist()
            raise ValueError(
                f"NSA_BACKEND_CHECK=1: request row {row}: token {column} has KV slot {int(table[row, column])}, which is "
                f"outside the KV pool of {self._num_kv_slots} slots"
            )


def _within(name: str, values: torch.Tensor, least: int, most: int, what: str) -> None:
    outside = (values < least) | (values > most)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(f"NSA_BACKEND_CHECK=1: request row {row}: {name} is {int(values[row])}, which is outside {what}")
