"""What a layer's shared expert gave before the others began, as in prefills: it is added where the others' sums are made.

SGLang adds it in a launch of its own, which reads and writes all hidden states once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

MANY = 1025
"""Tokens of a forward from which on this is so: no graph that keeps the shared expert on another stream has as many."""


@dataclasses.dataclass
class Output:
    """Of the shared expert of the layer that runs."""

    given: torch.Tensor | None = None
    added: bool = False  # to the others' sums


_OUTPUT: ContextVar[Output | None] = ContextVar("output of the shared expert", default=None)


def layer(original: Callable[..., Any], layer: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """Around a layer whose shared expert may come first. A caller that asks for what both give apart has it so."""
    apart = options.get("return_moe_output") or options.get("leave_output_sum") or layer._shared_expert_tp1
    if apart or len(hidden_states) < MANY or torch.compiler.is_compiling():
        return original(layer, hidden_states, *arguments, **options)
    token = _OUTPUT.set(Output())
    try:
        return original(layer, hidden_states, *arguments, **options)
    finally:
        _OUTPUT.reset(token)


def keep(given: torch.Tensor | None) -> torch.Tensor | None:
    """`given` by a shared expert, for the others' sums."""
    output = None if torch.compiler.is_compiling() else _OUTPUT.get()
    if output is not None:
        output.given = given
    return given


def take(hidden_states: torch.Tensor) -> torch.Tensor | None:
    """What is to be added to the sums of these tokens, which then nobody else adds."""
    output = _OUTPUT.get()
    if output is None or output.given is None or output.added:
        return None
    given = output.given
    if given.shape != hidden_states.shape or given.dtype != hidden_states.dtype or not given.is_contiguous():
        return None
    output.added = True
    return given


def add(
    original: Callable[..., torch.Tensor], experts: Any, routed: torch.Tensor, shared: torch.Tensor | None, *more: Any
) -> torch.Tensor:
    """Around what adds both.

    Raises:
        RuntimeError: something else is to be added than what the sums have.
    """
    output = None if torch.compiler.is_compiling() else _OUTPUT.get()
    if output is None or not output.added:
        return original(experts, routed, shared, *more)
    if shared is not output.given:
        raise RuntimeError("the sums of a layer's experts have its shared expert, and SGLang adds another tensor to them")
    return original(experts, routed, None, *more)
