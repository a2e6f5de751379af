"""Block-FP8 experts of few tokens by this package's two launches, where SGLang's Triton runner has eight.

Unasked a server has them on Hopper, of experts as wide as a rank's under tensor parallel 4, 8 and 16. A shared expert that
SGLang has not put among the others is one more choice of every token.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from nsa_backend.adapters.dsa.layer_front.projections import product, scales_of
from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.environment import asked
from nsa_backend.kernels import few_experts as kernels
from nsa_backend.kernels.layer_front_weights import GROUP
from nsa_backend.releases import few_experts_problem

logger = logging.getLogger(__name__)

SWITCH = "NSA_BACKEND_FEW_EXPERTS"
MODULE = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
LAYER = "sglang.srt.models.deepseek_v2.DeepseekV2MoE"
MOST_TOKENS = {(8, 128): 8, (8, 256): 4, (9, 256): 2, (8, 512): 2}
"""Of a forward, by the experts that each token chooses and their width: with these an H200 was faster than with SGLang's."""
MOST_ASKED = 2
"""Of a forward, of any other experts where a user asks for the launches."""
MOST_OF_LAUNCHES = 128
"""Of a forward whose experts may have any launches of this package, `expert_activation`'s too."""

SERVED = {
    "activation": "silu", "is_gated": True, "use_fp8_w8a8": True, "block_shape": [GROUP, GROUP],
    "use_int8_w8a8": False, "use_int8_w8a16": False, "use_int4_w4a16": False, "per_channel_quant": False,
    "apply_router_weight_on_input": False, "no_combine": False, "fuse_swiglu_interleaved": False, "defer_sum": False,
    "inplace": False, "b1": None, "b2": None, "w1_zp": None, "w2_zp": None, "a1_scale": None, "a2_scale": None, "a1_q": None,
    "gemm1_alpha": None, "gemm1_limit": None, "swiglu_limit": None,
}  # fmt: skip
"""Of SGLang's function, arguments that the launches serve with these values alone."""


@dataclasses.dataclass
class Shared:
    """The shared expert of the layer that runs."""

    expert: kernels.Expert
    added: bool = False  # whether the others' launches have had it


_SHARED: ContextVar[Shared | None] = ContextVar("shared expert", default=None)


def wanted(device_sm: int) -> bool:
    """Whether SGLang's Triton runner is to leave experts of few tokens to the launches on this GPU."""
    said = asked(SWITCH)
    return device_sm == 90 and few_experts_problem(device_sm) is None if said is None else said


def take() -> None:
    """Have SGLang's Triton runner leave experts of few tokens to them; once a process."""
    hook(f"{MODULE}.fused_experts", apart, HookType.AROUND)
    hook(f"{MODULE}.fused_experts_impl", experts, HookType.AROUND)
    hook(f"{LAYER}.forward_normal_dual_stream", captured_layer, HookType.AROUND)
    hook(f"{LAYER}._forward_shared_experts", shared_apart, HookType.AROUND)


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
    if moe_runner_config.inplace and len(hidden_states) <= MOST_OF_LAUNCHES:
        moe_runner_config = dataclasses.replace(moe_runner_config, inplace=False)
    return original(hidden_states, w1, w2, topk_output, moe_runner_config, *arguments, **options)


def experts(
    original: Callable[..., torch.Tensor], hidden_states: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor:
    """Around what computes a layer's experts: bfloat16 [tokens, hidden]."""
    if len(hidden_states) > max(MOST_TOKENS.values()):
        return original(hidden_states, *arguments, **options)
    given = inspect.signature(original).bind(hidden_states, *arguments, **options)
    given.apply_defaults()
    of = given.arguments
    count, width = of["w1"].shape[0], of["w1"].shape[1] // 2
    most = most_tokens(of["topk_ids"].shape[1], width)
    if len(hidden_states) > most or not serves(of):
        return original(hidden_states, *arguments, **options)
    shared = _SHARED.get()
    if shared is not None and shared.expert.first.shape != of["w1"].shape[1:]:
        shared = None
    tell(most, count, width, shared is not None)
    found = kernels.few_experts(
        hidden_states, of["w1"], of["w1_scale"], of["w2"], of["w2_scale"], of["topk_weights"], of["topk_ids"],
        factor=1.0 if of["routed_scaling_factor"] is None else of["routed_scaling_factor"],
        shared=None if shared is None else shared.expert, out=room_for_sums(hidden_states),
    )  # fmt: skip
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
    expert = shared_expert(layer) if few and not apart else None
    token = _SHARED.set(None if expert is None else Shared(expert))
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
    return None if added else original(layer, hidden_states, *arguments, **options)


def shared_expert(layer: Any) -> kernels.Expert | None:
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
    weights = kernels.Expert(*product(expert.gate_up_proj), *product(expert.down_proj), scales)
    width, hidden = len(weights.first) // 2, weights.first.shape[1]
    plain = all(tensor.is_contiguous() for tensor in weights[:4]) and weights.first_scales.dtype == torch.float32
    return weights if plain and kernels.problem(hidden, width) is None else None


def most_tokens(choices: int, width: int) -> int:
    """Of a forward that has the launches, by the experts that a token chooses and their width; 0 where none has."""
    return MOST_TOKENS.get((choices, width), MOST_ASKED if asked(SWITCH) else 0)


def serves(of: dict[str, Any]) -> bool:
    """Whether the launches compute what SGLang's function would with these arguments."""
    return are_plain(of, SERVED) and kernels.problem(hidden=of["w1"].shape[2], width=of["w1"].shape[1] // 2) is None


def are_plain(of: dict[str, Any], served: dict[str, Any]) -> bool:
    """Whether these are the arguments of block-FP8 experts and no more, by a server whose sums they may be."""
    if not sums_are_free() or any(of[name] != value for name, value in served.items()):
        return False
    dtypes = {
        torch.bfloat16: ("hidden_states",), torch.float8_e4m3fn: ("w1", "w2"), torch.int32: ("topk_ids",),
        torch.float32: ("w1_scale", "w2_scale", "topk_weights"),
    }  # fmt: skip
    return all(of[name].dtype == dtype and of[name].is_contiguous() for dtype, names in dtypes.items() for name in names)


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


@functools.cache
def tell(tokens: int, count: int, width: int, shared: bool) -> None:
    """The log has it once a shape."""
    more = " and the shared one" if shared else ""
    logger.info("nsa_backend: experts of up to %d tokens are two launches, %d experts of %d%s", tokens, count, width, more)
