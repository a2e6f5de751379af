"""Products whose weights come early against torch's: exactly where no sum is rounded, else nearly, on poisoned memory."""

from __future__ import annotations

import re

import pytest
import torch
from emulated import multiplying_early

from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.early_products import (
    MOST_ROWS,
    SOURCE,
    Tile,
    constants,
    early_products,
    problem,
    tile_for,
)
from nsa_backend.kernels.layer_front_torch import product_torch
from nsa_backend.kernels.layer_front_weights import GROUP

pytestmark = pytest.mark.usefixtures("poisoned")

NAN = 0x7F
OF_LAYERS = {
    "DeepSeek-V3.2, first": (7168, (2112, 128), 64), "DeepSeek-V3.2, queries": (1536, (3072, 8192), 0),
    "DeepSeek-V3.2, o_proj": (2048, (7168,), 0),
    "DeepSeek-V3.2, query": (1536, (3072,), 0), "GLM-5, first": (6144, (2624,), 160), "GLM-5, queries": (2048, (2048, 4096), 0),
    "GLM-5.2, first of a shared layer": (6144, (2624,), 0), "GLM-5.2, its query": (2048, (2048,), 0),
}  # fmt: skip


def whole(*shape: int, least: int, most: int, device: str) -> torch.Tensor:
    return torch.randint(least, most + 1, shape, device=device)


def inputs(rows: int, inner: int, widths: tuple[int, ...], gates: int, far_apart: bool, exact: bool, device: str) -> dict:
    """What the launch is given, with poison behind the rows; where `exact`, whole values and scales that are powers of two."""

    def values(count: int) -> torch.Tensor:
        drawn = whole(count, inner, least=-3, most=3, device=device) if exact else torch.randn(count, inner, device=device)
        return drawn.to(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return 2.0 ** whole(*shape, least=-2, most=2, device=device) if exact else torch.rand(*shape, device=device)

    x = torch.full((MOST_ROWS + 8, inner), NAN, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)[:rows]
    x.copy_(values(rows))
    of_x = torch.full((inner // GROUP, MOST_ROWS + 8), torch.nan, device=device).T[:rows]
    of_x.copy_(scales(rows, inner // GROUP))
    weights = [(values(width), scales(-(-width // GROUP), inner // GROUP)) for width in widths]
    given = {"x": x, "x_scales": of_x if far_apart else of_x.contiguous(), "first": weights[0]}
    if len(weights) > 1:
        given["second"] = weights[1]
    if gates:
        hidden = torch.full((MOST_ROWS + 8, inner), torch.nan, dtype=torch.bfloat16, device=device)[:rows]
        hidden.copy_(values(rows))
        given["gates"] = hidden, values(gates).bfloat16()
    return given


def check(given: dict, exact: bool, **options) -> None:
    found = early_products(**given, **options)
    products = [given[name] for name in ("first", "second") if name in given]
    for one, (weight, scales) in zip(found, products, strict=False):
        wanted = product_torch(given["x"], given["x_scales"], weight, scales)
        assert one.shape == wanted.shape
        if exact:
            assert torch.equal(one, wanted)
        else:
            size = product_torch(given["x"].float().abs(), given["x_scales"], weight.float().abs(), scales).float()
            assert ((one.float() - wanted.float()).abs() <= 2**-7 * wanted.float().abs() + 2**-16 * size).all()
    if "gates" in given:
        hidden, weight = (tensor.double() for tensor in given["gates"])
        size = hidden.abs() @ weight.abs().T
        off = (found[-1].double() - hidden @ weight.T).abs()
        rounding = 2**-7 * (hidden @ weight.T).abs() if found[-1].dtype == torch.bfloat16 else 0
        assert (off <= (0 if exact and found[-1].dtype == torch.float32 else 2**-16 * size) + rounding).all()
    again = early_products(**given, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


TILES = {"served": None, "in turns": Tile(4, 32, 2, 1), "late": Tile(4, 16, 4, 0)}


@pytest.mark.parametrize(
    ("rows", "widths", "gates"), [(1, (192, 128), 64), (3, (128, 64), 0), (5, (64,), 32), (8, (160, 32), 8)]
)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("tile", TILES)
def test_products(rows, widths, gates, exact, tile):
    """Of 1024 values a row: eight groups, two of them a warp's where four have them."""
    torch.manual_seed(rows)
    given = inputs(rows, 1024, widths, gates, rows % 2 == 1, exact, "cpu")
    dtype = torch.bfloat16 if rows == 5 else torch.float32
    cut = TILES[tile] or tile_for(1024)
    check(given, exact, tile=cut, gates_dtype=dtype, launch=multiplying_early(1024, cut, dtype, seed=rows))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("which", OF_LAYERS)
def test_products_of_a_layer(rows, exact, which):
    torch.manual_seed(rows)
    inner, widths, gates = OF_LAYERS[which]
    dtype = torch.bfloat16 if gates == 160 else torch.float32
    check(inputs(rows, inner, widths, gates, rows % 2 == 1, exact, "cuda"), exact, gates_dtype=dtype)


@pytest.mark.parametrize("inner", [7168, 6144, 2048, 1536, 5120])
def test_it_compiles_for_hopper_with_nearly_all_in_registers(inner):
    _, said = compiled(SOURCE, constants(inner, tile_for(inner)))
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", said)]
    assert len(spilled) == 2
    assert max(spilled) <= 40


def test_what_no_division_serves():
    assert "rows of 1664 values" in problem(1664, 64)
    assert "weights of (64, 72) columns" in problem(2048, 64, 72)
    assert "12 gates" in problem(2048, 64, gates=12)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x must be", {"x": lambda x: x.float()}),
        (r"\[1 to 8, 1024\]", {"x": lambda x: x[:1].expand(9, -1).contiguous()}),
        ("x_scales must be", {"x_scales": lambda s: s[:, 1:]}),
        ("first must be", {"first": lambda w: (w[0].float(), w[1])}),
        ("scales of second must be", {"second": lambda w: (w[0], w[1].double())}),
        ("hidden must be", {"gates": lambda g: (g[0].float(), g[1])}),
        ("weight of the gates must be", {"gates": lambda g: (g[0], g[1].float())}),
    ],
)
def test_refuses_what_it_would_misread(name, change):
    given = inputs(2, 1024, (128, 64), 64, True, True, "cpu")
    for key, changed in change.items():
        given[key] = changed(given[key])
    with pytest.raises(ValueError, match=name):
        early_products(**given)
