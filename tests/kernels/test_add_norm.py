"""Sum, norm and quantisation in one launch, against torch: what is only added and rounded exactly, the norm to a rounding."""

from __future__ import annotations

import pytest
import torch
from emulated import norming

from nsa_backend.kernels.add_norm import SOURCE, add_norm, constants
from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.layer_front_torch import add_norm_torch
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.kernels.projection_inputs import quantise

pytestmark = pytest.mark.usefixtures("poisoned")

EPS = 1e-6
KINDS = {
    "usual": lambda x: x,
    "zeros": lambda x: x * 0,
    "large": lambda x: x.sign() * 1e15,
    "outliers": lambda x: torch.where(torch.arange(x.shape[1], device=x.device) % GROUP == 0, x * 1e4, x),
}


def inputs(rows: int, width: int, kind: str, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual and weight, with poison around the rows."""
    torch.manual_seed(rows + width)
    around = torch.full((2, rows + 2, width), torch.nan, dtype=torch.bfloat16, device=device)
    around[:, 1:-1] = torch.stack([KINDS[kind](torch.randn(rows, width, device=device)) for _ in range(2)]).bfloat16()
    return around[0, 1:-1], around[1, 1:-1], (1 + torch.randn(width, device=device) / 8).bfloat16()


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("width", [1024, 7168, 6144, 640])
@pytest.mark.parametrize("scales", [None, *Scales])
@pytest.mark.parametrize("kind", KINDS)
def test_norms(rows, width, scales, kind, device):
    check(rows, width, scales, kind, device)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [32, 100, 128, 4100])
@pytest.mark.parametrize("width", [7168, 6144])
@pytest.mark.parametrize("scales", [None, *Scales])
def test_norms_of_more_rows(rows, width, scales):
    check(rows, width, scales, "usual", "cuda")


def check(rows: int, width: int, scales: Scales | None, kind: str, device: str) -> None:
    """Sums and norms are the twin's, but for the order of what is added up, and FP8 is what `quantise` gives."""
    x, residual, weight = inputs(rows, width, kind, device)
    wanted, total = add_norm_torch(x, residual, weight, EPS)
    launch = norming(width, scales) if device == "cpu" else None
    found = add_norm(x, residual, weight, EPS, scales, before_ours=rows == 3, launch=launch)
    assert torch.equal(residual, total)
    apart = (x.float() - wanted.float()).abs()
    assert (apart <= 2**-7 * wanted.float().abs()).all()
    assert (apart > 0).float().mean() <= 1e-3
    if scales is None:
        assert found is None
    else:
        assert all(torch.equal(one.float(), other.float()) for one, other in zip(found, quantise(x, scales), strict=True))
        assert found[1].stride(0) == 1  # as DeepGEMM reads them


def test_no_rows(device):
    x, residual, weight = inputs(0, 1024, "usual", device)
    values, scales = add_norm(x, residual, weight, EPS, Scales.EXACT)
    assert (values.shape, scales.shape) == ((0, 1024), (0, 8))


def test_it_refuses_tensors_that_it_would_misread(device):
    x, residual, weight = inputs(2, 1024, "usual", device)
    for wrong in (
        (x.float(), residual, weight), (x, residual[:1], weight), (x, residual, weight[:512]), (x.T, residual.T, weight[:2]),
        (x[:, :1000].contiguous(), residual[:, :1000].contiguous(), weight[:1000]), inputs(2, 8320, "usual", device),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must be contiguous|groups of 128 up to 8192"):
            add_norm(*wrong, EPS)


@pytest.mark.parametrize("width", [7168, 6144])
@pytest.mark.parametrize("scales", [None, *Scales])
def test_it_compiles_for_hopper_with_all_in_registers(width, scales):
    cubin, said = compiled(SOURCE, constants(width, scales))
    assert cubin
    assert "0 bytes spill stores, 0 bytes spill loads" in said
