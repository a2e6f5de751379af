"""Three products in one launch against one torch product each, with poison in what is allocated and behind the rows."""

from __future__ import annotations

import pytest
import torch

from nsa_backend.kernels.layer_front_torch import product_torch
from nsa_backend.kernels.layer_front_weights import GROUP
from nsa_backend.kernels.split_products import MOST_ROWS, TILES_OF_QUERIES, counters, padded_rows, split_products

pytestmark = pytest.mark.usefixtures("poisoned")

NAN = 0x7F
SUMMED = 2**-10
"""Of the sum of absolute values: Hopper's tensor cores cut the FP8 products of an instruction 13 bits below the largest.

On an H200 0.2 of it was the most of 2112 columns of 7168 values, and 0.6 of 8192 of 1536, where fewer groups even it out.
"""


def weight(columns: int, inner: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.rand(-(-columns // GROUP), inner // GROUP, device=device) * 1e-2
    return torch.randn(columns, inner, device=device).to(torch.float8_e4m3fn), scales


def inputs(rows: int, inner: int, far_apart: bool, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.full((MOST_ROWS + 8, inner), NAN, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)[:rows]
    x.copy_(torch.randn(rows, inner, device=device).to(torch.float8_e4m3fn))
    scales = torch.full((inner // GROUP, MOST_ROWS + 8), float("nan"), device=device).T[:rows]
    scales.copy_(torch.rand(rows, inner // GROUP, device=device))
    return x, scales if far_apart else scales.contiguous()


OF_A_LAYER = {"first": (7168, (2112, 128), None), "queries": (1536, (3072, 8192), TILES_OF_QUERIES)}
"""Of DeepSeek-V3.2: too large for the interpreter."""


@pytest.mark.parametrize(
    ("rows", "inner", "widths"),
    [
        (1, 1024, (192, 128)),
        (5, 512, (64, 64)),
        (16, 1152, (320, 128)),
        (17, 640, (192, 64)),
        (32, 1024, (64, 256)),
        (100, 512, (64, 128)),
    ],
)
@pytest.mark.parametrize("far_apart", [True, False])
@pytest.mark.parametrize("tile", [None, (2, 4)])
def test_products(device, rows, inner, widths, far_apart, tile):
    check_products(device, rows, inner, widths, far_apart, tile)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 512, (192, 160)), (32, 640, (64, 32))])
def test_one_product_and_gates_in_bfloat16(device, rows, inner, columns):
    check_joined(device, rows, inner, *columns)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16, 32, 64, 128])
def test_one_product_and_gates_of_a_layer_of_glm(rows):
    check_joined("cuda", rows, 6144, 2624, 160)


def check_joined(device, rows, inner, columns, joined):
    """Where the index key's columns are with the gates, as in GLM-5: the same bits as beside a second product."""
    torch.manual_seed(rows)
    x, scales = inputs(rows, inner, True, device)
    first, second = (weight(width, inner, device) for width in (columns, 128))
    hidden, others = torch.randn(rows, inner, device=device).bfloat16(), torch.randn(joined, inner, device=device).bfloat16()
    arrived, whole = counters(first[0], None, others), counters(first[0], second[0], others)
    found = split_products(x, scales, first, None, arrived, gates=(hidden, others), gates_dtype=torch.bfloat16)
    beside = split_products(x, scales, first, second, whole, gates=(hidden, others))
    assert not arrived.any()
    assert [out.shape for out in found] == [(rows, columns), (rows, joined)]
    assert torch.equal(found[0], beside[0])
    assert torch.equal(found[1], beside[2].bfloat16())
    assert found[1].dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16, 32, 64, 128])
@pytest.mark.parametrize("far_apart", [True, False])
@pytest.mark.parametrize("which", OF_A_LAYER)
def test_products_of_a_layer(rows, far_apart, which):
    inner, widths, tiles = OF_A_LAYER[which]
    check_products("cuda", rows, inner, widths, far_apart, tiles and tiles[padded_rows(rows)])


def check_products(device, rows, inner, widths, far_apart, tile=None):
    torch.manual_seed(rows)
    x, scales = inputs(rows, inner, far_apart, device)
    weights = [weight(width, inner, device) for width in widths]
    hidden = torch.full((MOST_ROWS + 8, inner), float("nan"), dtype=torch.bfloat16, device=device)[:rows]
    hidden.copy_(torch.randn(rows, inner, device=device))
    gates = torch.randn(64, inner, device=device).bfloat16()
    arrived = counters(weights[0][0], weights[1][0], gates)
    found, again = (split_products(x, scales, *weights, arrived, tile, gates=(hidden, gates)) for _ in range(2))
    two = split_products(x, scales, *weights, counters(weights[0][0], weights[1][0]), tile)
    assert not arrived.any()
    assert all(torch.equal(one, other) for one, other in zip(found[:2], two, strict=True)), "the same bits without gates"
    assert torch.equal(found[2], again[2]), "the same bits, whoever arrives last"
    exact, size = hidden.double() @ gates.double().T, hidden.double().abs() @ gates.double().abs().T
    assert found[2].dtype == torch.float32
    assert ((found[2] - exact).abs() <= 2**-16 * size).all()
    found, again = found[:2], again[:2]
    for one, other, (values, of_blocks) in zip(found, again, weights, strict=True):
        wanted = product_torch(x, scales, values, of_blocks).float()
        size = product_torch(x.float().abs(), scales, values.float().abs(), of_blocks).float()
        assert torch.equal(one, other), "the same bits, whoever arrives last"
        assert ((one.float() - wanted).abs() <= 2**-8 * wanted.abs() + SUMMED * size).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x has 0 rows", {"x": lambda x: x[:0]}),
        ("x has 129 rows", {"x": lambda x: x[:1].expand(129, -1)}),
        ("x must be", {"x": lambda x: x.float()}),
        ("x_scales must be", {"x_scales": lambda s: s[:, 1:]}),
        ("first must be", {"first": lambda w: (w[0][:32], w[1])}),
        ("scales of second must be", {"second": lambda w: (w[0], w[1].double())}),
        ("arrived must be", {"arrived": lambda a: a[1:]}),
        ("hidden must be", {"gates": lambda g: (g[0].float(), g[1])}),
        ("weight of the gates must be", {"gates": lambda g: (g[0], g[1][:48])}),
    ],
)
def test_refuses_what_it_would_misread(name, change):
    x, scales = inputs(2, 256, True, "cpu")
    given = {"x": x, "x_scales": scales, "first": weight(128, 256, "cpu"), "second": weight(64, 256, "cpu")}
    given["gates"] = torch.ones(2, 256, dtype=torch.bfloat16), torch.ones(64, 256, dtype=torch.bfloat16)
    given["arrived"] = counters(given["first"][0], given["second"][0], given["gates"][1])
    for key, changed in change.items():
        given[key] = changed(given[key])
    with pytest.raises(ValueError, match=name):
        split_products(**given)
