"""Block-FP8 experts as SGLang's Triton runner hands them over, on the CPU: arguments, what they give, and who serves them."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from nsa_backend.adapters import experts
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.few_experts_torch import few_experts_torch
from nsa_backend.kernels.layer_front_weights import GROUP

HIDDEN, WIDTH, EXPERTS, CHOICES = 1024, 128, 6, 3
SGLANGS = "SGLang's"
CLOSE = 5e-3
"""Relative; where one sum rounds to another FP8 scale, 128 values move."""


def arguments(tokens: int, width: int = WIDTH, choices: int = CHOICES, elsewhere: float = 0.0) -> dict:
    """Of SGLang's function, for block-FP8 experts, some of them another GPU's."""
    generator = torch.Generator().manual_seed(tokens + width)

    def fp8(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return 0.02 + 0.1 * torch.rand(shape, generator=generator)

    chosen = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :choices].int().contiguous()
    chosen[torch.rand(chosen.shape, generator=generator) < elsewhere] = -1
    return {
        "hidden_states": torch.randn(tokens, HIDDEN, generator=generator).bfloat16(),
        "w1": fp8(EXPERTS, 2 * width, HIDDEN), "w1_scale": scales(EXPERTS, 2 * width // GROUP, HIDDEN // GROUP),
        "w2": fp8(EXPERTS, HIDDEN, width), "w2_scale": scales(EXPERTS, HIDDEN // GROUP, width // GROUP),
        "topk_weights": torch.rand(tokens, choices, generator=generator), "topk_ids": chosen,
        "use_fp8_w8a8": True, "block_shape": [GROUP, GROUP], "routed_scaling_factor": 2.5, "filter_expert": elsewhere > 0,
    }  # fmt: skip


def near(found: torch.Tensor, given: dict, shared: ExpertWeights | None = None) -> bool:
    """Whether this is what the twin gives for these arguments."""
    weights = ExpertWeights(*(given[name] for name in ("w1", "w1_scale", "w2", "w2_scale")))
    routed = given["topk_weights"], given["topk_ids"]
    factor = given["routed_scaling_factor"] or 1.0
    wanted = few_experts_torch(given["hidden_states"], weights, *routed, factor=factor, shared=shared).float()
    return bool((found.float() - wanted).norm() <= CLOSE * wanted.norm())


def signature() -> inspect.Signature:
    """Of SGLang's function."""
    return inspect.signature(inspect.unwrap(import_module(experts.RUNNER).fused_experts_impl))


def served(given: dict, **more: object) -> torch.Tensor | str:
    """What the hook gives for these arguments, SGLANGS where it leaves them to SGLang's function."""

    def left(*_: object, **__: object) -> str:
        return SGLANGS

    left.__signature__ = signature()
    return experts.experts(left, **given | more)


def free_server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang's runner asks of a server that asks for no order of sums, and for launches of this package."""
    server = SimpleNamespace(
        moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: server)
    monkeypatch.setattr(experts, "expert_gpus", lambda: 1)
    monkeypatch.setenv(experts.SWITCH, "1")
    return server


def interpreted_runner(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Choices of tiles for SGLang's kernels, which are interpreted: its own lookup is for GPUs alone.

    `bulk` and `alone` are whether both products copy in bulk, and whether the second has no tiles.
    """
    module = import_module(experts.RUNNER)
    for place in (module, import_module(module.invoke_fused_moe_kernel.__module__)):
        monkeypatch.setattr(place, "is_arch_support_pdl", lambda: False)
    tile = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": GROUP, "GROUP_SIZE_M": 1, "num_warps": 4}
    found = SimpleNamespace(module=module, bulk=False, alone=False)

    def lookup(*_: object, **__: object) -> tuple:
        first = tile | {"num_stages": 3, "USE_TMA": found.bulk}
        return first, (None if found.alone else first | {"num_stages": 2}, 16)

    monkeypatch.setattr(module, "try_get_optimal_moe_config", lookup)
    return found
