"""Rows, block-FP8 weights and gates as `early_products` and `tile_products` take them, and their products against torch's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsa_backend.kernels.layer_front_torch import product_torch
from nsa_backend.kernels.layer_front_weights import GROUP

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

    x = torch.full((rows + 8, inner), NAN, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)[:rows]
    x.copy_(values(rows))
    of_x = torch.full((inner // GROUP, rows + 8), torch.nan, device=device).T[:rows]
    of_x.copy_(scales(rows, inner // GROUP))
    weights = [(values(width), scales(-(-width // GROUP), inner // GROUP)) for width in widths]
    given = {"x": x, "x_scales": of_x if far_apart else of_x.contiguous(), "first": weights[0]}
    if len(weights) > 1:
        given["second"] = weights[1]
    if gates:
        hidden = torch.full((rows + 8, inner), torch.nan, dtype=torch.bfloat16, device=device)[:rows]
        hidden.copy_(values(rows))
        given["gates"] = hidden, values(gates).bfloat16()
    return given


def check(multiply: Callable[..., tuple[torch.Tensor, ...]], given: dict, exact: bool, near: float = 2**-16, **options) -> None:
    """Exactly where no sum is rounded, else within `near` of what is added up; and twice the same."""
    found = multiply(**given, **options)
    products = [given[name] for name in ("first", "second") if name in given]
    for one, (weight, scales) in zip(found, products, strict=False):
        wanted = product_torch(given["x"], given["x_scales"], weight, scales)
        assert one.shape == wanted.shape
        if exact:
            assert torch.equal(one, wanted)
        else:
            size = product_torch(given["x"].float().abs(), given["x_scales"], weight.float().abs(), scales).float()
            assert ((one.float() - wanted.float()).abs() <= 2**-7 * wanted.float().abs() + near * size).all()
    if "gates" in given:
        hidden, weight = (tensor.double() for tensor in given["gates"])
        size = hidden.abs() @ weight.abs().T
        off = (found[-1].double() - hidden @ weight.T).abs()
        rounding = 2**-7 * (hidden @ weight.T).abs() if found[-1].dtype == torch.bfloat16 else 0
        assert (off <= (0 if exact and found[-1].dtype == torch.float32 else 2**-16 * size) + rounding).all()
    again = multiply(**given, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


MISREAD = {
    "x must be": {"x": lambda x: x.float()},
    "x_scales must be": {"x_scales": lambda s: s[:, 1:]},
    "first must be": {"first": lambda w: (w[0].float(), w[1])},
    "scales of second must be": {"second": lambda w: (w[0], w[1].double())},
    "hidden must be": {"gates": lambda g: (g[0].float(), g[1])},
    "weight of the gates must be": {"gates": lambda g: (g[0], g[1].float())},
}
"""What is refused, by what the launch says of it, and how that comes to be."""


def misread(said: str) -> dict:
    """What a launch is given that has one tensor in another form."""
    given = inputs(2, 1024, (128, 64), 64, True, True, "cpu")
    return given | {key: changed(given[key]) for key, changed in MISREAD[said].items()}
