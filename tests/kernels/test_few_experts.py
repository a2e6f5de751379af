"""Experts of few tokens in two launches against their twin: poisoned memory, choices of other GPUs, any number of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nsa_backend.kernels.few_experts import MOST_TOKENS, ExpertWeights, Tile, few_experts, problem
from nsa_backend.kernels.few_experts_torch import few_experts_torch, in_torch
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.kernels.projection_inputs import quantise

pytestmark = pytest.mark.usefixtures("poisoned")

EXPERTS = 9
LARGE = Tile(values=64, sums=128)
"""Few programs, of which the interpreter runs one after the other."""


def inputs(tokens: int, choices: int, hidden: int, width: int, device: str, seed: int = 0) -> dict:
    """Small integers, scales that are powers of two, open gates: the first product and silu are exact. No sum cancels."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape: int, least: int = -4) -> torch.Tensor:
        return torch.randint(least, 5, shape, generator=generator)

    def powers(*shape: int) -> torch.Tensor:
        return torch.exp2(torch.randint(-3, 3, shape, generator=generator).float())

    x = whole(tokens, hidden, least=0).bfloat16()
    x[:, ::GROUP] = 448.0  # whose scale is 1
    first = whole(EXPERTS, 2 * width, hidden, least=1)
    chosen = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :choices].int().contiguous()
    experts = ExpertWeights(
        first.to(torch.float8_e4m3fn).to(device), powers(EXPERTS, 2 * width // GROUP, hidden // GROUP).to(device),
        whole(EXPERTS, hidden, width, least=1).to(torch.float8_e4m3fn).to(device),
        powers(EXPERTS, hidden // GROUP, width // GROUP).to(device),
    )  # fmt: skip
    given = {"x": x, "shares": torch.rand(tokens, choices, generator=generator), "chosen": chosen}
    return {name: tensor.to(device) for name, tensor in given.items()} | {"experts": experts}


def with_shared(given: dict, scales: Scales = Scales.EXACT) -> dict:
    """The last expert is every token's, from memory of its own."""
    weights = given["experts"][:4]
    return given | {
        "experts": ExpertWeights(*(tensor[:-1].clone() for tensor in weights)),
        "shared": ExpertWeights(*(tensor[-1].clone() for tensor in weights), scales),
        "chosen": given["chosen"] % (EXPERTS - 1),
    }


def of_any_size(given: dict) -> dict:
    """With random floats in place of whole numbers."""
    generator, experts = torch.Generator().manual_seed(4), []
    x = torch.randn(given["x"].shape, generator=generator).bfloat16().to(given["x"].device)
    for weight in given["experts"][:4]:
        if weight.dtype == torch.float32:
            value = 0.02 + 0.1 * torch.rand(weight.shape, generator=generator)
        else:
            value = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        experts.append(value.to(weight.device))
    return given | {"x": x, "experts": ExpertWeights(*experts)}


def by_torch(given: dict, factor: float = 1.0) -> torch.Tensor:
    """The twin's; on a GPU quantised as SGLang does there, by a division that is not exact."""

    def on_gpu(x: torch.Tensor, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = quantise(x, scales)
        return values[: len(x)], scales[: len(x)].contiguous()

    return few_experts_torch(**given, factor=factor, quantise=on_gpu if given["x"].is_cuda else in_torch)


def check(given: dict, call: Callable[..., torch.Tensor] = few_experts, **options) -> torch.Tensor:
    """Bit by bit, but for the last one of a value whose sums of float32 round otherwise."""
    found, wanted = call(**given, **options), by_torch(given, options.get("factor", 1.0))
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-7, atol=0)
    assert (found != wanted).sum() <= 0.01 * found.numel()
    return found


@pytest.mark.parametrize(
    ("tokens", "choices", "hidden", "width"),
    [(1, 4, 512, 128), (3, 3, 1024, 256), (2, 5, 512, 512), (0, 2, 512, 128), (1, 9, 512, 256)],
)
def test_what_experts_give(device, tokens, choices, hidden, width):
    given = inputs(tokens, choices, hidden, width, device)
    check(given, factor=2.5, tile=LARGE)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [LARGE, replace(LARGE, ahead=True), None])
@pytest.mark.parametrize(("tokens", "choices", "scales"), [(1, 8, Scales.EXACT), (2, 3, Scales.POWERS_OF_TWO)])
def test_a_shared_expert_is_one_more_choice_of_every_token(device, tile, tokens, choices, scales):
    """What it gives is rounded for itself and has neither share nor factor; its inputs' scales may be of another form."""
    hidden = 512 if tile is None and tokens > 1 else 1024  # the tile of several tokens is of many programs
    given = with_shared(inputs(tokens, choices, hidden, 256, device), scales)
    given["x"] *= 0.7  # whose scales are then no powers of two
    given["chosen"][0, 0] = -1
    check(given, factor=2.5, tile=tile)


@pytest.mark.parametrize("tile", [LARGE, replace(LARGE, ahead=True)])
def test_choices_of_other_gpus_give_nothing(device, tile):
    """A token may have none here at all. Nothing of theirs is read, so what lies there may be anything."""
    given = inputs(4, 3, 512, 128, device)
    given["chosen"][0] = -1
    given["chosen"][1, 1] = given["chosen"][2, 0] = -1
    given["shares"][given["chosen"] < 0] = float("nan")
    check(given, tile=tile)
    assert few_experts(**given, tile=tile)[0].eq(0).all()


def test_the_sum_is_where_it_is_asked_for(device):
    given = inputs(2, 3, 512, 256, device)
    out = torch.empty_like(given["x"])
    assert few_experts(**given, tile=LARGE, out=out) is out
    assert torch.equal(out, few_experts(**given, tile=LARGE))


@pytest.mark.parametrize(
    ("tokens", "choices", "hidden", "width"),
    [(1, 9, 1024, 256), (2, 9, 512, 128), pytest.param(3, 8, 1024, 128, marks=pytest.mark.slow)],
)
def test_tiles_by_tokens_and_choices(device, tokens, choices, hidden, width):
    """Each in a shape of few programs; only the first one's tile reads weights of this width ahead."""
    check(inputs(tokens, choices, hidden, width, device))


@pytest.mark.parametrize("tile", [Tile(values=16, step=256, sums=32), Tile(values=4, sums=16), Tile(warps=2)])
def test_other_tiles_give_the_same(device, tile):
    check(inputs(1, 2, 512, 128, device), tile=tile)


@pytest.mark.parametrize("width", [256, 128])
def test_weights_that_are_read_ahead_are_the_same(device, width):
    """Of two groups of values; of another number they are read as before."""
    given = inputs(2, 3, 512, width, device)
    given["chosen"][0, 1] = -1
    wanted = few_experts(**given, tile=LARGE)
    assert torch.equal(few_experts(**given, tile=replace(LARGE, ahead=True)), wanted)


def test_gates_that_are_half_open_and_values_of_any_size(device):
    """Random floats: silu in its steep part, scales of any value."""
    given = of_any_size(inputs(3, 4, 1024, 256, device))
    found, wanted = few_experts(**given, tile=LARGE).float(), by_torch(given).float()
    assert (found - wanted).norm() < 5e-3 * wanted.norm()


def test_what_cannot_be_served_says_so(device):
    assert problem(7168, 256) is None
    assert problem(6144, 256) is None
    assert problem(7168, 384).startswith(
        "hidden states of 7168 and experts of 384: multiples of 1024 and powers of two from 128"
    )
    given = inputs(1, 2, 1024, 128, device)
    with pytest.raises(ValueError, match="hidden states of 512"):
        few_experts(**given | {"x": given["x"][:, :512]})
    with pytest.raises(ValueError, match=r"chosen must be contiguous torch\.int32"):
        few_experts(**given | {"chosen": given["chosen"].long()})
    wide = {name: given[name].repeat(1, 16) for name in ("chosen", "shares")}
    with pytest.raises(ValueError, match="chosen must be of one to 31 choices"):
        few_experts(**given | wide)
    shared = with_shared(given)["shared"]
    with pytest.raises(ValueError, match=r"shared\.second must be contiguous torch\.float8_e4m3fn \[1024, 128\]"):
        few_experts(**given, shared=shared._replace(second=shared.second.T))
    with pytest.raises(ValueError, match=r"experts\.first_scales must be contiguous torch\.float32 \[9, 2, 8\]"):
        few_experts(**given | {"experts": given["experts"]._replace(first_scales=given["experts"].second_scales)})
    with pytest.raises(ValueError, match=r"experts have Scales\.POWERS_OF_TWO"):
        few_experts(**given | {"experts": given["experts"]._replace(scales=Scales.POWERS_OF_TWO)})
    many = given["x"].expand(MOST_TOKENS + 1, -1).contiguous()
    with pytest.raises(ValueError, match="x must be of at most 16 tokens"):
        few_experts(**given | {"x": many})
