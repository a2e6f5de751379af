"""The second product of experts of many tokens in blocks of 128 rows: on a GPU as it is, and without one on emulated blocks."""

from __future__ import annotations

import pytest
import torch
from emulated import emulating
from rows_by_expert import CHOICES, of_second_product

from nsa_backend.kernels.down_blocks import down_blocks, kernel_for
from nsa_backend.kernels.down_rows_torch import down_rows_torch
from nsa_backend.kernels.expert_tiles import BLOCK

pytestmark = pytest.mark.usefixtures("poisoned")


def multiplied(given: dict[str, torch.Tensor], *, sms: int = 2, seed: int = 0) -> torch.Tensor:
    """A call, on a GPU or on so many emulated blocks."""
    kernel = kernel_for(given["second"].shape[1])
    out = torch.empty(*given["shares"].shape, kernel.hidden, dtype=torch.bfloat16, device=given["values"].device)
    return down_blocks(**given, out=out, num_sms=sms, **({} if out.is_cuda else emulating(kernel, seed)))


@pytest.mark.parametrize(
    ("tokens", "hidden", "others", "sms"), [(1, 1024, 0.0, 2), (9, 512, 0.4, 4), (100, 1024, 0.0, 4), (5, 512, 1.0, 2)]
)
def test_every_choice_is_written(device, tokens, hidden, others, sms):
    """With experts of one block and of two."""
    given = of_second_product(tokens, hidden, BLOCK, device, others)
    found, wanted = multiplied(given, sms=sms, seed=tokens), down_rows_torch(**given, block=BLOCK)
    assert not wanted.isnan().any()
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-5)
    assert float((found != wanted).float().mean()) < 0.1  # a share multiplies scales, and tensor cores keep 14 bits of a sum


def test_no_rows_write_nothing(device):
    given = of_second_product(2, 512, BLOCK, device) | {"padded": torch.zeros(1, dtype=torch.int32, device=device)}
    assert multiplied(given).isnan().all()


def test_what_cannot_be_served_says_so(device):
    given = of_second_product(2, 512, BLOCK, device)
    out = torch.empty(2, CHOICES, 512, dtype=torch.bfloat16, device=device)
    with pytest.raises(
        ValueError, match="experts of 384 on hidden states of 512: 256 on multiples of 256 from 512 to 8192 are served"
    ):
        down_blocks(**given | {"values": torch.cat([given["values"], given["values"][:, :128]], 1)}, out=out)
    with pytest.raises(ValueError, match=r"scales must be contiguous torch.float32 \[\d+, 2\]"):
        down_blocks(**given | {"scales": given["scales"].half()}, out=out)
    with pytest.raises(ValueError, match=r"out must be contiguous torch.bfloat16 \[2, 8, 512\]"):
        down_blocks(**given, out=out.float())
    with pytest.raises(ValueError, match="expert_ids must be of at least"):
        down_blocks(**given | {"expert_ids": given["expert_ids"][:1]}, out=out)
