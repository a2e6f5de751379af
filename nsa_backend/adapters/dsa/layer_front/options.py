"""What the front in two launches asks of a server's options."""

from __future__ import annotations

from typing import Any

from nsa_backend.adapters.option_rules import Rule
from nsa_backend.environment import asked
from nsa_backend.releases import layer_front_problem


def needed(attribute: str, option: str, served: tuple, advice: str | None = None) -> Rule:
    """What the front asks of an option."""
    return Rule(attribute, option, "", served, advice or f"drop {option}", everywhere=False)


NEEDED = (
    needed("disable_cuda_graph", "--disable-cuda-graph", (False,)),
    needed("enable_lora", "--enable-lora", (None, False)),
    needed("enable_two_batch_overlap", "--enable-two-batch-overlap", (False,)),
    needed("attn_cp_size", "--attn-cp-size", (None, 1), "drop --enable-prefill-cp or --attn-cp-size"),
    needed("fp8_gemm_runner_backend", "--fp8-gemm-backend", (None, "auto", "deep_gemm"), "pass --fp8-gemm-backend deep_gemm"),
)
"""Options under whose values a layer's projections are one sequence of launches on one rank."""


def server_problems(args: Any) -> list[str]:
    """One sentence for each reason why a server of these resolved arguments can have no such front."""
    problem = layer_front_problem()
    if problem is not None:
        return [problem]
    found = [f"{rule.option} keeps SGLang's front: {rule.advice} to have ours" for rule in NEEDED if not rule.serves(args)]
    if "trtllm" in (args.dsa_decode_backend, args.dsa_prefill_backend) and args.kv_cache_dtype == "fp8_e4m3":
        found.append("trtllm on an FP8 KV cache, which rotates by itself, keeps SGLang's front: choose another to have ours")
    return found


def dependent_problems(args: Any) -> list[str]:
    """One sentence for each reason why a server of these resolved arguments can have nothing that needs our front."""
    found = server_problems(args)
    if asked("NSA_BACKEND_LAYER_FRONT") is False:
        found.append("NSA_BACKEND_LAYER_FRONT=0 leaves SGLang's front, and they need ours: unset one")
    return found
