"""A router in one launch against its twin: poisoned memory, ties, tiles, counters that are left as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa_backend.kernels.router import MOST_ROWS, SOME, Choice, Tile, counter, problem, route
from nsa_backend.kernels.router_torch import route_torch
from nsa_backend.testing.interpreter import round_as_a_gpu_does

pytestmark = pytest.mark.usefixtures("poisoned_choices")

EXPERTS = 256
GROUPED = Choice(routed=8, groups=8, kept=4)
"""As DeepSeek-V3.2's tokens choose."""
WITH_SHARED = Choice(routed=8, shared=1, shared_share=0.4)
"""As GLM-5's do, whose shared expert SGLang puts among the others."""
FEW = Tile(values=64, step=128)
"""Few programs, of which the interpreter runs one after the other."""
DOTS = replace(SOME, values=64, splits=2)


@pytest.fixture
def poisoned_choices(monkeypatch):
    """As `poisoned`, and integers that no router gives."""
    round_as_a_gpu_does()
    made = torch.empty

    def empty(*shape: int, dtype: torch.dtype = torch.float32, **form) -> torch.Tensor:
        return made(*shape, dtype=dtype, **form).fill_(float("nan") if dtype.is_floating_point else -(2**31))

    monkeypatch.setattr(torch, "empty", empty)


def inputs(wanted: torch.Tensor, hidden: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, weight) of small integers whose product is `wanted`, integers [rows, EXPERTS]: the last columns make up for it."""
    rows = len(wanted)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, hidden), generator=generator).float()
    weight = torch.randint(-3, 4, (EXPERTS, hidden), generator=generator).float()
    x[:, -2 * rows :] = 0
    own = torch.arange(rows)
    x[own, hidden - 2 * rows + own], x[own, hidden - rows + own] = 64.0, 1.0
    weight[:, -2 * rows :] = 0
    missing = (wanted.float() - x @ weight.T).T
    tens = (missing / 64).round()
    weight[:, -2 * rows : -rows], weight[:, -rows:] = tens, missing - 64 * tens
    return x.bfloat16(), weight.bfloat16()


def drawn(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, bias): scores, and sums of two in a group, are so far apart that a tanh which is not exact changes no choice."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 3, (rows, EXPERTS), generator=generator)
    return logits, torch.randperm(EXPERTS, generator=generator) / 64


def check(logits: torch.Tensor, bias: torch.Tensor, choice: Choice, device: str, hidden: int = 512, tile: Tile = FEW) -> None:
    """Choices and logits exactly; shares as near as the GPU's tanh is."""
    x, weight = (tensor.to(device) for tensor in inputs(logits, hidden))
    bias, arrived = bias.float().to(device), counter(weight)
    for _ in range(2):
        found, wanted = route(x, weight, bias, arrived, choice, tile), route_torch(x, weight, bias, choice)
        assert arrived.eq(0).all()
        assert torch.equal(found.logits, wanted.logits)
        assert torch.equal(found.logits.cpu(), logits.float())
        assert torch.equal(found.chosen, wanted.chosen)
        approximate = device == "cuda" and choice.groups > 1
        torch.testing.assert_close(found.shares, wanted.shares, rtol=2e-3 if approximate else 1e-6, atol=0)


@pytest.mark.parametrize(
    "choice", [GROUPED, WITH_SHARED, replace(GROUPED, shared=1, factor=2.5), replace(WITH_SHARED, shared=0)]
)
@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS])
def test_what_rows_choose(device, rows, choice):
    check(*drawn(rows, seed=rows), choice, device)


@pytest.mark.parametrize(
    "tile", [Tile(values=32, splits=2, step=64), Tile(values=16, step=512, warps=8), DOTS, replace(DOTS, splits=4, step=64)]
)
@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("choice", [GROUPED, WITH_SHARED])
def test_other_tiles_give_the_same(device, tile, rows, choice):
    check(*drawn(rows), choice, device, tile=tile)


def test_hidden_states_that_are_no_power_of_two(device):
    check(*drawn(2), GROUPED, device, hidden=768)
    check(*drawn(2), GROUPED, device, hidden=768, tile=replace(DOTS, step=128))


@pytest.mark.parametrize("choice", [GROUPED, WITH_SHARED])
def test_of_equal_scores_the_lower_expert_comes_first(device, choice):
    """And of equal groups the lower group: all are alike but for some, of which two pairs are."""
    logits, bias = torch.zeros(3, EXPERTS, dtype=torch.int64), torch.zeros(EXPERTS)
    logits[1, [200, 201, 30, 90]] = 2
    logits[2, [255, 254, 0]] = torch.tensor([1, 1, -1])
    check(logits, bias, choice, device)
    x, weight = (tensor.to(device) for tensor in inputs(logits, 512))
    found = route(x, weight, bias.to(device), counter(weight), choice, FEW).chosen[:, :8].tolist()
    assert found[0] == list(range(8))
    assert found[1][:4] == [30, 90, 200, 201]
    assert found[2] == [254, 255, *range(1, 7)]


@pytest.mark.parametrize("choice", [GROUPED, WITH_SHARED])
def test_rows_whose_scores_are_all_nothing_share_nothing(device, choice):
    """No NaN comes of it; one that chooses by its bias alone does choose."""
    logits, bias = torch.full((2, EXPERTS), -200), torch.arange(EXPERTS) / 64
    check(logits, bias, choice, device)


def test_random_floats(device):
    """Logits as near as sums in another order are; shares of the experts that were chosen, whichever tie."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 1024, generator=generator).bfloat16().to(device)
    weight = (torch.randn(EXPERTS, 1024, generator=generator) / 32).bfloat16().to(device)
    bias = (torch.randn(EXPERTS, generator=generator) / 8).to(device)
    for choice, tile in ((GROUPED, FEW), (WITH_SHARED, DOTS)):
        found, wanted = (route(x, weight, bias, counter(weight), choice, tile), route_torch(x, weight, bias, choice))
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=2e-5)
        torch.testing.assert_close(found.shares.sum(1), wanted.shares.sum(1), rtol=1e-5, atol=0)


def test_no_rows_choose_nothing(device):
    _, weight = inputs(torch.zeros(1, EXPERTS), 512)
    found = route(torch.empty(0, 512).bfloat16(), weight, torch.zeros(EXPERTS), counter(weight), GROUPED, FEW)
    assert [tuple(tensor.shape) for tensor in found] == [(0, 8), (0, 8), (0, EXPERTS)]


def test_what_cannot_be_served_says_so(device):
    assert problem(256, 7168, GROUPED) is None
    assert problem(256, 6144, WITH_SHARED) is None
    assert problem(384, 7168, WITH_SHARED).startswith("384 experts and hidden states of 7168: powers of two")
    assert problem(256, 7000, GROUPED).endswith("multiples of 1024, are served")
    assert problem(256, 7168, replace(GROUPED, groups=6)).startswith("6 groups of 256 experts")
    assert "a token chooses among" in problem(256, 7168, replace(GROUPED, kept=9))
    assert "one shared expert at most" in problem(256, 7168, replace(GROUPED, shared=2))
    x, weight = inputs(torch.zeros(2, EXPERTS), 512)
    bias, arrived = torch.zeros(EXPERTS), counter(weight)
    with pytest.raises(ValueError, match=r"bias must be contiguous torch\.float32 \[256\]"):
        route(x, weight, bias.bfloat16(), arrived, GROUPED, FEW)
    with pytest.raises(ValueError, match="x must be of at most 16 rows"):
        route(x.repeat(9, 1), weight, bias, arrived, GROUPED, FEW)
    with pytest.raises(ValueError, match="hidden states of 512"):
        route(x[:1], weight, bias, arrived, GROUPED)
