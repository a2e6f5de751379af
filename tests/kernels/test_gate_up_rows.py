"""The first product of experts of many tokens: on a GPU as it is, and without one on emulated blocks."""

from __future__ import annotations

import pytest
import torch
from emulated import emulating
from fp8_rows import NAN, near
from rows_by_expert import with_more

from nsa_backend.kernels.expert_tiles import BLOCK, WIDTH
from nsa_backend.kernels.gate_up_rows import gate_up_rows, kernel_for
from nsa_backend.kernels.gate_up_rows_torch import gate_up_rows_torch
from nsa_backend.kernels.layer_front_weights import GROUP

pytestmark = pytest.mark.usefixtures("poisoned")

EXPERTS, CHOICES = 3, 2


def inputs(tokens: int, hidden: int, device: str, others: float = 0.0) -> dict:
    """Choices in blocks by expert; with `others` so many are of another GPU's experts. What nobody may read is NaN."""
    generator = torch.Generator().manual_seed(tokens + hidden)
    chosen = torch.randint(0, EXPERTS, (tokens * CHOICES,), generator=generator)
    chosen[torch.rand(len(chosen), generator=generator) < others] = -1
    order = with_more(chosen, EXPERTS, BLOCK, len(chosen) + 5)
    x = torch.randn(tokens, hidden, generator=generator).to(torch.float8_e4m3fn)
    unused = [token for token in range(tokens) if (chosen.view(tokens, CHOICES)[token] < 0).all()]
    x.view(torch.uint8)[unused] = NAN
    given = {
        "x": x,
        "x_scales": torch.rand(tokens, hidden // GROUP, generator=generator),
        "first": torch.randn(EXPERTS, 2 * WIDTH, hidden, generator=generator).to(torch.float8_e4m3fn),
        "first_scales": torch.rand(EXPERTS, 2 * WIDTH // GROUP, hidden // GROUP, generator=generator) / hidden**0.5,
    }
    return {name: tensor.to(device) for name, tensor in (given | order).items()} | {"of_token": CHOICES}


def multiplied(given: dict, *, sms: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A call, on a GPU or on so many emulated blocks."""
    emulated = {} if given["x"].is_cuda else emulating(kernel_for(given["x"].shape[1]), seed)
    return gate_up_rows(**given, rows=len(given["sorted_ids"]), num_sms=sms, **emulated)


def expect_right(given: dict, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Rows are the twin's, and nothing else was written."""
    values, scales = found
    rows, wanted, wanted_scales = gate_up_rows_torch(**given, block=BLOCK)
    assert near(values[rows], scales[rows], wanted, wanted_scales, of_sums=True)
    untouched = torch.ones(len(values), dtype=torch.bool, device=values.device).index_fill(0, rows, False)
    assert torch.equal(values[untouched].view(torch.uint8), torch.empty_like(values)[untouched].view(torch.uint8))
    assert scales[untouched].isnan().all()


@pytest.mark.parametrize(
    ("tokens", "hidden", "others", "sms"),
    [(3, 640, 0.0, 2), (230, 384, 0.0, 4), (40, 640, 0.6, 6), (5, 640, 1.0, 2)],
)
def test_rows_are_what_both_projections_give_activated(device, tokens, hidden, others, sms):
    """With experts of one block and of two."""
    given = inputs(tokens, hidden, device, others)
    if sms > 2:  # as where SGLang's shared expert has them too
        given["x_scales"] = given["x_scales"].T.contiguous().T
    expect_right(given, multiplied(given, sms=sms, seed=tokens))


@pytest.mark.parametrize("before", [30, 31, 33])
def test_blocks_of_an_expert_of_very_many_go_in_pairs(device, before):
    """Behind blocks of padding. The last block has no neighbour, but for what lies behind the order."""
    given, of_expert = inputs(4, 128, device), before + 4 - before % 2
    rows = torch.full((of_expert + 2, BLOCK), 4 * CHOICES, dtype=torch.int32)
    rows[before : before + 4, :2] = torch.arange(8, dtype=torch.int32).view(4, 2)
    rows[-2:, 0] = 3
    given |= {
        "sorted_ids": rows.flatten().to(device),
        "expert_ids": torch.tensor([0] * of_expert + [2, 2], dtype=torch.int32, device=device),
        "padded": torch.tensor([(of_expert + 1) * BLOCK], dtype=torch.int32, device=device),
    }
    expect_right(given, multiplied(given, sms=2, seed=before))


def test_no_rows_write_nothing(device):
    given = inputs(2, 640, device) | {"padded": torch.zeros(1, dtype=torch.int32, device=device)}
    _, scales = multiplied(given)
    assert scales.isnan().all()


def test_what_cannot_be_served_says_so(device):
    given = inputs(2, 256, device)
    with pytest.raises(ValueError, match="experts of 256 on hidden states of 192: 256 on multiples of 128 are served"):
        multiplied(given | {"x": given["x"][:, :192].contiguous()})
    with pytest.raises(ValueError, match="experts of 128 on hidden states of 256"):
        multiplied(given | {"first": given["first"][:, :256].contiguous()})
    with pytest.raises(ValueError, match=r"x_scales must be float32 \[2, 2\]"):
        multiplied(given | {"x_scales": given["x_scales"].half()})
    with pytest.raises(ValueError, match="expert_ids must be of at least"):
        multiplied(given | {"expert_ids": given["expert_ids"][:1]})
    with pytest.raises(ValueError, match="300 rows: blocks have 128 each"):
        gate_up_rows(**given, rows=300)
