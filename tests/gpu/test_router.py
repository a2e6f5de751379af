"""A router in one launch beside SGLang's gate and choice of experts: the same logits, the same experts in the same order.

Inputs are small integers and weights such ones by a power of two, so that logits are exact however they are summed, and scores
that tie do so on both sides.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from nsa_backend.benchmarks.calls.timing import captured_graph
from nsa_backend.benchmarks.tuning.experts import RANKS as EXPERTS
from nsa_backend.benchmarks.tuning.experts import Rank
from nsa_backend.benchmarks.tuning.router import RANKS, Layer, tiles_for
from nsa_backend.kernels.few_experts import few_experts
from nsa_backend.kernels.router import MOST_ROWS, Routed
from nsa_backend.testing.process import start_sglang

pytestmark = pytest.mark.gpu

ROWS = range(1, MOST_ROWS + 1)
SIZES = {"usual": 2.0**-8, "large": 2.0**-5, "extreme": 0.25, "nothing": 0.0}
"""Of weights: logits are of size 1.3, 10 and 85, where most scores are nothing or one; or all alike."""


@pytest.fixture(scope="module", params=RANKS)
def rank(request):
    start_sglang()
    return request.param


@pytest.fixture(scope="module")
def layer(rank):
    return Layer(RANKS[rank])


def drawn(layer: Layer, rows: int, size: float) -> torch.Tensor:
    """Draw the layer's weights, and rows."""
    weight = layer.gate.weight.data
    weight.copy_(torch.randint(-3, 4, weight.shape, device="cuda") * size)
    return torch.randint(-3, 4, (rows, weight.shape[1]), device="cuda").bfloat16()


def same(found: Routed, wanted: Routed) -> None:
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.chosen, wanted.chosen)
    assert found.shares.dtype == wanted.shares.dtype == torch.float32
    torch.testing.assert_close(found.shares, wanted.shares, rtol=2e-6, atol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_choose_as_by_sglang(layer, rows, size):
    """In the tile that a server takes."""
    torch.manual_seed(rows)
    x = drawn(layer, rows, SIZES[size])
    same(layer.by_launch(x, layer.choice()), layer.by_sglang(x))
    assert layer.arrived.item() == 0


@pytest.mark.parametrize("size", ["usual", "extreme"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
def test_every_tile_chooses_so(layer, rows, size):
    torch.manual_seed(rows)
    x = drawn(layer, rows, SIZES[size])
    wanted = layer.by_sglang(x)
    for tile in tiles_for(rows):
        same(layer.by_launch(x, layer.choice(), tile), wanted)


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_replays_choose_anew(layer, rows, side_stream):
    """Of two launches in a graph, by other rows each time; counters are as before."""
    torch.manual_seed(rows)
    x, choice, kept = drawn(layer, rows, SIZES["usual"]), layer.choice(), []

    def launches() -> None:
        kept[:] = [layer.by_launch(x, choice), layer.by_launch(x, choice)]

    graph = captured_graph(launches)
    for _, size in itertools.product(range(2), SIZES.values()):
        x.copy_(drawn(layer, rows, size))
        wanted = layer.by_sglang(x)
        graph.replay()
        torch.cuda.synchronize()
        for found in kept:
            same(found, wanted)
        assert layer.arrived.item() == 0


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_experts_that_begin_early_have_the_choices(layer, rank, rows, side_stream):
    """As those that begin once the router has ended, with other choices in every replay."""
    torch.manual_seed(rows)
    experts = Rank(EXPERTS[rank])
    x, choice, kept = drawn(layer, rows, SIZES["usual"]), layer.choice(), []

    def launches(early: bool) -> torch.Tensor:
        routed = layer.by_launch(x, choice, before_ours=early)
        return few_experts(x, *experts.first, *experts.second, routed.shares, routed.chosen)

    graph = captured_graph(lambda: kept.__setitem__(slice(None), [launches(early=True), launches(early=True)]))
    for _ in range(8):
        x.copy_(drawn(layer, rows, SIZES["usual"]))
        wanted = launches(early=False)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(found, wanted) for found in kept)
