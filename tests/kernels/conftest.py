"""Kernels run compiled where a GPU is, and otherwise through Triton's interpreter, which must be chosen before the import."""

import os

import pytest
import torch

from nsa_backend.testing.interpreter import drop_unused_work, round_as_a_gpu_does

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    drop_unused_work()


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture
def poisoned(monkeypatch):
    """What launchers allocate has NaN in it, or -1, and where kernels are interpreted they round as on a GPU."""
    round_as_a_gpu_does()

    def filled(made: torch.Tensor) -> torch.Tensor:
        return made.fill_(float("nan") if made.is_floating_point() else -1)

    for name in ("empty", "empty_like"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *given, made=made, **form: filled(made(*given, **form)))


@pytest.fixture
def half(device):
    """The 16-bit dtype of this device: Triton's interpreter multiplies matrices of bfloat16 as if they were integers."""
    return torch.bfloat16 if device == "cuda" else torch.float16
