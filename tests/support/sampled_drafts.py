"""SGLang's own verification of chains of drafts, for tests with its CUDA kernels and with stand-ins for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def verified(info: Any, logits: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int32 [rows, D], accepted ones int32 [rows]).

    Args:
        info: SGLang's SamplingBatchInfo of the rows, or what has the fields of one that its verification reads.
        logits: float32 [rows, D, vocabulary]; left as they are.
        drafts: int64 [rows, D].
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative import eagle_utils

    (rows, depth), device = drafts.shape, drafts.device
    chain = torch.arange(depth, device=device).repeat(rows, 1)
    nowhere = torch.full_like(chain, -1)
    verify = SimpleNamespace(
        draft_token=drafts.flatten(),
        draft_token_num=depth,
        max_tree_depth=depth,
        tree_topk=1,
        draft_probs=None,
        retrieve_index=torch.arange(rows * depth, device=device).view(rows, depth),
        retrieve_next_token=torch.where(chain < depth - 1, chain + 1, nowhere),
        retrieve_next_sibling=nowhere,
    )
    batch = SimpleNamespace(
        device=device,
        forward_mode=ForwardMode.TARGET_VERIFY,
        sampling_info=info,
        seq_lens=torch.ones(rows, dtype=torch.int64, device=device),
        return_logprob=False,
    )
    output = SimpleNamespace(next_token_logits=logits.reshape(rows * depth, -1).clone())
    tokens, accepted, _ = eagle_utils.eagle_sample(verify, batch, output)
    return tokens.view(rows, depth), accepted
