"""Experts of few tokens that tensor cores multiply against their twin: poisoned memory, choices of other GPUs."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from emulated import with_experts
from test_few_experts import by_torch, inputs, of_any_size, with_shared
from test_few_experts import check as of_few

from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.early_experts import DOWN, GATE_UP, SOURCE, WIDTH, constants, early_experts, problem
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.layer_front_weights import Scales

pytestmark = pytest.mark.usefixtures("poisoned")

HIDDEN = 1024


def run(x: torch.Tensor, experts: ExpertWeights, shares: torch.Tensor, chosen: torch.Tensor, **options) -> torch.Tensor:
    launch = None if x.is_cuda else with_experts(x, chosen, options.get("shared"))
    return early_experts(x, experts, shares, chosen, launch=launch, **options)


check = partial(of_few, call=run)


@pytest.mark.parametrize(("tokens", "choices"), [(1, 8), (3, 2), (0, 2)])
def test_what_experts_give(device, tokens, choices):
    check(inputs(tokens, choices, HIDDEN, WIDTH, device), factor=2.5)


@pytest.mark.slow
@pytest.mark.parametrize("scales", Scales)
@pytest.mark.parametrize(("tokens", "choices"), [(1, 5), (2, 2)])
def test_a_shared_expert_is_one_more_choice_of_every_token(device, tokens, choices, scales):
    """What it gives is rounded for itself and has neither share nor factor; its inputs' scales may be of another form."""
    given = with_shared(inputs(tokens, choices, HIDDEN, WIDTH, device), scales)
    given["x"] *= 0.7  # whose scales are then no powers of two
    given["chosen"][0, 0] = -1
    check(given, factor=2.5)


def test_choices_of_other_gpus_give_nothing(device):
    """A token may have none here at all. Nothing of theirs is read, so what lies there may be anything."""
    given = inputs(4, 3, HIDDEN, WIDTH, device)
    given["chosen"][0] = -1
    given["chosen"][1, 1] = given["chosen"][2, 0] = -1
    given["shares"][given["chosen"] < 0] = float("nan")
    check(given)
    assert run(**given)[0].eq(0).all()


def test_gates_that_are_half_open_and_values_of_any_size(device):
    """Random floats: silu in its steep part, scales of any value."""
    given = of_any_size(inputs(3, 4, HIDDEN, WIDTH, device))
    found, wanted = run(**given).float(), by_torch(given).float()
    assert (found - wanted).norm() < 5e-3 * wanted.norm()
    assert torch.equal(found, run(**given).float())


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "choices", "shared"), [(7168, 8, True), (7168, 8, False), (6144, 9, False)])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_a_layers_experts(hidden, choices, shared, tokens):
    given = inputs(tokens, choices, hidden, WIDTH, "cuda", seed=tokens)
    check(with_shared(given, Scales.POWERS_OF_TWO) if shared else given, factor=2.5)


@pytest.mark.parametrize("which", [GATE_UP, DOWN])
@pytest.mark.parametrize(("hidden", "choices", "shared"), [(7168, 8, 1), (6144, 9, 0)])
def test_it_compiles_for_hopper_with_nearly_all_in_registers(which, hidden, choices, shared):
    _, said = compiled(SOURCE, constants(which, hidden, choices, shared, powers=bool(shared)))
    of_this = said[said.index(f"entry function '{which}'") :].split("Compiling")[0]
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", of_this)]
    assert len(spilled) == 2
    assert max(spilled) <= 8


def test_what_cannot_be_served_says_so():
    assert problem(7168, 256, 8, 1) is None
    assert problem(6144, 256, 9, 0) is None
    assert "experts of 128" in problem(7168, 128, 8, 1)
    assert "hidden states of 7296" in problem(7296, 256, 8, 1)
    assert "17 experts of a token" in problem(7168, 256, 16, 1)
    given = inputs(1, 2, HIDDEN, WIDTH, "cpu")
    with pytest.raises(ValueError, match=r"chosen must be contiguous torch\.int32"):
        early_experts(**given | {"chosen": given["chosen"].long()})
    with pytest.raises(ValueError, match="hidden states of 512"):
        early_experts(**inputs(1, 2, 512, WIDTH, "cpu"))
