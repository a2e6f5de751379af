"""Products of a few rows in one launch against torch's, with poison in what is allocated and behind the rows."""

from __future__ import annotations

import pytest
import torch

from nsa_backend.kernels.layer_front_torch import product_torch, quantise
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.kernels.row_products import MOST_ROWS, Tile, row_products

pytestmark = pytest.mark.usefixtures("poisoned")

SMALL = Tile(columns=16, step=256, stages=2)
"""Few programs, as the interpreter runs them one after the other."""
SUMMED = 2**-18
"""Of the sum of absolute values, which float32 adds up."""


def weight(columns: int, inner: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.rand(-(-columns // GROUP), inner // GROUP, device=device) * 1e-2
    return torch.randn(columns, inner, device=device).to(torch.float8_e4m3fn), scales


def rows_of(rows: int, inner: int, device: str) -> torch.Tensor:
    """bfloat16 [rows, inner] of very different groups, before rows that nobody may read."""
    x = torch.full((MOST_ROWS + 4, inner), float("nan"), dtype=torch.bfloat16, device=device)[:rows]
    sizes = 10.0 ** torch.randint(-6, 4, (rows, inner // GROUP), device=device)
    return x.copy_(torch.randn(rows, inner, device=device) * sizes.repeat_interleave(GROUP, 1))


def check(found: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, of: tuple[torch.Tensor, torch.Tensor]) -> None:
    wanted = product_torch(x, scales, *of).float()
    size = product_torch(x.float().abs(), scales, of[0].float().abs(), of[1]).float()
    assert found.dtype == torch.bfloat16
    assert ((found.float() - wanted).abs() <= 2**-8 * wanted.abs() + SUMMED * size).all()


@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize(
    ("inner", "widths", "scales"), [(512, (192, 128), Scales.EXACT), (768, (64, 16), Scales.POWERS_OF_TWO)]
)
def test_products_of_rows_that_it_quantises(device, rows, inner, widths, scales):
    check_products(device, rows, inner, widths, 32, scales, SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize(
    "tile", [None, Tile(columns=4, step=1024, stages=3), Tile(columns=16), Tile(columns=16, step=256, stages=5, warps=8)]
)
@pytest.mark.parametrize(("inner", "widths", "gates"), [(7168, (2112, 128), 64), (6144, (2624,), 160)])
def test_first_products_of_a_layer(rows, tile, inner, widths, gates):
    check_products("cuda", rows, inner, widths, gates, Scales.POWERS_OF_TWO, tile)


def check_products(device, rows, inner, widths, gates, scales, tile):
    torch.manual_seed(rows)
    x, weights = rows_of(rows, inner, device), [weight(width, inner, device) for width in widths]
    third = torch.randn(gates, inner, device=device).bfloat16()
    found = row_products(x, *weights, third=third, scales=scales, tile=tile)
    values, x_scales = quantise(x.float(), scales)
    assert [out.shape for out in found] == [(rows, width) for width in (*widths, gates)]
    for out, of in zip(found, weights, strict=False):
        check(out, values, x_scales, of)
    exact, size = x.double() @ third.double().T, x.double().abs() @ third.double().abs().T
    assert found[-1].dtype == torch.float32
    assert ((found[-1] - exact).abs() <= SUMMED * size).all()
    in_bfloat16 = row_products(x, *weights, third=third, third_dtype=torch.bfloat16, scales=scales, tile=tile)[-1]
    assert torch.equal(in_bfloat16, found[-1].bfloat16())


@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize("far_apart", [True, False])
def test_products_of_quantised_rows(device, rows, far_apart):
    check_quantised(device, rows, 512, (64, 48), far_apart, SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize(("inner", "widths"), [(1536, (3072, 8192)), (1536, (3072,)), (2048, (7168,)), (2048, (6144,))])
def test_later_products_of_a_layer(rows, inner, widths):
    check_quantised("cuda", rows, inner, widths, True, None)


def check_quantised(device, rows, inner, widths, far_apart, tile):
    torch.manual_seed(rows)
    values, dense = quantise(rows_of(rows, inner, device).float(), Scales.EXACT)
    scales = torch.full((inner // GROUP, MOST_ROWS + 4), float("nan"), device=device).T[:rows]
    scales.copy_(dense)
    weights = [weight(width, inner, device) for width in widths]
    found = row_products((values, scales if far_apart else dense), *weights, tile=tile)
    assert [out.shape for out in found] == [(rows, width) for width in widths]
    for out, of in zip(found, weights, strict=True):
        check(out, values, dense, of)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x must be of 1 to 4 rows", {"x": lambda x: x[:0]}),
        ("x must be of 1 to 4 rows", {"x": lambda x: x[:1].expand(5, -1)}),
        ("x must be contiguous torch.bfloat16", {"x": lambda x: x[:, :256]}),
        ("first is a weight of 64 columns of 384: multiples of 16 and of 256", {"first": lambda w: (w[0][:, :384], w[1])}),
        ("x must be contiguous torch.bfloat16", {"x": lambda x: x.float()}),
        ("x must be contiguous torch.float8", {"x": lambda x: (x, x.float())}),
        ("scales of x must be", {"x": lambda x: quantise(x.float(), Scales.EXACT)}),  # beside a third
        ("third is a weight of 8 columns of 512", {"third": lambda w: w[:8]}),
        ("second must be contiguous torch.float8", {"second": lambda w: (w[0].float(), w[1])}),
        ("scales of second must be", {"second": lambda w: (w[0], w[1].double())}),
        ("third must be contiguous torch.bfloat16", {"third": lambda w: w.float()}),
    ],
)
def test_refuses_what_it_would_misread(name, change):
    given = {"x": rows_of(2, 512, "cpu"), "first": weight(64, 512, "cpu"), "second": weight(64, 512, "cpu")}
    given["third"] = torch.ones(64, 512, dtype=torch.bfloat16)
    for key, changed in change.items():
        given[key] = changed(given[key])
    with pytest.raises(ValueError, match=name):
        row_products(**given, tile=SMALL)
