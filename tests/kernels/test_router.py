"""Which experts tokens choose, against torch: on an emulated GPU and on a real one, on poisoned memory."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from emulated import emulator, routing

from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.router import (
    EXPERTS,
    MOST_ROWS,
    SERVED,
    SOURCE,
    Choice,
    Division,
    constants,
    counter,
    problem,
    route,
)
from nsa_backend.kernels.router_torch import choose_torch, route_torch

pytestmark = pytest.mark.usefixtures("poisoned")

HIDDEN = 1024
MODELS = {"DeepSeek-V3.2": (7168, Choice(8, groups=8, kept=4)), "GLM-5": (6144, Choice(8, shared=True))}
CHOICES = {
    "groups": Choice(8, groups=8, kept=4),
    "no groups, shared": Choice(8, shared=True),
    "few": Choice(3, groups=32, kept=2),
}


def inputs(rows: int, hidden: int, device: str, whole: bool = False) -> dict:
    """Random ones, with poison behind the rows; of whole numbers where sums are to be exact."""

    def values(*shape: int) -> torch.Tensor:
        drawn = torch.randint(-3, 4, shape, device=device) if whole else torch.randn(*shape, device=device)
        return drawn.bfloat16()

    x = torch.full((MOST_ROWS + 8, hidden), torch.nan, dtype=torch.bfloat16, device=device)[:rows]
    x.copy_(values(rows, hidden))
    weight = values(EXPERTS, hidden) * (2.0**-5 if whole else hidden**-0.5)
    return {"hidden": x, "weight": weight, "bias": torch.randn(EXPERTS, device=device) / 8}


def check(given: dict, choice: Choice, division: Division, launches: int = 2, **options) -> None:
    """Choices of `route` are those of its logits, which are torch's but for rounding, in every one of some launches."""
    arrived = counter(given["hidden"].device)
    wanted, size = route_torch(**given, choice=choice), given["hidden"].double().abs() @ given["weight"].double().abs().T
    for _ in range(launches):
        found = route(**given, choice=choice, arrived=arrived, division=division, factor=2.5, of_shared=0.4, **options)
        assert ((found.logits.double() - wanted.logits.double()).abs() <= 2**-18 * size).all()
        shares, chosen = choose_torch(found.logits, given["bias"], choice, factor=2.5, of_shared=0.4)
        assert torch.equal(found.chosen, chosen)
        assert torch.allclose(found.shares, shares, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("rows", "which", "division"),
    [(1, "groups", SERVED), (9, "groups", SERVED), (32, "no groups, shared", SERVED), (8, "few", Division(8, 4))],
)
def test_choices(rows, which, division):
    torch.manual_seed(rows)
    choice = CHOICES[which]
    launch = routing(HIDDEN, choice, rows, seed=rows, division=division)
    check(inputs(rows, HIDDEN, "cpu"), choice, division, launch=launch)


def test_of_equal_scores_the_first_is_chosen():
    """And of equal groups the first are kept: logits of whole numbers have few values, and no bias tells them apart."""
    torch.manual_seed(0)
    for choice in (Choice(8, groups=8, kept=4), Choice(8)):
        given = inputs(4, HIDDEN, "cpu", whole=True) | {"bias": torch.zeros(EXPERTS)}
        given["hidden"][0] = 0
        check(given, choice, SERVED, launches=1, launch=routing(HIDDEN, choice, 4))


def test_a_score_that_is_no_number_is_chosen_last():
    torch.manual_seed(1)
    given, choice = inputs(2, HIDDEN, "cpu"), Choice(8, groups=8, kept=4)
    given["bias"][::2] = torch.nan
    arrived = counter(given["hidden"].device)
    found = route(**given, choice=choice, arrived=arrived, launch=routing(HIDDEN, choice, 2))
    assert (found.chosen % 2 == 1).all()
    given["hidden"][1] = torch.nan
    found = route(**given, choice=choice, arrived=arrived, launch=routing(HIDDEN, choice, 2))
    assert ((found.chosen >= 0) & (found.chosen < EXPERTS)).all()
    assert all(len(set(row)) == choice.chosen for row in found.chosen.tolist())


def test_counts_of_blocks_overflow():
    """After 33 million launches they are more than 32 bits hold."""
    torch.manual_seed(2)
    given, choice, blocks = inputs(3, HIDDEN, "cpu"), Choice(8), SERVED.blocks
    arrived, launch = torch.tensor([-blocks], dtype=torch.int32), routing(HIDDEN, choice, 3)
    found = [route(**given, arrived=arrived, choice=choice, launch=launch) for _ in range(2)]
    assert torch.equal(found[0].chosen, found[1].chosen)
    assert arrived.item() == blocks


@pytest.mark.parametrize(
    ("experts", "hidden", "choice", "why"),
    [
        (384, 7168, Choice(), "384 experts"),
        (256, 7000, Choice(), "hidden states of 7000"),
        (256, 16384, Choice(), "hidden states of 16384"),
        (256, 7168, Choice(groups=3), "1 of 3 groups"),
        (256, 7168, Choice(groups=8, kept=9), "9 of 8 groups"),
        (256, 7168, Choice(9), "9 experts a token"),
    ],
)
def test_what_it_refuses(experts, hidden, choice, why):
    assert problem(experts, hidden, choice).startswith(why)


def test_it_refuses_tensors_that_it_would_misread():
    given, choice = inputs(2, HIDDEN, "cpu"), Choice()
    for name, wrong in (
        ("hidden", given["hidden"].float()),
        ("hidden", torch.zeros(MOST_ROWS + 1, HIDDEN, dtype=torch.bfloat16)),
        ("weight", given["weight"].T.contiguous().T),
        ("bias", given["bias"].bfloat16()),
        ("arrived", torch.zeros(2, dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match=name):
            route(**({"arrived": counter(torch.device("cpu")), "choice": choice} | given | {name: wrong}))


def test_a_block_is_given_the_shared_memory_that_the_source_lays_out():
    source = emulator(SOURCE, "Router", SOURCE.stem, **constants(HIDDEN, Choice(), MOST_ROWS))
    assert source.shared_bytes() == SERVED.shared_bytes(MOST_ROWS // 8)


@pytest.mark.slow
@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_it_compiles_for_hopper_with_all_in_registers(which, rows):
    hidden, choice = MODELS[which]
    _, said = compiled(SOURCE, constants(hidden, choice, rows))
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}


@pytest.mark.gpu
@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 9, 16, 17, 24, 32])
def test_choices_of_a_layer(which, rows):
    torch.manual_seed(rows)
    hidden, choice = MODELS[which]
    check(inputs(rows, hidden, "cuda"), choice, SERVED, launches=50)
    check(inputs(rows, hidden, "cuda"), replace(choice, shared=not choice.shared), SERVED, launches=3)
