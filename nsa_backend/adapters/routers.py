"""Routers of few tokens by one launch, where SGLang has a product and what chooses, and with more rows a sum between.

A layer's gate gives logits, and what they choose is kept until SGLang asks for it, of these logits and in this form: whatever
comes between, a map of experts or of padding, is SGLang's as before.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.kernels import router as kernels
from nsa_backend.kernels.router import Choice, Routed

logger = logging.getLogger(__name__)

CHOOSES = "sglang.srt.layers.moe.topk.biased_grouped_topk"

DEVICES = ("cuda",)
"""Where weights are that the launch reads."""

signature_of = functools.cache(inspect.signature)


@dataclass
class Kept:
    """What the last router has chosen."""

    routed: Routed | None = None
    asked: dict[str, Any] | None = None  # as SGLang will ask for it


KEPT = Kept()


class LayerRouter:
    """Of one layer, in the place of its gate's `forward`."""

    def __init__(self, layer: Any):
        """Of a DeepseekV2MoE that `problem` finds nothing against."""
        self.gate, config = layer.gate, layer.topk.topk_config
        self.own: Callable[..., torch.Tensor] = self.gate.forward
        self.choice, scaled = choice_of(config), bool(config.apply_routed_scaling_factor_on_output)
        factor = config.routed_scaling_factor or 1.0
        self.factors = {"factor": factor if scaled else 1.0, "of_shared": 1.0 if scaled else 1.0 / factor}
        self.asked = {
            "topk": config.top_k, "renormalize": True, "num_expert_group": config.num_expert_group,
            "topk_group": config.topk_group, "num_fused_shared_experts": int(self.choice.shared),
            "routed_scaling_factor": config.routed_scaling_factor,
            "apply_routed_scaling_factor_on_output": config.apply_routed_scaling_factor_on_output,
        }  # fmt: skip
        self.arrived = kernels.counter(self.gate.weight.device)

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        """float32 [tokens, experts]: logits."""
        fits = 0 < len(hidden_states) <= kernels.MOST_ROWS and hidden_states.dtype == torch.bfloat16
        if not fits or torch.compiler.is_compiling() or not hidden_states.is_contiguous():
            return self.own(hidden_states, *arguments, **options)
        weights = self.gate.weight, self.gate.e_score_correction_bias
        KEPT.routed = kernels.route(hidden_states, *weights, self.choice, self.arrived, **self.factors)
        KEPT.asked = self.asked
        return KEPT.routed.logits


def choice_of(config: Any) -> Choice:
    """How tokens choose by a TopKConfig."""
    shared = config.num_shared_topk_slots
    return Choice(config.top_k - shared, config.num_expert_group or 1, config.topk_group or 1, shared > 0)


def take(model: Any) -> int:
    """Have every router of `model` that can; the log says of how many, and why not of the others.

    Returns:
        How many have it.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    layers = [module for module in model.modules() if isinstance(module, DeepseekV2MoE)]
    taken = sum(isinstance(layer.gate.forward, LayerRouter) for layer in layers)
    if taken or not layers:  # the backends of a draft model come one after another
        return taken
    problems = [problem(layer) for layer in layers]
    served = [layer for layer, why in zip(layers, problems, strict=True) if why is None]
    for layer in served:
        weight = layer.gate.weight
        if weight.is_cuda:
            kernels.compile_ahead(weight.device, weight.shape[1], choice_of(layer.topk.topk_config))
        layer.gate.forward = LayerRouter(layer)
    if served:
        hook(CHOOSES, chosen, HookType.AROUND)
    reasons = "; ".join(f"{why} ({count})" for why, count in Counter(problems).items() if why is not None)
    logger.info(
        "nsa_backend: the router of %d of %d layers is one launch of up to %d tokens%s",
        len(served), len(layers), kernels.MOST_ROWS, f"; SGLang's own serves the others: {reasons}" if reasons else "",
    )  # fmt: skip
    return len(served)


def problem(layer: Any) -> str | None:
    """Why the router of a DeepseekV2MoE is SGLang's, or None."""
    from sglang.srt.layers.moe.topk import TopK, has_per_rank_fused_shared_slots
    from sglang.srt.models.deepseek_v2 import MoEGate
    from sglang.srt.runtime_context import get_exec

    gate, topk = layer.gate, layer.topk
    if type(gate) is not MoEGate or type(topk) is not TopK or "forward" in vars(gate):
        return f"it is {type(gate).__name__} and {type(topk).__name__}, or another extension's"
    weight, bias, config = gate.weight, gate.e_score_correction_bias, topk.topk_config
    alike = {"use_grouped_topk": True, "renormalize": True, "scoring_func": "sigmoid", "custom_routing_function": None}
    other = [name for name, value in alike.items() if getattr(config, name) != value]
    if other or bias is None or config.correction_bias is not bias:
        return f"it chooses by other rules ({', '.join(other) or 'another bias'})"
    if weight.dtype != torch.bfloat16 or bias.dtype != torch.float32 or weight.device.type not in DEVICES:
        return f"it has weights of {weight.dtype} on {weight.device} and a bias of {bias.dtype}"
    if get_exec().deterministic.enable_deterministic_inference:
        return "sums have an order that a user asked for"
    if config.num_shared_topk_slots > 1 or has_per_rank_fused_shared_slots(config.num_shared_topk_slots):
        return "ranks have shared experts among their own"
    return kernels.problem(*weight.shape, choice_of(config))


def chosen(original: Callable[..., tuple], *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Around what chooses experts of logits: (shares, chosen)."""
    if KEPT.routed is None or torch.compiler.is_compiling():
        return original(*arguments, **options)
    given = signature_of(original).bind(*arguments, **options)
    given.apply_defaults()
    routed, KEPT.routed = KEPT.routed, None
    of = given.arguments
    if of["gating_output"] is routed.logits and all(of.get(name) == value for name, value in KEPT.asked.items()):
        return routed.shares, routed.chosen
    return original(*arguments, **options)
