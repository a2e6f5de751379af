"""One captured graph's calls, for ours and for SGLang's own backend alike: what comes before a replay, and what it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from nsa_backend.adapters.sglang_types import ForwardMode
from nsa_backend.testing.calls import calls

MODES = {
    "decode": ForwardMode.DECODE,
    "target_verify": ForwardMode.TARGET_VERIFY,
    "draft_extend_v2": ForwardMode.DRAFT_EXTEND_V2,
}
if "DRAFT_EXTEND" in ForwardMode.__members__:  # spec v1, which is gone since 0.5.17
    MODES["draft_extend_v1"] = ForwardMode.DRAFT_EXTEND
"""The paged modes of the installed release."""

DRAFT_EXTEND = MODES.get("draft_extend_v1", MODES["draft_extend_v2"])
"""The one of its draft-extend modes that SGLang captures by itself."""


def static_batch(seq_lens: torch.Tensor, req_pool_indices: torch.Tensor, num_accepted: int) -> SimpleNamespace:
    """A graph runner's tensors for `seq_lens` of any integer dtype; every request accepted `num_accepted` tokens."""
    bs = seq_lens.shape[0]
    accepted = torch.full((bs,), num_accepted, dtype=torch.int32, device=seq_lens.device)
    return SimpleNamespace(
        batch_size=bs,
        seq_lens=seq_lens.to(calls.LENGTHS_DTYPE),
        req_pool_indices=req_pool_indices,
        spec_info=SimpleNamespace(num_accept_tokens=accepted),
        forward_mode=ForwardMode.DECODE,
        **calls.host_lengths(seq_lens),
    )


class Captured:
    """One mode of one backend for one batch size: `replay` is called before the graph, `in_graph` is what the graph holds."""

    def __init__(self, backend: Any, batch: SimpleNamespace, mode: ForwardMode, rows: int):
        """Calls what SGLang calls before a capture; `init_cuda_graph_state` was called before."""
        positions = torch.zeros(rows, dtype=torch.int64, device=batch.seq_lens.device)
        view = SimpleNamespace(**vars(batch) | {"forward_mode": mode, "positions": positions})
        calls.before_capture(backend, view)
        self.replay = calls.replay_call(backend, view)
        self.in_graph = calls.launch_call(backend, view)


class CapturedRound:
    """The same of a draft round."""

    def __init__(self, multi_step: Any, batch: SimpleNamespace):
        calls.before_round_capture(multi_step, batch)
        self.replay = calls.round_replay_call(multi_step, batch)
        self.in_graph = calls.round_launch_call(multi_step, batch)
