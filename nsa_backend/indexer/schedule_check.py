"""A check at start, on a GPU: the installed DeepGEMM must divide its work as the metadata kernel does."""

from __future__ import annotations

import functools

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.kernels.metadata_torch import paged_mqa_schedule

LENGTHS = ((1,), (1, 300, 70_000, 64, 5), (257,) * 140)
"""Fewer segments than SMs, and more than divide evenly."""


@functools.cache
def check_schedule(num_sms: int, surplus_last: bool) -> None:
    """Raise ValueError where DeepGEMM's schedule is not ours: an SM without work could start past the lengths of the batch."""
    for lengths in LENGTHS:
        lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        if not torch.equal(paged_mqa_schedule(lens, num_sms, surplus_last), adapter.deep_gemm_schedule(lens)):
            raise ValueError(
                "the installed sgl-deep-gemm divides paged-MQA work by a rule that nsa_backend does not know, and its kernel "
                f"might read past the batch: install what SGLang pins, or {adapter.WAY_BACK}"
            )
