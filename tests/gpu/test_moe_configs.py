"""SGLang's Triton experts with this package's tiles and its own, and few tokens' in two launches: all err as much.

On ranks of DeepSeek-V3.2 and GLM-5. PyTorch rounds to FP8 and bfloat16 where SGLang does, but sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nsa_backend.benchmarks.tuning.experts import RANKS, TOKENS, Rank, looked_up, lookup_of
from nsa_backend.kernels.few_experts import MOST_TOKENS, few_experts
from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.testing.process import start_sglang

pytestmark = pytest.mark.gpu

COUNTS = [tokens for tokens in TOKENS if tokens <= 1024]
TOO_FAR = 1e-2  # relative; a wrong tile is off by far more
AS_SGLANGS = 1.1  # of the error that SGLang's own tiles have
ROWS = 256
"""To be compared, in one call or several: 128 values move at once where a sum rounds to another FP8 scale, so the error of 16
rows was once 0.0049 with one and 0.0040 with the other."""
Way = Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
"""Of computing experts: what they give for hidden states and (weights, experts) of each token."""


@pytest.fixture(scope="module")
def sglangs():
    """SGLang's own tiles of both products, by rank and number of tokens."""
    start_sglang()
    return {(name, tokens): looked_up(RANKS[name], tokens) for name in ("v3.2-tp8", "glm-5-tp8") for tokens in COUNTS}


@pytest.fixture(scope="module", params=["v3.2-tp8", "glm-5-tp8"])
def rank(request, sglangs):
    rank = Rank(RANKS[request.param])
    rank.sglangs = {tokens: tiles for (name, tokens), tiles in sglangs.items() if name == request.param}
    return rank


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
        first, first_scales, second, second_scales = (tensor[expert] for tensor in rank.weights[:4])
        both = (inputs[tokens] @ dequantised(first, first_scales).T).bfloat16().float()
        gate, up = both.chunk(2, dim=1)
        within = quantised((torch.nn.functional.silu(gate) * up).bfloat16())
        found = within @ dequantised(second, second_scales).T
        out.index_add_(0, tokens, found * weights[tokens, places, None])
    return out


def errors(rank: Rank, tokens: int, ways: dict[str, Way]) -> dict[str, float]:
    """By way, how far it is from PyTorch, over at least ROWS tokens, so many at once."""
    torch.manual_seed(tokens)
    apart, size = dict.fromkeys(ways, 0.0), 0.0
    for _ in range(-(-ROWS // tokens)):
        x, routed = torch.randn(tokens, rank.shape.hidden, device="cuda").bfloat16(), rank.routed(tokens)
        wanted = by_torch(rank, x, *routed)
        size += float(wanted.square().sum())
        for name, way in ways.items():
            apart[name] += float((way(x, routed).float() - wanted).square().sum())
    return {name: (squares / size) ** 0.5 for name, squares in apart.items()}


def of_steps(rank: Rank, tokens: int, step: int) -> tuple[dict, dict]:
    """SGLang's own tiles that multiply so many columns at once, of the nearest number of tokens.

    A tensor core sums FP8 products to fewer bits than float32, so with 64 columns at once SGLang's tiles of 16 tokens err less
    than those of 8 and 24, which take 128.
    """
    alike = [one for one, (first, _) in rank.sglangs.items() if first["BLOCK_SIZE_K"] == step]
    return rank.sglangs[min(alike, key=lambda one: abs(one - tokens))]


def by_tiles(rank: Rank, lookup: Callable) -> Way:
    """SGLang's experts by the tiles that a lookup gives."""
    return lambda x, routed: rank.call(x, routed, lookup)()


@pytest.mark.parametrize("tokens", COUNTS)
def test_tiles_err_as_much_as_sglangs(rank, tokens):
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import try_get_optimal_moe_config

    from nsa_backend.adapters import moe_configs

    device = torch.cuda.get_device_name().replace(" ", "_")
    if not any(device in name for name in moe_configs.measured()):
        pytest.skip(f"no tiles were measured on an {device}")
    moe_configs.take()
    first, _ = looked_up(rank.shape, tokens)
    ours = {str(one) for file in moe_configs.measured().values() for one in file.values()}
    assert str(first) in ours
    theirs = lookup_of(*of_steps(rank, tokens, first["BLOCK_SIZE_K"]))
    ways = {"sglang": by_tiles(rank, theirs), "ours": by_tiles(rank, try_get_optimal_moe_config)}
    found = errors(rank, tokens, ways)
    assert found["ours"] < TOO_FAR
    assert found["ours"] < AS_SGLANGS * found["sglang"]


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, MOST_TOKENS])
def test_two_launches_err_as_much_as_sglangs(rank, tokens):
    def two(x: torch.Tensor, routed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return few_experts(x, rank.weights, *routed)

    count = min((one for one in COUNTS if one >= tokens), default=COUNTS[-1])
    found = errors(rank, tokens, {"sglang": by_tiles(rank, lookup_of(*rank.sglangs[count])), "ours": two})
    assert found["ours"] < TOO_FAR
    assert found["ours"] < AS_SGLANGS * found["sglang"]
