"""What is between both products of experts, against its twin: poisoned memory, rows of padding, any width."""

from __future__ import annotations

import pytest
import torch
from fp8_rows import near

from nsa_backend.kernels import expert_activation
from nsa_backend.kernels.expert_activation import activate
from nsa_backend.kernels.expert_activation_torch import activate_torch

pytestmark = pytest.mark.usefixtures("poisoned")

EXPERTS, BLOCK = 5, 16


def inputs(rows: int, width: int, device: str) -> dict[str, torch.Tensor]:
    """Rows of which the last block has only padding, and one expert is another GPU's."""
    generator = torch.Generator().manual_seed(rows + width)
    blocks = -(-rows // BLOCK)
    given = {
        "both": torch.randn(rows, 2 * width, generator=generator).mul(3).bfloat16(),
        "chosen": torch.randint(0, EXPERTS, (rows,), generator=generator, dtype=torch.int32),
        "expert_ids": torch.randint(-1, EXPERTS, (blocks,), generator=generator, dtype=torch.int32),
        "padded": torch.tensor([max(rows - BLOCK, 0)], dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in given.items()}


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (33, 256), (48, 512), (0, 256)])
def test_rows_of_choices(device, rows, width):
    given = inputs(rows, width, device)
    values, scales = activate(**given, block=BLOCK)
    wanted, wanted_scales = activate_torch(given["both"])
    assert near(values, scales, wanted, wanted_scales)


def test_rows_of_another_gpus_experts_are_left_as_they_are(device):
    given = inputs(32, 256, device)
    given["chosen"][:20] = -1
    given["both"][:20] = float("nan")
    values, scales = activate(**given, block=BLOCK)
    wanted, wanted_scales = activate_torch(given["both"][20:])
    assert near(values[20:], scales[20:], wanted, wanted_scales)
    assert torch.equal(values[:20].view(torch.uint8), torch.empty_like(values[:20]).view(torch.uint8))
    assert scales[:20].isnan().all()


@pytest.mark.parametrize("few", [64, 0], ids=["one a program", "several a program"])
@pytest.mark.parametrize("width", [128, 256])
def test_rows_in_blocks_leave_padding_and_other_gpus_experts_as_they_are(device, monkeypatch, width, few):
    monkeypatch.setattr(expert_activation, "FEW_ROWS", few)
    rows, choices = 64, 30
    given = inputs(rows, width, device)
    given["padded"] = torch.tensor([48], dtype=torch.int32, device=device)
    given["expert_ids"] = torch.tensor([-1, 0, 3, -1], dtype=torch.int32, device=device)
    given["chosen"] = torch.zeros(choices, dtype=torch.int32, device=device)
    order = torch.full((rows + 8,), choices, dtype=torch.int32)
    there = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:choices]
    order[there] = torch.arange(choices, dtype=torch.int32)
    order[50] = 3  # behind the last block: whatever lies there
    there = there[there >= BLOCK].to(device)
    others = torch.ones(rows, dtype=torch.bool, device=device).index_fill(0, there, False)
    given["both"][others] = float("nan")
    values, scales = activate(**given, block=BLOCK, sorted_ids=order.to(device))
    wanted, wanted_scales = activate_torch(given["both"][there])
    assert near(values[there], scales[there], wanted, wanted_scales)
    untouched = torch.empty_like(values)
    assert torch.equal(values[others].view(torch.uint8), untouched[others].view(torch.uint8))


def test_what_cannot_be_served_says_so(device):
    given = inputs(16, 256, device)
    with pytest.raises(ValueError, match=r"both must be contiguous torch.bfloat16 \[16, 512\]"):
        activate(**given | {"both": given["both"].float()}, block=BLOCK)
    with pytest.raises(ValueError, match="experts of 192: powers of two from 128 on are served"):
        activate(**given | {"both": given["both"][:, :384].contiguous()}, block=BLOCK)
    with pytest.raises(ValueError, match="chosen must be of 16 choices"):
        activate(**given | {"chosen": given["chosen"][:8]}, block=BLOCK)
    with pytest.raises(ValueError, match="sorted_ids must be of at least 16 rows"):
        activate(**given, block=BLOCK, sorted_ids=given["expert_ids"])
    with pytest.raises(ValueError, match="expert_ids must be of at least 2 blocks"):
        activate(**given, block=8, sorted_ids=given["chosen"])
