"""The first product of experts of many tokens: on a GPU as it is, and without one on emulated blocks."""

from __future__ import annotations

import pytest
import torch
from emulated import multiply_emulator, multiplying
from fp8_rows import NAN, near
from rows_by_expert import with_more

from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.expert_tiles import BLOCK
from nsa_backend.kernels.gate_up_rows import gate_up_rows, kernel_for
from nsa_backend.kernels.gate_up_rows_torch import gate_up_rows_torch
from nsa_backend.kernels.layer_front_weights import GROUP

pytestmark = pytest.mark.usefixtures("poisoned")

EXPERTS, CHOICES = 3, 2


def inputs(tokens: int, hidden: int, width: int, device: str, others: float = 0.0) -> dict:
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
        "first": torch.randn(EXPERTS, 2 * width, hidden, generator=generator).to(torch.float8_e4m3fn),
        "first_scales": torch.rand(EXPERTS, 2 * width // GROUP, hidden // GROUP, generator=generator) / hidden**0.5,
    }
    return {name: tensor.to(device) for name, tensor in (given | order).items()} | {"of_token": CHOICES}


def multiplied(given: dict, *, sms: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A call, on a GPU or on so many emulated blocks."""
    kernel = kernel_for(given["x"].shape[1], given["first"].shape[1] // 2)
    launch = None if given["x"].is_cuda else multiplying(kernel, seed)
    return gate_up_rows(**given, rows=len(given["sorted_ids"]), num_sms=sms, launch=launch)


@pytest.mark.parametrize(
    ("tokens", "hidden", "width", "others", "sms"),
    [(3, 768, 128, 0.0, 1), (230, 768, 128, 0.0, 2), (40, 640, 256, 0.6, 3), (5, 768, 128, 1.0, 2)],
)
def test_rows_are_what_both_projections_give_activated(device, tokens, hidden, width, others, sms):
    given = inputs(tokens, hidden, width, device, others)
    if sms > 1:  # as where SGLang's shared expert has them too
        given["x_scales"] = given["x_scales"].T.contiguous().T
    values, scales = multiplied(given, sms=sms, seed=tokens)
    rows, wanted, wanted_scales = gate_up_rows_torch(**given, block=BLOCK)
    assert near(values[rows], scales[rows], wanted, wanted_scales)
    untouched = torch.ones(len(values), dtype=torch.bool, device=device).index_fill(0, rows, False)
    assert torch.equal(values[untouched].view(torch.uint8), torch.empty_like(values)[untouched].view(torch.uint8))
    assert scales[untouched].isnan().all()


def test_no_rows_write_nothing(device):
    given = inputs(2, 768, 128, device) | {"padded": torch.zeros(1, dtype=torch.int32, device=device)}
    _, scales = multiplied(given)
    assert scales.isnan().all()


def test_blocks_have_room_in_shared_memory():
    kernel = kernel_for(768, 128)
    assert multiply_emulator(kernel).shared_bytes() == kernel.shared_bytes <= 232448


@pytest.mark.parametrize("hidden", [7168, 6144])
def test_it_compiles_for_hopper_with_all_in_registers(hidden):
    kernel = kernel_for(hidden, 256)
    _, said = compiled(kernel.source, kernel.constants)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "serialized" not in said


def test_what_cannot_be_served_says_so(device):
    given = inputs(2, 256, 128, device)
    with pytest.raises(ValueError, match="experts of 128 on hidden states of 192: multiples of 128 are served"):
        multiplied(given | {"x": given["x"][:, :192].contiguous()})
    with pytest.raises(ValueError, match=r"x_scales must be float32 \[2, 2\]"):
        multiplied(given | {"x_scales": given["x_scales"].half()})
    with pytest.raises(ValueError, match="expert_ids must be of at least"):
        multiplied(given | {"expert_ids": given["expert_ids"][:1]})
    with pytest.raises(ValueError, match="300 rows: blocks have 128 each"):
        gate_up_rows(**given, rows=300, num_sms=1)
