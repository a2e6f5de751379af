"""The inputs of a metadata launch: the tensors of a batch that travel together from SGLang to a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PADDING_SLOT = 0
"""The request-pool row of padding requests, which SGLang (0.5.17 to 0.5.23) gives no request and whose KV slots are all 0."""

PADDING_LENGTH = 1
"""Their length: DeepGEMM's schedule reads out of bounds when all lengths are 0."""


@dataclass(frozen=True)
class BatchInputs:
    """One batch, padding requests included. Under a CUDA graph these are the graph runner's static tensors."""

    seq_lens: torch.Tensor  # int32 | int64 [num_requests], contiguous; what SGLang calls seq_lens in the mode
    req_pool_indices: torch.Tensor  # int32 | int64 [num_requests], contiguous; rows of the request-to-token pool
    extend_lens: torch.Tensor | None = None  # int32 | int64 [num_requests], contiguous; rows of each request, where ragged

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]
