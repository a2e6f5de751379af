"""The router of a MoE layer with few tokens in one launch of this package, where SGLang has a GEMM and then the choice.

SGLang's layer asks its gate for logits and its `TopK` for the choice. The gate's logits are here one result of the launch whose
other results wait, for the layer that runs, until `TopK` asks for what these very logits choose. Where anything else asks, or
more is to be done with a choice, SGLang's own answers: logits are the same.

Where the experts of as many tokens of this layer were this package's launches before, the first of them is let begin early: it
waits. A server's first forwards of each size are no captures, so that graphs have it so.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch

from nsa_backend.adapters import few_experts
from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.environment import asked
from nsa_backend.kernels import router as kernels

logger = logging.getLogger(__name__)

SWITCH = "NSA_BACKEND_ROUTER"
LAYER = "sglang.srt.models.deepseek_v2.DeepseekV2MoE.forward"
GATE = "sglang.srt.models.deepseek_v2.MoEGate.forward"
SELECT = "sglang.srt.layers.moe.topk.select_experts"

SERVED = {
    "use_grouped_topk": True, "renormalize": True, "scoring_func": "sigmoid", "custom_routing_function": None,
    "fused_shared_experts_scaling_factor": None,
}  # fmt: skip
"""Of a layer's `TopKConfig`, fields that the launch serves with these values alone."""
OF_FLASHINFER = {"routed": 8, "kept": 4, "in_group": 32, "candidates": 128}
"""The most that FlashInfer's kernel takes, which SGLang calls where there are groups."""


@dataclasses.dataclass
class Routing:
    """The router of the layer that runs."""

    layer: Any
    choice: kernels.Choice
    routed: kernels.Routed | None = None  # once the gate was asked


@dataclasses.dataclass
class Gate:
    """What launches of a layer have in common: they come one after the other, those of two layers may not."""

    arrived: torch.Tensor
    before_ours: set[int] = dataclasses.field(default_factory=set)  # tokens whose experts had `few_experts` when they last ran


_ROUTING: ContextVar[Routing | None] = ContextVar("router", default=None)
_GATES: WeakKeyDictionary[torch.nn.Module, Gate] = WeakKeyDictionary()


def wanted(device_sm: int) -> bool:
    """Whether routers of few tokens are to be one launch on this GPU."""
    return device_sm == 90 and asked(SWITCH) is True


def take() -> None:
    """Have SGLang's MoE layers leave routers of few tokens to the launch; once a process."""
    hook(LAYER, layer_of_few, HookType.AROUND)
    hook(GATE, gate, HookType.AROUND)
    hook(SELECT, select, HookType.AROUND)


def layer_of_few(original: Callable[..., Any], layer: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """Around a MoE layer: its gate learns how its tokens choose, where they are few."""
    if torch.compiler.is_compiling():
        return original(layer, hidden_states, *arguments, **options)
    choice = choice_of(layer) if 0 < len(hidden_states) <= kernels.MOST_ROWS else None
    routing = None if choice is None else Routing(layer, choice)
    token = _ROUTING.set(routing)
    try:
        with few_experts.watched() as had:
            found = original(layer, hidden_states, *arguments, **options)
    finally:
        _ROUTING.reset(token)
    if routing is not None and routing.routed is not None:
        followed = any(chosen.data_ptr() == routing.routed.chosen.data_ptr() for chosen in had)
        sizes = _GATES[layer.gate].before_ours
        sizes.add(len(hidden_states)) if followed else sizes.discard(len(hidden_states))
    return found


def gate(
    original: Callable[..., torch.Tensor], module: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor:
    """Around what gives a layer's logits, float32 [tokens, experts]: the choice by them waits in the context."""
    if torch.compiler.is_compiling():
        return original(module, hidden_states, *arguments, **options)
    routing = _ROUTING.get()
    if routing is None or module is not routing.layer.gate or not fits(module.weight, hidden_states, routing.choice):
        return original(module, hidden_states, *arguments, **options)
    state = state_of(module)
    if state is None:
        return original(module, hidden_states, *arguments, **options)
    tell(routing.choice, len(module.weight))
    with memory_of_choices():
        routing.routed = kernels.route(
            hidden_states, module.weight.data, module.e_score_correction_bias.data, state.arrived, routing.choice,
            before_ours=len(hidden_states) in state.before_ours,
        )  # fmt: skip
    return routing.routed.logits


def select(
    original: Callable[..., Any], hidden_states: torch.Tensor, router_logits: torch.Tensor, topk_config: Any, **options: Any
) -> Any:
    """Around what chooses experts by logits: what the gate's launch chose by these, where nothing is to be done to it."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    routing = None if torch.compiler.is_compiling() else _ROUTING.get()
    more = any(value is not None for name, value in options.items() if name != "layer_id")
    if routing is None or routing.routed is None or router_logits is not routing.routed.logits or more:
        return original(hidden_states, router_logits, topk_config, **options)
    if topk_config is not routing.layer.topk.topk_config or topk_config.torch_native:
        return original(hidden_states, router_logits, topk_config, **options)
    return StandardTopKOutput(routing.routed.shares, routing.routed.chosen, router_logits)


def choice_of(layer: Any) -> kernels.Choice | None:
    """How the layer's tokens choose experts, or None where the launch cannot serve it, or others look at choices."""
    from sglang.srt.layers.moe.topk import TopK, TopKOutputFormat
    from sglang.srt.models.deepseek_v2 import MoEGate

    if type(layer.gate) is not MoEGate or type(layer.topk) is not TopK or layer._enable_a2a_moe:
        return None
    bias, config = layer.gate.e_score_correction_bias, layer.topk.topk_config
    if (
        bias is None
        or bias.dtype != torch.float32
        or config.correction_bias is not bias
        or layer.gate.e_score_correction_bias_vl is not None
    ):
        return None
    if config.output_format != TopKOutputFormat.STANDARD or layer.topk.enable_waterfill or layer.topk.is_torch_compile:
        return None
    if any(getattr(config, name) != value for name, value in SERVED.items()) or is_watched(layer.topk):
        return None
    return served(choice_by(config), len(layer.gate.weight))


def choice_by(config: Any) -> kernels.Choice:
    """What a layer's `TopKConfig` asks for."""
    from sglang.srt.layers.moe.topk import fused_shared_expert_weight

    folded, factor = bool(config.apply_routed_scaling_factor_on_output), config.routed_scaling_factor
    shared = config.num_shared_topk_slots
    return kernels.Choice(
        routed=config.top_k - shared,
        groups=config.num_expert_group,
        kept=config.topk_group,
        shared=shared,
        factor=float(factor) if folded and factor is not None else 1.0,
        shared_share=fused_shared_expert_weight(routed_scaling_factor=factor, fused_in_topk=folded),
    )


def served(choice: kernels.Choice, experts: int) -> kernels.Choice | None:
    """`choice` where SGLang would have it by the kernels that the launch computes alike, or None.

    With groups that is FlashInfer's. Without, SGLang's own router: FlashInfer's would have a single expert, and others have a
    shared one behind fewer than eight (`biased_grouped_topk_gpu`).
    """
    from sglang.srt.layers.moe import topk
    from sglang.srt.layers.moe.utils import has_per_rank_fused_shared_slots

    if has_per_rank_fused_shared_slots(choice.shared) or topk._SGLANG_EXPERIMENTAL_LORA_OPTI:
        return None
    if choice.groups > 1:
        most, in_group = OF_FLASHINFER, experts // choice.groups
        known = (
            getattr(topk, "fused_topk_deepseek", None) is not None
            and choice.routed <= most["routed"]
            and choice.kept <= most["kept"]
        )
        known &= in_group <= most["in_group"] and in_group * choice.kept <= most["candidates"]
        known &= choice.kept * choice.groups >= choice.routed
    else:
        known = choice.routed > 1 and experts <= 512 and (choice.shared == 0 or choice.routed + choice.shared > 8)
    return choice if known else None


def is_watched(topk: Any) -> bool:
    """Whether choices are changed or recorded behind SGLang's kernel, or made otherwise by its options."""
    from sglang.kernels.fused_op import get_fused_op_backend
    from sglang.srt.environ import envs
    from sglang.srt.eplb.expert_distribution import _ExpertDistributionRecorderNoop, get_global_expert_distribution_recorder
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    others = envs.SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK, envs.SGLANG_SIMULATE_UNIFORM_EXPERTS
    others += (envs.SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS,)
    return (
        any(part is not None for part in topk.routing_inputs())
        or get_global_experts_capturer() is not None
        or not isinstance(get_global_expert_distribution_recorder(), _ExpertDistributionRecorderNoop)
        or get_exec().deterministic.enable_deterministic_inference
        or get_fused_op_backend() is not None
        or any(option.get() for option in others)
    )


def fits(weight: torch.Tensor, hidden_states: torch.Tensor, choice: kernels.Choice) -> bool:
    """Whether the launch takes these tensors."""
    if {weight.dtype, hidden_states.dtype} != {torch.bfloat16} or hidden_states.dim() != 2:
        return False
    if not (weight.is_contiguous() and hidden_states.is_contiguous()) or hidden_states.shape[1] != weight.shape[1]:
        return False
    return kernels.problem(*weight.shape, choice, kernels.tile_for(len(hidden_states))) is None


def state_of(module: Any) -> Gate | None:
    """A gate's; None where it has none yet and a graph is captured, which would set its counter to zero in every replay."""
    if module not in _GATES:
        if module.weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        _GATES[module] = Gate(kernels.counter(module.weight))
    return _GATES[module]


def memory_of_choices() -> Any:
    """Where SGLang has choices: in NCCL's memory with --enable-symm-mem (`TopK.forward_cuda`)."""
    from sglang.srt.distributed.device_communicators.pynccl_allocator import use_symmetric_memory
    from sglang.srt.layers.dp_attention import is_allocation_symmetric
    from sglang.srt.runtime_context import get_parallel

    return use_symmetric_memory(get_parallel().tp_group, disabled=not is_allocation_symmetric())


@functools.cache
def tell(choice: kernels.Choice, experts: int) -> None:
    """The log has it once a choice."""
    more = f" of {choice.kept} in {choice.groups} groups" if choice.groups > 1 else ""
    more += " and the shared one" if choice.shared else ""
    logger.info(
        "nsa_backend: routers of up to %d tokens are one launch, %d of %d experts%s",
        kernels.MOST_ROWS, choice.routed, experts, more,
    )  # fmt: skip
