"""Memory that all captured graphs of a rank share: page tables over one request-to-token pool, padded queries.

A table row of 163840 tokens takes 640 KiB, so a table a backend (target_verify, draft steps, draft_extend) is the largest thing
this package would allocate. One is enough: every captured graph writes the rows it reads before it reads them, and SGLang
launches the graphs of a rank on one stream, one after the other. Two-batch overlap interleaves backends within a graph, so
each then has a table of its own; PD multiplexing, which has two streams, is refused at start.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

_blocks: dict[tuple, list[torch.Tensor]] = {}
"""The largest last. None is given back: a graph holds addresses, and nothing of what lies there."""


def shared_rows(owner: Hashable, rows: int, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, *shape], zeros when new, the same memory for every caller of the same `owner` as long as it is large enough.

    A larger request gets new memory, and later callers share that; graphs captured before keep theirs.
    """
    blocks = _blocks.setdefault((owner, shape, dtype, device), [])
    if not blocks or blocks[-1].shape[0] < rows:
        blocks.append(torch.zeros(rows, *shape, dtype=dtype, device=device))
    return blocks[-1][:rows]
