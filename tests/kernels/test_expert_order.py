"""What is before the first product of experts, against its twin: poisoned memory, any choices, experts of other GPUs."""

from __future__ import annotations

import pytest
import torch

from nsa_backend.kernels import expert_order
from nsa_backend.kernels.expert_order import most_rows, order
from nsa_backend.kernels.expert_order_torch import order_torch
from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.kernels.projection_inputs import quantise
from nsa_backend.testing.interpreter import round_as_a_gpu_does

HIDDEN = 1024
POISON = -77


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What the launcher allocates has values in it that nobody chose."""
    round_as_a_gpu_does()
    made = torch.empty

    def empty(*given: object, **form: object) -> torch.Tensor:
        tensor = made(*given, **form)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)

    monkeypatch.setattr(torch, "empty", empty)


def random_ones(tokens: int, choices: int, experts: int, elsewhere: float, generator: torch.Generator) -> torch.Tensor:
    chosen = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :choices].int().contiguous()
    chosen[torch.rand(chosen.shape, generator=generator) < elsewhere] = -1
    return chosen


CHOICES = {
    "random": lambda generator: random_ones(128, 8, 256, 0.0, generator),
    "nine of 257": lambda generator: random_ones(64, 9, 257, 0.0, generator),
    "most": lambda generator: random_ones(expert_order.MOST_CHOICES // 32, 32, 32, 0.0, generator),
    "few experts": lambda generator: random_ones(33, 3, 5, 0.3, generator),
    "other GPUs'": lambda generator: random_ones(40, 8, 32, 0.9, generator),
    "none here": lambda generator: torch.full((24, 8), -1, dtype=torch.int32),
    "every token the same": lambda generator: random_ones(1, 8, 256, 0.0, generator).repeat(100, 1),
    "one": lambda generator: torch.tensor([[3]], dtype=torch.int32),
    "a whole block": lambda generator: torch.full((16, 1), 4, dtype=torch.int32),
}


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("name", CHOICES)
def test_rows_are_in_blocks_and_quantised(device, name, block):
    generator = torch.Generator().manual_seed(block)
    chosen = CHOICES[name](generator)
    experts = {"nine of 257": 257, "few experts": 5, "most": 32, "other GPUs'": 32}.get(name, 256)
    x = torch.randn(len(chosen), HIDDEN, generator=generator).bfloat16()
    x[0] = 0.0
    more = {"counters": block // 8, "others": block == 16}
    found = order(x.to(device), chosen.to(device), block, experts, **more)
    wanted = order_torch(x.to(device), chosen.to(device), block, experts, **more)
    assert torch.equal(found.padded, wanted.padded)
    for name in ("sorted_ids", "expert_ids", "counters"):
        rows, of_twin = getattr(found, name), getattr(wanted, name)
        assert torch.equal(rows[: len(of_twin)], of_twin)
        assert rows[len(of_twin) :].eq(POISON).all()
    assert len(found.sorted_ids) == most_rows(chosen.numel(), experts, block)
    if device == "cpu":
        values, scales = wanted.values, wanted.scales
    else:  # by a division that is not exact, as SGLang has it
        values, scales = quantise(x.to(device), Scales.EXACT)
    assert torch.equal(found.scales, scales.contiguous())
    assert torch.equal(found.values.view(torch.uint8), values.view(torch.uint8))


def test_what_cannot_be_served_says_so(device):
    x, chosen = torch.zeros(16, HIDDEN, device=device).bfloat16(), torch.zeros(16, 8, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="128 choices on hidden states of 960: at most 9216 and multiples of 1024 are served"):
        order(x[:, :960].contiguous(), chosen, 16, 256)
    with pytest.raises(ValueError, match="blocks of 48 rows with 1 counters"):
        order(x, chosen, 48, 256)
    with pytest.raises(ValueError, match=r"chosen must be contiguous torch\.int32"):
        order(x, chosen.long(), 16, 256)
    with pytest.raises(ValueError, match="chosen must be of a choice or more"):
        order(x[:0], chosen[:0], 16, 256)
