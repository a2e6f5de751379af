"""Block-FP8 experts by launches of this package, in the place of SGLang's Triton runner's.

A few tokens have two launches in all (`few_experts`). More have both products in one launch of ours, or SGLang's products with
launches of ours around them, and those of a long prefill our second product or both (`expert_products`). SGLang's own function,
which knows every argument, serves all others.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from nsa_backend.adapters import expert_products, few_experts, shared_expert
from nsa_backend.adapters.dsa.layer_front.kept_input import KEPT
from nsa_backend.adapters.few_experts import SWITCH
from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook, is_hooked
from nsa_backend.environment import asked
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.releases import few_experts_problem

RUNNER = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
LAYER = "sglang.srt.models.deepseek_v2.DeepseekV2MoE"
QUANTISES = f"{LAYER}._maybe_quant_moe_input_once"
ADDITION = "sglang.srt.models.deepseek_v2.maybe_fuse_routed_scale_and_shared_add"
CHOICES = "sglang.srt.layers.moe.topk._post_process_topk_ids"

SERVED = expert_products.FORM | {
    "activation": "silu", "is_gated": True, "apply_router_weight_on_input": False, "no_combine": False, "defer_sum": False,
    "fuse_swiglu_interleaved": False, "inplace": False, "b1": None, "b2": None, "w1_zp": None, "w2_zp": None, "a1_scale": None,
    "a2_scale": None, "a1_q": None, "gemm1_alpha": None, "gemm1_limit": None, "swiglu_limit": None,
}  # fmt: skip
"""Of SGLang's function, arguments that launches serve with these values alone."""
ANY_OF_MANY = "inplace", "a1_q", "a1_scale"
"""The same, of which a prefill's may have others."""
DTYPES = {
    "hidden_states": torch.bfloat16, "topk_weights": torch.float32, "topk_ids": torch.int32, "w1": torch.float8_e4m3fn,
    "w1_scale": torch.float32, "w2": torch.float8_e4m3fn, "w2_scale": torch.float32,
}  # fmt: skip

signature_of = functools.cache(inspect.signature)


def wanted(device_sm: int) -> bool:
    """Whether SGLang's Triton runner is to leave experts to launches of this package on this GPU."""
    said = asked(SWITCH)
    return device_sm == 90 and few_experts_problem(device_sm) is None if said is None else said


def take() -> None:
    """Have SGLang's Triton runner leave experts to them; once a process."""
    hook(f"{RUNNER}.fused_experts", apart, HookType.AROUND)
    hook(f"{RUNNER}.fused_experts_impl", experts, HookType.AROUND)
    hook(f"{LAYER}.forward_normal_dual_stream", shared_expert.captured_layer, HookType.AROUND)
    hook(f"{LAYER}._forward_shared_experts", shared_expert.apart, HookType.AROUND)
    hook(f"{LAYER}.forward_normal", shared_expert.prefill_layer, HookType.AROUND)
    hook(QUANTISES, quantised_once, HookType.AROUND)
    hook(ADDITION, shared_expert.add, HookType.AROUND)
    hook(CHOICES, choices_where_they_are, HookType.AROUND)


def apart(
    original: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Any,
    moe_runner_config: Any,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor:
    """Around what chooses where sums go: behind launches of this package never in the place of `hidden_states`.

    In captured forwards the shared expert reads that on another stream (`DeepseekV2MoE.forward_normal_dual_stream`), and no
    event says that it has when sums are written: SGLang's come seven launches later, ours fewer.
    """
    if moe_runner_config.inplace and len(hidden_states) < shared_expert.MANY:
        moe_runner_config = dataclasses.replace(moe_runner_config, inplace=False)
    return original(hidden_states, w1, w2, topk_output, moe_runner_config, *arguments, **options)


def experts(
    original: Callable[..., torch.Tensor], hidden_states: torch.Tensor, w1: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor:
    """Around what computes a layer's experts: bfloat16 [tokens, hidden].

    Arguments are looked at where some launch may serve them: a forward asks in every layer.
    """
    tokens, hidden = hidden_states.shape
    if tokens > few_experts.MOST and not expert_products.may_serve(hidden, len(w1), w1.shape[1] // 2):
        return original(hidden_states, w1, *arguments, **options)
    given = signature_of(original).bind(hidden_states, w1, *arguments, **options)
    given.apply_defaults()
    of = given.arguments
    if is_served(of):
        weights = ExpertWeights(of["w1"], of["w1_scale"], of["w2"], of["w2_scale"])
        gpus = expert_gpus() if of["filter_expert"] else 1
        expert_products.compile_ahead(weights, of["topk_ids"].shape[1], gpus)
        routed = of["topk_weights"], of["topk_ids"]
        factor = 1.0 if of["routed_scaling_factor"] is None else of["routed_scaling_factor"]
        if few_experts.serves(hidden_states, weights, of["topk_ids"]):
            return few_experts.run(hidden_states, weights, *routed, room_for_sums(hidden_states), factor=factor)
        if expert_products.serves(hidden_states, weights, of["topk_ids"], gpus):
            out = hidden_states if of["inplace"] else room_for_sums(hidden_states)
            of_norm = KEPT.take(hidden_states, Scales.EXACT) if tokens >= shared_expert.MANY else None
            quantised = of_norm if of["a1_q"] is None else (of["a1_q"], of["a1_scale"])
            more = {"quantised": quantised, "shared": shared_expert.take(hidden_states)}
            divided = {"filtered": of["filter_expert"], "gpus": gpus}
            return expert_products.run(hidden_states, weights, *routed, out, factor=factor, **divided, **more)
    return original(hidden_states, w1, *arguments, **options)


def quantised_once(original: Callable[..., Any], layer: Any, hidden_states: torch.Tensor) -> Any:
    """Around what quantises hidden states for a layer's shared expert and the others at once, or leaves that to each.

    SGLang's SGLANG_OPT_MOE_QUANT_ONCE, which is off there, is on for prefills that have our second product. Few tokens have
    launches that quantise. Where the norm has quantised, nobody does it again.
    """
    from sglang.srt.environ import envs

    switch = envs.SGLANG_OPT_MOE_QUANT_ONCE
    if switch.is_set():
        return original(layer, hidden_states)
    if not quantise_together(layer, len(hidden_states)):
        return None
    with switch.override(True):
        if KEPT.of(hidden_states, Scales.EXACT) is not None and layer._moe_quant_once_enabled():
            return KEPT.take(hidden_states, Scales.EXACT)
        return original(layer, hidden_states)


def quantise_together(layer: Any, tokens: int) -> bool:
    """Whether the shared expert and the others of a DeepseekV2MoE have so many hidden states in FP8 from one launch."""
    first = getattr(layer.experts, "w13_weight", None)
    many = tokens >= shared_expert.MANY and first is not None and sums_are_free()
    return many and expert_products.wanted(len(first), first.shape[1] // 2)


def take_quantised(layer: Any, tokens: int) -> bool:
    """Whether a layer's experts take so many hidden states in FP8 from the norm, in the form of SGLang's own quantisation.

    Where the shared expert is one of the others `experts` does, else both of them. Under DP attention experts have what ranks
    gathered, which no norm wrote.
    """
    from sglang.srt.environ import envs
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    switch = envs.SGLANG_OPT_MOE_QUANT_ONCE
    if (
        not is_hooked(QUANTISES)
        or not isinstance(layer, DeepseekV2MoE)
        or switch.is_set()
        or is_dp_attention_enabled()
        or not quantise_together(layer, tokens)
    ):
        return False
    if layer.num_fused_shared_experts:
        return True
    with switch.override(True):
        return layer._moe_quant_once_enabled()


def choices_where_they_are(
    original: Callable[..., tuple],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_config: Any,
    *arguments: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Around what maps chosen experts to those of ranks, of layers whose shared expert is one more choice of every token.

    With nothing to map SGLang copies all choices once more: to where they are already. Returns choices, their shares, and
    choices without the shared expert.
    """
    from sglang.srt.layers.moe import topk

    shared = topk_config.num_shared_topk_slots
    among_others = shared > 0 and topk_ids.shape[-1] == topk_config.top_k and not topk.has_per_rank_fused_shared_slots(shared)
    mapped = [options.get(name) is not None for name in ("expert_location_dispatch_info", "num_token_non_padded")]
    scaled = topk_config.fused_shared_experts_scaling_factor is not None
    if not among_others or any(mapped) or scaled or arguments or torch.compiler.is_compiling():
        return original(topk_ids, topk_weights, topk_config, *arguments, **options)
    topk.capture_routed_experts_if_allowed(topk_config, options["layer_id"], topk_ids)
    return topk_ids, topk_weights, topk_ids[:, :-shared]


def is_served(of: dict[str, Any]) -> bool:
    """Whether these are the arguments of block-FP8 experts and no more, by a server whose sums they may be.

    Shapes that contradict one another are SGLang's to refuse.
    """
    many = len(of["hidden_states"]) >= shared_expert.MANY
    if any(of[name] != value for name, value in SERVED.items() if not (many and name in ANY_OF_MANY)) or not sums_are_free():
        return False
    if (of["a1_q"] is None) != (of["a1_scale"] is None):
        return False
    fits = of["topk_weights"].shape == of["topk_ids"].shape and of["w1"].shape[2] == of["hidden_states"].shape[1]
    return fits and all(of[name].dtype == dtype and of[name].is_contiguous() for name, dtype in DTYPES.items())


def expert_gpus() -> int:
    """Among how many GPUs experts are divided, each with as many."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().moe_ep_size


def sums_are_free() -> bool:
    """Whether a server asks for no order of sums, and adds up what ranks have apart from experts."""
    from sglang.srt.runtime_context import get_exec

    execution = get_exec()
    return not (execution.moe.enable_fused_moe_sum_all_reduce or execution.deterministic.enable_deterministic_inference)


def room_for_sums(hidden_states: torch.Tensor) -> torch.Tensor:
    """A tensor like `hidden_states`, where SGLang's runner has its own: in NCCL's memory with --enable-symm-mem."""
    from sglang.srt.distributed.device_communicators.pynccl_allocator import use_symmetric_memory
    from sglang.srt.layers.dp_attention import is_allocation_symmetric
    from sglang.srt.runtime_context import get_parallel

    with use_symmetric_memory(get_parallel().tp_group, disabled=not is_allocation_symmetric()):
        return torch.empty_like(hidden_states)
