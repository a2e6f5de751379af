"""SGLang's Triton experts with this package's tiles against PyTorch: all that ranks of DeepSeek-V3.2 and GLM-5 have."""

from __future__ import annotations

import pytest
import torch

from nsa_backend.benchmarks.tuning.experts import RANKS, TOKENS, Rank, looked_up
from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.testing.process import start_sglang

pytestmark = pytest.mark.gpu

RELATIVE_ERROR = 5e-3  # bfloat16 between both products and behind them


@pytest.fixture(scope="module", params=["v3.2-tp8", "glm-5-tp8"])
def rank(request):
    start_sglang()
    return Rank(RANKS[request.param])


def dequantised(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 of FP8 with a scale a group of columns, or a block of 128 by 128."""
    for dim, (size, count) in enumerate(zip(values.shape, scales.shape, strict=True)):
        scales = scales.repeat_interleave(size // count, dim)
    return values.float() * scales


def quantised(x: torch.Tensor) -> torch.Tensor:
    """float32 of what SGLang's experts quantise."""
    from nsa_backend.adapters.dsa.layer_front.builtin import quantised as by_sglang

    values, scales = by_sglang(x, Scales.EXACT)
    return dequantised(values[: len(x)], scales[: len(x)])


def by_torch(rank: Rank, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """float32 [tokens, hidden]: an expert after the other."""
    out = torch.zeros(len(x), rank.shape.hidden, device="cuda")
    inputs = quantised(x)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        both = (inputs[tokens] @ dequantised(rank.first[0][expert], rank.first[1][expert]).T).bfloat16().float()
        gate, up = both.chunk(2, dim=1)
        within = quantised((torch.nn.functional.silu(gate) * up).bfloat16())
        found = within @ dequantised(rank.second[0][expert], rank.second[1][expert]).T
        out.index_add_(0, tokens, found * weights[tokens, places, None])
    return out


@pytest.mark.parametrize("tokens", [tokens for tokens in TOKENS if tokens <= 1024])
def test_experts_are_what_torch_computes(rank, tokens):
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import try_get_optimal_moe_config

    from nsa_backend.adapters import moe_configs

    moe_configs.take()
    torch.manual_seed(tokens)
    x, routed = torch.randn(tokens, rank.shape.hidden, device="cuda").bfloat16(), rank.routed(tokens)
    first, _ = looked_up(rank.shape, tokens)
    ours = {str(one) for file in moe_configs.measured().values() for one in file.values()}
    assert str(first) in ours
    out, wanted = rank.call(x, routed, try_get_optimal_moe_config)().float(), by_torch(rank, x, *routed)
    error = (out - wanted).norm() / wanted.norm()
    assert error < RELATIVE_ERROR, f"relative error {error:.2e}"
