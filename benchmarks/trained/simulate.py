"""What a server should accept, by the trainer's own forward: drafts along a text that the target itself has written greedily.

Greedy verification accepts a draft where it equals the target's token, so the text decides every round. It is an account of
the MTP layer that shares no code with SGLang, for draft steps that see what they should and for such that do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_backend.benchmarks.trained.model import TrainedModel

VISIBLE = {
    "ours": lambda length, step: length + step + 1,
    "shared": lambda length, step: length + 1,
    "builtin": lambda length, step: length,
}
"""Tokens that draft step i of a round at length L attends to, by side: its own length, L + 1 for all, L for all."""


@torch.no_grad()
def accepted(model: TrainedModel, prompt: list[int], output: list[int], steps: int, side: str) -> list[int]:
    """Rounds by correct drafts, a list of steps + 1 counts. Rounds that the end of `output` cuts are left out.

    Args:
        model: on the device to compute on.
        prompt: token ids.
        output: what the target adds to it, greedily; with `prompt` no longer than index_topk, so that nothing is selected.
        steps: N.
        side: a key of VISIBLE.
    """
    tokens = prompt + output
    if len(tokens) + steps > model.shape.index_topk:
        raise ValueError(f"{len(tokens)} tokens and {steps} drafts: beyond {model.shape.index_topk} the indexer selects")
    ids = torch.tensor([tokens], device=model.lm_head.weight.device)
    hidden = model.hidden(ids[:, :-1])
    base = model.mtp_hidden(ids[:, 1:], hidden)
    counts, length = [0] * (steps + 1), len(prompt)
    while length + steps < len(tokens):
        drafts = _drafts(model, ids, hidden, base, length, steps, VISIBLE[side])
        right = 0
        while right < steps and drafts[right] == tokens[length + 1 + right]:
            right += 1
        counts[right] += 1
        length += right + 1
    return counts


def _drafts(model: TrainedModel, ids: Tensor, hidden: Tensor, base: Tensor, length: int, steps: int, visible) -> list[int]:
    """The N drafts of the round whose KV cache holds `length` tokens and whose newest token is ids[length]."""
    state = base[:, length - 1 : length]
    drafts = [int(model.lm_head(state).argmax(-1))]
    inputs, states = ids[:, 1 : length + 1], hidden[:, :length]
    for step in range(steps - 1):
        inputs = torch.cat([inputs, inputs.new_tensor([[drafts[-1]]])], dim=1)
        states = torch.cat([states, state], dim=1)
        mask = _mask(length, step, visible).to(ids.device)
        state = model.mtp(model.embed(inputs), states, model.rope(length + step + 1), mask)[:, -1:]
        drafts.append(int(model.lm_head(state).argmax(-1)))
    return drafts


def _mask(length: int, step: int, visible) -> Tensor:
    """bool [1, 1, T, T]: causal for what is in the cache, and what each draft step so far was let see."""
    mask = torch.ones(length + step + 1, length + step + 1, dtype=torch.bool).tril()
    for earlier in range(step + 1):
        mask[length + earlier] = torch.arange(length + step + 1) < visible(length, earlier)
    return mask[None, None]
