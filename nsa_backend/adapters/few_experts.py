"""Block-FP8 experts of few tokens by this package's two launches, where SGLang's Triton runner has eight.

Unasked a server has them of experts as wide as a rank's under tensor parallel 4, 8 and 16. A shared expert that SGLang has not
put among the others is one more choice of every token.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from nsa_backend.adapters import shared_expert
from nsa_backend.environment import switched_on
from nsa_backend.kernels import early_experts
from nsa_backend.kernels import few_experts as kernels
from nsa_backend.kernels.few_experts import ExpertWeights

logger = logging.getLogger(__name__)

SWITCH = "NSA_BACKEND_FEW_EXPERTS"
MOST_TOKENS = {(8, 128): 8, (8, 256): 4, (9, 256): 4, (8, 512): 2}
"""Of a forward, by the experts that each token chooses and their width: with these an H200 was faster than with SGLang's."""
MOST = max(MOST_TOKENS.values())
MOST_ASKED = 2
"""Of a forward, of any other experts where a user asks for the launches."""


def serves(x: torch.Tensor, weights: ExpertWeights, chosen: torch.Tensor) -> bool:
    """Whether these tokens have the launches."""
    few = len(x) <= most_tokens(chosen.shape[1], weights.width)
    return few and kernels.problem(hidden=x.shape[1], width=weights.width) is None


def most_tokens(choices: int, width: int) -> int:
    """Of a forward that has the launches, by the experts that a token chooses and their width; 0 where none has."""
    unasked = MOST_TOKENS.get((choices, width), 0)
    return max(unasked, MOST_ASKED) if switched_on(SWITCH) else unasked


def launches_of(x: torch.Tensor, width: int, choices: int, shared: bool) -> Callable[..., torch.Tensor]:
    """Which launches compute them."""
    if not x.is_cuda or early_experts.problem(x.shape[1], width, choices, int(shared)) is not None:
        return kernels.few_experts
    return early_experts.early_experts


def run(
    x: torch.Tensor, weights: ExpertWeights, shares: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor, *, factor: float
) -> torch.Tensor:
    """`kernels.few_experts`, with the layer's shared expert where that is as wide as the others."""
    shared = shared_expert.running()
    one = None if shared is None else shared.weights
    if one is not None and one.first.shape != weights.first.shape[1:]:
        one = None
    choices, width = chosen.shape[1], weights.width
    tell(most_tokens(choices, width), len(weights.first), width, one is not None)
    found = launches_of(x, width, choices, one is not None)(x, weights, shares, chosen, factor=factor, shared=one, out=out)
    if one is not None:
        shared.added = True
    return found


@functools.cache
def tell(tokens: int, count: int, width: int, shared: bool) -> None:
    """The log has it once a shape."""
    more = " and the shared one" if shared else ""
    logger.info("nsa_backend: experts of up to %d tokens are two launches, %d experts of %d%s", tokens, count, width, more)
