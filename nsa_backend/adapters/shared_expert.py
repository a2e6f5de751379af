"""The shared expert of a layer, where SGLang has it apart from the others: their launches add what it gives.

A layer that is captured has the others first, with the shared one on another stream. The launches of few tokens then have its
weights among theirs, and those of more leave their sums to whoever adds both, once the streams have met. In prefills it comes
first, and sums of many tokens add what it gave. SGLang has a launch of its own for that, which reads and writes all hidden
states once more. SGLang captures prefills in pieces, each on one stream; one that is captured whole may have both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from nsa_backend.adapters.dsa.layer_front.projections import product, scales_of
from nsa_backend.environment import switched_on
from nsa_backend.kernels import few_experts as kernels
from nsa_backend.kernels.choice_sums import choice_sums
from nsa_backend.kernels.few_experts import ExpertWeights

MANY = 1025
"""Tokens of a forward from which on it comes first: no graph that has it on another stream has as many."""
GO_ON = "set NSA_BACKEND_FEW_EXPERTS=0, and tell us"


@dataclasses.dataclass
class Unsummed:
    """What experts of some tokens gave, until it is added up."""

    of_choices: torch.Tensor  # bfloat16 [tokens, choices, hidden]
    factor: float
    out: torch.Tensor  # bfloat16 [tokens, hidden], nothing yet
    chosen: torch.Tensor | None  # int32 [tokens, choices] where those below 0 gave nothing


@dataclasses.dataclass
class SharedExpert:
    """Of the layer that runs."""

    weights: ExpertWeights | None = None  # where the others come first and may have them among theirs
    follows: bool = False  # whether the others come first, and what adds both comes last
    given: torch.Tensor | None = None  # once it has run
    added: bool = False  # by the others' launches
    unsummed: Unsummed | None = None  # of the others, where both are to be one launch


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
    both_apart = asks_for_both(options)
    follows = not both_apart and layer.shared_experts is not None and not layer._shared_expert_tp1 and len(hidden_states) > 0
    shared = SharedExpert(None if both_apart else weights_of(layer), follows)
    found = _while_running(shared, original, layer, hidden_states, *arguments, **options)
    if shared.unsummed is not None:
        raise RuntimeError(f"the sums of a layer's experts wait for its shared expert, and SGLang adds nothing: {GO_ON}")
    return found


def prefill_layer(
    original: Callable[..., Any], layer: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any
) -> Any:
    """Around a layer whose shared expert may come first.

    A prefill that is captured whole has it on another stream, as captured decode has, where a user asks for such prefills.
    """
    if on_two_streams(layer, hidden_states, options):
        del options["skip_shared_experts"]
        return layer.forward_normal_dual_stream(hidden_states, *arguments, **options)
    apart = asks_for_both(options) or layer._shared_expert_tp1
    if apart or len(hidden_states) < MANY or torch.compiler.is_compiling():
        return original(layer, hidden_states, *arguments, **options)
    return _while_running(SharedExpert(), original, layer, hidden_states, *arguments, **options)


def on_two_streams(layer: Any, hidden_states: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether a layer of a prefill has its shared expert on another stream: what SGLang asks of a captured one, and our own."""
    from nsa_backend.adapters.dsa.layer_front.prefills import SWITCH, recorded  # which imports what 0.5.12 has not

    if recorded() is None or not switched_on(SWITCH) or options.get("skip_shared_experts", True):
        return False
    return layer.alt_stream is not None and layer.num_fused_shared_experts == 0 and len(hidden_states) > 0


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


def leave_sums(of_choices: torch.Tensor, factor: float, out: torch.Tensor, chosen: torch.Tensor | None) -> bool:
    """Whether what experts gave, bfloat16 [tokens, choices, hidden], is added up with what the shared one gives, into `out`.

    `chosen` says which choices gave nothing, as `choice_sums` takes it.
    """
    shared = running()
    if shared is None or not shared.follows:
        return False
    shared.unsummed = Unsummed(of_choices, factor, out, chosen)
    return True


def add(
    original: Callable[..., torch.Tensor], experts: Any, routed: torch.Tensor, given: torch.Tensor | None, *more: Any
) -> torch.Tensor:
    """Around what adds both.

    Raises:
        RuntimeError: something else is to be added than what the sums have or are to have.
    """
    shared = running()
    if shared is not None and shared.unsummed is not None:
        left, shared.unsummed = shared.unsummed, None
        same = routed.data_ptr() == left.out.data_ptr() and routed.shape == left.out.shape  # SGLang's is a view
        if given is None or given is not shared.given or not same:
            raise RuntimeError(f"the sums of a layer's experts wait for its shared expert, and SGLang adds others: {GO_ON}")
        return choice_sums(left.of_choices, left.factor, given, routed, left.chosen)
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
