"""Block-FP8 experts of few tokens by this package's two launches, where SGLang's Triton runner has eight.

Unasked a server has them on Hopper, of experts as wide as a rank's under tensor parallel 4, 8 and 16.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.environment import asked
from nsa_backend.kernels import few_experts as kernels
from nsa_backend.kernels.layer_front_weights import GROUP
from nsa_backend.releases import few_experts_problem

logger = logging.getLogger(__name__)

SWITCH = "NSA_BACKEND_FEW_EXPERTS"
MODULE = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
MOST_TOKENS = {(8, 128): 8, (8, 256): 4, (9, 256): 2, (8, 512): 2}
"""Of a forward, by the experts that each token chooses and their width: with these an H200 was faster than with SGLang's."""
MOST_ASKED = 2
"""Of a forward, of any other experts where a user asks for the launches."""

SERVED = {
    "activation": "silu", "is_gated": True, "use_fp8_w8a8": True, "block_shape": [GROUP, GROUP],
    "use_int8_w8a8": False, "use_int8_w8a16": False, "use_int4_w4a16": False, "per_channel_quant": False,
    "apply_router_weight_on_input": False, "no_combine": False, "fuse_swiglu_interleaved": False, "defer_sum": False,
    "inplace": False, "b1": None, "b2": None, "w1_zp": None, "w2_zp": None, "a1_scale": None, "a2_scale": None, "a1_q": None,
    "gemm1_alpha": None, "gemm1_limit": None, "swiglu_limit": None,
}  # fmt: skip
"""Of SGLang's function, arguments that the launches serve with these values alone."""


def wanted(device_sm: int) -> bool:
    """Whether SGLang's Triton runner is to leave experts of few tokens to the launches on this GPU."""
    said = asked(SWITCH)
    return device_sm == 90 and few_experts_problem(device_sm) is None if said is None else said


def take() -> None:
    """Have SGLang's Triton runner leave experts of few tokens to them; once a process."""
    hook(f"{MODULE}.fused_experts", apart, HookType.AROUND)
    hook(f"{MODULE}.fused_experts_impl", experts, HookType.AROUND)


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
    """Around what chooses where sums go: those of few tokens never in the place of `hidden_states`.

    In captured forwards the shared expert reads that on another stream (`DeepseekV2MoE.forward_normal_dual_stream`), and no
    event says that it has when sums are written: SGLang's come seven launches later, ours one.
    """
    if moe_runner_config.inplace and len(hidden_states) <= max(MOST_TOKENS.values()):
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
    tell(most, count, width)
    return kernels.few_experts(
        hidden_states, of["w1"], of["w1_scale"], of["w2"], of["w2_scale"], of["topk_weights"], of["topk_ids"],
        factor=1.0 if of["routed_scaling_factor"] is None else of["routed_scaling_factor"], out=room_for_sums(hidden_states),
    )  # fmt: skip


def most_tokens(choices: int, width: int) -> int:
    """Of a forward that has the launches, by the experts that a token chooses and their width; 0 where none has."""
    return MOST_TOKENS.get((choices, width), MOST_ASKED if asked(SWITCH) else 0)


def serves(of: dict[str, Any]) -> bool:
    """Whether the launches compute what SGLang's function would with these arguments."""
    from sglang.srt.runtime_context import get_exec

    if any(of[name] != value for name, value in SERVED.items()):
        return False
    execution = get_exec()
    if execution.moe.enable_fused_moe_sum_all_reduce or execution.deterministic.enable_deterministic_inference:
        return False
    dtypes = {
        torch.bfloat16: ("hidden_states",), torch.float8_e4m3fn: ("w1", "w2"), torch.int32: ("topk_ids",),
        torch.float32: ("w1_scale", "w2_scale", "topk_weights"),
    }  # fmt: skip
    if any(of[name].dtype != dtype or not of[name].is_contiguous() for dtype, names in dtypes.items() for name in names):
        return False
    return kernels.problem(hidden=of["w1"].shape[2], width=of["w1"].shape[1] // 2) is None


def room_for_sums(hidden_states: torch.Tensor) -> torch.Tensor:
    """A tensor like `hidden_states`, where SGLang's runner has its own: in NCCL's memory with --enable-symm-mem."""
    from sglang.srt.distributed.device_communicators.pynccl_allocator import use_symmetric_memory
    from sglang.srt.layers.dp_attention import is_allocation_symmetric
    from sglang.srt.runtime_context import get_parallel

    with use_symmetric_memory(get_parallel().tp_group, disabled=not is_allocation_symmetric()):
        return torch.empty_like(hidden_states)


@functools.cache
def tell(tokens: int, count: int, width: int) -> None:
    """The log has it once a shape."""
    logger.info("nsa_backend: experts of up to %d tokens are two launches, %d experts of %d", tokens, count, width)
