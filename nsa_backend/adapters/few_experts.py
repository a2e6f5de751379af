"""Block-FP8 experts of few tokens by this package's two launches, where SGLang's Triton runner has eight.

Unasked a server has them of experts as wide as a rank's under tensor parallel 4, 8 and 16. A shared expert that SGLang has not
put among the others is one more choice of every token.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from nsa_backend.adapters import shared_output
from nsa_backend.adapters.dsa.layer_front.projections import product, scales_of
from nsa_backend.environment import switched_on
from nsa_backend.kernels import few_experts as kernels
from nsa_backend.kernels.few_experts import ExpertWeights

logger = logging.getLogger(__name__)

SWITCH = "NSA_BACKEND_FEW_EXPERTS"
MOST_TOKENS = {(8, 128): 8, (8, 256): 4, (9, 256): 2, (8, 512): 2}
"""Of a forward, by the experts that each token chooses and their width: with these an H200 was faster than with SGLang's."""
MOST_ASKED = 2
"""Of a forward, of any other experts where a user asks for the launches."""


@dataclasses.dataclass
class Shared:
    """The shared expert of the layer that runs."""

    weights: ExpertWeights
    added: bool = False  # whether the others' launches have had it


_SHARED: ContextVar[Shared | None] = ContextVar("shared expert", default=None)


def serves(x: torch.Tensor, weights: ExpertWeights, chosen: torch.Tensor) -> bool:
    """Whether these tokens have the launches."""
    few = len(x) <= most_tokens(chosen.shape[1], weights.width)
    return few and kernels.problem(hidden=x.shape[1], width=weights.width) is None


def most_tokens(choices: int, width: int) -> int:
    """Of a forward that has the launches, by the experts that a token chooses and their width; 0 where none has."""
    return MOST_TOKENS.get((choices, width), MOST_ASKED if switched_on(SWITCH) else 0)


def run(
    x: torch.Tensor, weights: ExpertWeights, shares: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor, *, factor: float
) -> torch.Tensor:
    """`kernels.few_experts`, with the layer's shared expert where that is as wide as the others."""
    shared = _SHARED.get()
    if shared is not None and shared.weights.first.shape != weights.first.shape[1:]:
        shared = None
    tell(most_tokens(chosen.shape[1], weights.width), len(weights.first), weights.width, shared is not None)
    one = None if shared is None else shared.weights
    found = kernels.few_experts(x, weights, shares, chosen, factor=factor, shared=one, out=out)
    if shared is not None:
        shared.added = True
    return found


def captured_layer(
    original: Callable[..., Any], layer: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any
) -> Any:
    """Around a layer that is captured, whose experts come first: those of few tokens have the shared one among them.

    A caller that asks for what both give apart has it so.
    """
    if torch.compiler.is_compiling():
        return original(layer, hidden_states, *arguments, **options)
    apart = options.get("return_moe_output") or options.get("leave_output_sum")
    few = len(hidden_states) <= max(MOST_TOKENS.values())
    weights = shared_expert(layer) if few and not apart else None
    token = _SHARED.set(None if weights is None else Shared(weights))
    try:
        return original(layer, hidden_states, *arguments, **options)
    finally:
        _SHARED.reset(token)


def shared_apart(
    original: Callable[..., torch.Tensor | None], layer: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor | None:
    """Around a layer's shared expert: nothing is left to add where the others' launches have added it."""
    shared = None if torch.compiler.is_compiling() else _SHARED.get()
    added = shared is not None and shared.added
    return None if added else shared_output.keep(original(layer, hidden_states, *arguments, **options))


def shared_expert(layer: Any) -> ExpertWeights | None:
    """The weights of a layer's shared expert, or None where the launches cannot serve it or it is among the others."""
    expert = layer.shared_experts
    if expert is None or layer._shared_expert_tp1 or expert.swiglu_limit is not None:
        return None
    try:
        scales, of_second = scales_of(expert.gate_up_proj), scales_of(expert.down_proj)
    except ValueError:  # other formats, and LoRA: SGLang's layer serves them
        return None
    if scales is None or scales is not of_second:
        return None
    weights = ExpertWeights(*product(expert.gate_up_proj), *product(expert.down_proj), scales)
    plain = all(tensor.is_contiguous() for tensor in weights[:4]) and weights.first_scales.dtype == torch.float32
    return weights if plain and kernels.problem(weights.first.shape[1], weights.width) is None else None


@functools.cache
def tell(tokens: int, count: int, width: int, shared: bool) -> None:
    """The log has it once a shape."""
    more = " and the shared one" if shared else ""
    logger.info("nsa_backend: experts of up to %d tokens are two launches, %d experts of %d%s", tokens, count, width, more)
