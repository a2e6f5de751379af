"""Index scores of all rows by one call of DeepGEMM, where SGLang's indexer makes a call for as many rows as there are SMs.

Its pieces are for Blackwell's kernel, and made on Hopper too. In every layer each piece has a schedule made, and all scores are
copied into one tensor, whose rows are as wide as the page table: 168 MB for 64 requests that verify four rows in a context of
163840 tokens. Hopper's kernel takes any number of rows, as the indexer of 0.5.17 hands them over, by one schedule, which the
metadata launch has written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.dsa import dsa_indexer

from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook

MODULE = "sglang.srt.layers.attention.dsa.dsa_indexer"
CALLS = ("deepgemm_paged_mqa_logits_native", "deepgemm_paged_mqa_logits_split")
"""What the indexer hands its rows and its function that cuts them, for groups of rows and for single ones."""


def makes_pieces() -> bool:
    """Whether the installed indexer cuts rows by the number of SMs."""
    source = inspect.getsource(dsa_indexer.Indexer._get_topk_paged)
    return "batch_size <= self.sm_count" in source and all(name in source for name in CALLS)


def score_at_once() -> None:
    """Have the indexers of this process score all rows in one call; once a process."""
    for name in CALLS:
        hook(f"{MODULE}.{name}", at_once, HookType.AROUND)


def at_once(
    original: Callable[..., torch.Tensor], in_pieces: Callable[..., torch.Tensor], *arguments: Any, **options: Any
) -> torch.Tensor:
    """Around a function of `CALLS`, whose first argument is the one that cuts rows; that goes on serving no rows at all."""

    def scores(q: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        whole = dsa_indexer.resolve_fp8_paged_mqa_logits_fn() if len(q) else in_pieces
        return whole(q, *others, **more)

    return original(scores, *arguments, **options)
