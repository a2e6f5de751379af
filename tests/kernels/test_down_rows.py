"""The second product of experts of many tokens, against its twin: poisoned memory, rows of padding, another GPU's experts."""

from __future__ import annotations

import pytest
import torch
from rows_by_expert import CHOICES, of_second_product

from nsa_backend.kernels.down_rows import Tile, down_rows
from nsa_backend.kernels.down_rows_torch import down_rows_torch

pytestmark = pytest.mark.usefixtures("poisoned")

HIDDEN = 512
TILE = Tile(columns=128, steps=2)


@pytest.mark.parametrize(
    ("tokens", "block", "others"), [(1, 16, 0.0), (9, 16, 0.4), (12, 64, 0.0), (5, 32, 1.0), (100, 128, 0.4)]
)
@pytest.mark.parametrize("tile", [Tile(columns=64, steps=4), None])
def test_every_choice_is_written(device, tokens, block, others, tile):
    given = of_second_product(tokens, HIDDEN, block, device, others)
    out = torch.empty(tokens, CHOICES, HIDDEN, dtype=torch.bfloat16, device=device)
    found = down_rows(**given, block=block, out=out, tile=tile)
    wanted = down_rows_torch(**given, block=block)
    assert found is out
    assert not wanted.isnan().any()
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-5)
    assert float((found != wanted).float().mean()) < (0.1 if device == "cuda" else 0.02)  # tensor cores keep 14 bits of a sum


def test_no_rows_write_nothing(device):
    given = of_second_product(2, HIDDEN, 16, device) | {"padded": torch.zeros(1, dtype=torch.int32, device=device)}
    out = torch.empty(2, CHOICES, HIDDEN, dtype=torch.bfloat16, device=device)
    assert down_rows(**given, block=16, out=out, tile=TILE).isnan().all()


def test_what_cannot_be_served_says_so(device):
    given = of_second_product(2, HIDDEN, 16, device)
    given["out"] = torch.empty(2, CHOICES, HIDDEN, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="experts of 128 on hidden states of 512: 256 on multiples of 128 are served"):
        down_rows(**given | {"values": given["values"][:, :128].contiguous()}, block=16, tile=TILE)
    with pytest.raises(ValueError, match=r"scales must be contiguous torch.float32 \[\d+, 2\]"):
        down_rows(**given | {"scales": given["scales"].half()}, block=16, tile=TILE)
    with pytest.raises(ValueError, match="sorted_ids must be of at least"):
        down_rows(**given | {"sorted_ids": given["sorted_ids"][:8]}, block=16, tile=TILE)
    with pytest.raises(ValueError, match="expert_ids must be of at least"):
        down_rows(**given | {"expert_ids": given["expert_ids"][:1]}, block=16, tile=TILE)
    with pytest.raises(ValueError, match=r"out must be contiguous torch.bfloat16 \[2, 8, 512\]"):
        down_rows(**given | {"out": given["out"].float()}, block=16, tile=TILE)
