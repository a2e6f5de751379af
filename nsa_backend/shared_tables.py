"""One replay page table for all captured graphs over one request-to-token pool.

A table row of 163840 tokens takes 640 KiB, so a table a backend (target_verify, draft steps, draft_extend) is the largest thing
this package would allocate. One is enough: every captured graph writes the rows it reads before it reads them, and SGLang
launches the graphs of a rank on one stream, one after the other. (Two-batch overlap and PD multiplexing, which would not, are
refused at start.)
"""

from __future__ import annotations

import torch

_tables: dict[int, torch.Tensor] = {}


def replay_page_table(req_to_token: torch.Tensor, num_requests: int, width: int) -> torch.Tensor:
    """int32 [num_requests, width], the same memory for every caller over `req_to_token` as long as it is large enough.

    A larger request gets new memory, and later callers share that; graphs captured before keep theirs.
    """
    key = req_to_token.data_ptr()
    table = _tables.get(key)
    if table is None or table.shape[0] < num_requests or table.shape[1] != width or table.device != req_to_token.device:
        table = _tables[key] = torch.zeros(num_requests, width, dtype=torch.int32, device=req_to_token.device)
    return table[:num_requests]
