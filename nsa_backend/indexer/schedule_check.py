"""A check at start, on a GPU: the installed DeepGEMM must divide its work as the metadata kernel does."""

from __future__ import annotations

import functools

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.kernels.metadata_torch import paged_mqa_schedule

LENGTHS = ((1,), (1, 300, 70_000, 64, 5), (257,) * 140)
"""Fewer segments than SMs, and more than divide evenly."""


@functools.cache
def check_schedule(num_sms: int, surplus_last: bool, next_n: int = 1) -> None:
    """Raise ValueError where DeepGEMM's schedule is not ours: an SM without work could start past the lengths of the batch."""
    for lengths in LENGTHS:
        rows = torch.tensor([length + j for length in lengths for j in range(next_n)], dtype=torch.int32, device="cuda")
        ours = paged_mqa_schedule(rows[next_n - 1 :: next_n], num_sms, surplus_last)
        if not torch.equal(ours, adapter.deep_gemm_schedule(rows, next_n)):
            raise ValueError(
                "the installed sgl-deep-gemm divides paged-MQA work by a rule that nsa_backend does not know, and its kernel "
                f"might read past the batch: install what SGLang pins, or {adapter.WAY_BACK}"
            )
