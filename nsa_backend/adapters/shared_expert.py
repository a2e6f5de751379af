"""The shared expert of a layer, where SGLang has it apart from the others: their launches add what it gives.

A layer that is captured has the others first, with the shared one on another stream. The launches of few tokens then have its
weights among theirs. In prefills it comes first, and sums of many tokens add what it gave: SGLang has a launch of its own for
that, which reads and writes all hidden states once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from nsa_backend.adapters.dsa.layer_front.projections import product, scales_of
from nsa_backend.kernels import few_experts as kernels
from nsa_backend.kernels.few_experts import ExpertWeights

MANY = 1025
"""Tokens of a forward from which on it comes first: no graph that has it on another stream has as many."""


@dataclasses.dataclass
class SharedExpert:
    """Of the layer that runs."""

    weights: ExpertWeights | None = None  # where the others come first and may have them among theirs
    given: torch.Tensor | None = None  # once it has run
    added: bool = False  # by the others' launches


_RUNNING: ContextVar[SharedExpert | None] = ContextVar("shared expert", default=None)


def running() -> SharedExpert | None:
    """That of the layer that runs, where the others' launches may add it."""
    return None if torch.compiler.is_compiling() else _RUNNING.get()


def captured_layer(
    original: Callable[..., Any], layer: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any
) -> Any:
    """Around a layer that is captured, whose experts come first."""
    if torch.compiler.is_compiling():
        return original(layer, hidden_states, *arguments, **options)
    shared = SharedExpert(None if asks_for_both(options) else weights_of(layer))
    return _while_running(shared, original, layer, hidden_states, *arguments, **options)


def prefill_layer(
    original: Callable[..., Any], layer: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any
) -> Any:
    """Around a layer whose shared expert may come first."""
    apart = asks_for_both(options) or layer._shared_expert_tp1
    if apart or len(hidden_states) < MANY or torch.compiler.is_compiling():
        return original(layer, hidden_states, *arguments, **options)
    return _while_running(SharedExpert(), original, layer, hidden_states, *arguments, **options)


def asks_for_both(options: dict[str, Any]) -> bool:
    """Whether a layer's caller wants what its shared expert and the others give apart."""
    return bool(options.get("return_moe_output") or options.get("leave_output_sum"))


def _while_running(shared: SharedExpert, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    token = _RUNNING.set(shared)
    try:
        return original(*arguments, **options)
    finally:
        _RUNNING.reset(token)


def apart(
    original: Callable[..., torch.Tensor | None], layer: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor | None:
    """Around the shared expert by itself: nothing is left to add where the others' launches have it among theirs."""
    shared = running()
    if shared is not None and shared.added:
        return None
    given = original(layer, hidden_states, *arguments, **options)
    if shared is not None:
        shared.given = given
    return given


def take(hidden_states: torch.Tensor) -> torch.Tensor | None:
    """What is to be added to the sums of these tokens, which then nobody else adds."""
    shared = running()
    if shared is None or shared.given is None or shared.added:
        return None
    given = shared.given
    if given.shape != hidden_states.shape or given.dtype != hidden_states.dtype or not given.is_contiguous():
        return None
    shared.added = True
    return given


def add(
    original: Callable[..., torch.Tensor], experts: Any, routed: torch.Tensor, given: torch.Tensor | None, *more: Any
) -> torch.Tensor:
    """Around what adds both.

    Raises:
        RuntimeError: something else is to be added than what the sums have.
    """
    shared = running()
    if shared is None or not shared.added:
        return original(experts, routed, given, *more)
    if given is not shared.given:
        raise RuntimeError("the sums of a layer's experts have its shared expert, and SGLang adds another tensor to them")
    return original(experts, routed, None, *more)


def weights_of(layer: Any) -> ExpertWeights | None:
    """Those of a layer's shared expert, or None where the launches cannot serve it or it is among the others."""
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
