"""Experts whose weights are read once for all tokens that chose them are bit by bit those of `early_experts`."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from emulated import emulator, with_experts
from test_early_experts import run as apart
from test_few_experts import EXPERTS, inputs, of_any_size, with_shared
from test_few_experts import check as of_few

from nsa_backend.kernels import experts_once
from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.early_experts import DOWN, GATE_UP, WIDTH
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.layer_front_weights import Scales

pytestmark = pytest.mark.usefixtures("poisoned")

HIDDEN = 1024


def run(x: torch.Tensor, experts: ExpertWeights, shares: torch.Tensor, chosen: torch.Tensor, **options) -> torch.Tensor:
    launch = None if x.is_cuda else with_experts(experts_once, x, chosen, options.get("shared"))
    return experts_once.experts_once(x, experts, shares, chosen, launch=launch, **options)


check = partial(of_few, call=run)


def given_once(tokens: int, device: str) -> dict:
    """Of few experts, which an emulated GPU has soon: of more than eight tokens all are of more than eight."""
    given = inputs(tokens, 5, HIDDEN, WIDTH, device, seed=tokens)
    return given | {"chosen": given["chosen"] % 3 if tokens > experts_once.TILE else given["chosen"]}


@pytest.mark.parametrize("tokens", [1, 16, 0])
def test_what_experts_give(device, tokens):
    check(given_once(tokens, device), factor=2.5)


def test_sums_are_those_of_tokens_that_read_weights_for_themselves(device):
    """Random floats: silu in its steep part, scales of any value."""
    given = of_any_size(given_once(3, device))
    assert torch.equal(run(**given), apart(**given))


@pytest.mark.parametrize(("tokens", "scales"), [(3, Scales.EXACT), (9, Scales.POWERS_OF_TWO)])
def test_a_shared_expert_is_read_for_every_token(device, tokens, scales):
    given = with_shared(given_once(tokens, device), scales)
    given["x"] *= 0.7  # whose scales are then no powers of two
    given["chosen"][0, 0] = -1
    check(given, factor=2.5)


def test_one_expert_may_be_of_all_tokens_twice_of_one_or_of_another_gpu(device):
    """Rows that only fill a graph may choose an expert twice. Nothing of other GPUs' is read, so it may be anything."""
    given = given_once(8, device)
    given["chosen"][:, 3] = 3
    given["chosen"][0] = -1
    given["chosen"][1, 1] = given["chosen"][2, 0] = -1
    given["chosen"][4] = torch.tensor([4, 2, 4, 4, 2], device=device)
    given["shares"][given["chosen"] < 0] = float("nan")
    assert check(given)[0].eq(0).all()
    given["chosen"][:] = -1
    given["shares"][:] = float("nan")
    assert run(**given).eq(0).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "choices", "shared"), [(7168, 8, True), (7168, 8, False), (6144, 9, False)])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16])
def test_a_layers_experts(hidden, choices, shared, tokens):
    given = inputs(tokens, choices, hidden, WIDTH, "cuda", seed=tokens)
    given = with_shared(given, Scales.POWERS_OF_TWO) if shared else given
    assert torch.equal(check(given, factor=2.5), apart(**given, factor=2.5))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_any_choices(seed):
    """Of so few experts that most are shared, some of them on other GPUs."""
    generator = torch.Generator().manual_seed(seed)
    tokens, choices = (int(torch.randint(1, most, (), generator=generator)) for most in (17, 9))
    given = of_any_size(inputs(tokens, choices, HIDDEN, WIDTH, "cuda", seed=seed))
    given["chosen"] = torch.randint(-2, EXPERTS, (tokens, choices), generator=generator).clamp_min(-1).int().cuda()
    assert torch.equal(run(**given), apart(**given))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize(("hidden", "choices", "shared"), [(7168, 8, True), (6144, 9, False)])
def test_a_graph_gives_the_same_every_time(hidden, choices, shared, tokens):
    """Launches begin before those ahead of them end, and many blocks meet: no replay differs."""
    given = of_any_size(inputs(tokens, choices, hidden, WIDTH, "cuda"))
    given = with_shared(given, Scales.POWERS_OF_TWO) if shared else given
    wanted, out = apart(**given), torch.empty_like(given["x"])
    run(**given, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(**given, out=out)
    for _ in range(100):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted)


OF_A_RANK = pytest.mark.parametrize(("hidden", "choices", "shared", "tokens"), [(7168, 8, 1, 8), (6144, 9, 0, 16)])
OF_AN_SM = 228 << 10
"""Bytes of shared memory, of which a block takes 1 KB more than it has."""


@pytest.mark.parametrize(
    ("hidden", "choices", "shared", "tokens"),
    [(7168, 8, 1, 8), (6144, 9, 0, 16), (HIDDEN, 8, 1, 8), (HIDDEN, 9, 0, 16)],
)
def test_blocks_have_the_shared_memory_of_the_source_and_room_for_one_another(hidden, choices, shared, tokens):
    """Of short rows the second launch has more of it."""
    found = []
    for which in (GATE_UP, DOWN):
        macros = experts_once.constants(which, hidden, choices, shared, tokens, powers=False)
        found.append(experts_once.shared_bytes(which, hidden, choices, shared, tokens))
        assert macros["BLOCKS_OF_SM"] * (found[-1] + 1024) <= OF_AN_SM
    assert emulator(experts_once.SOURCE, "Experts", DOWN, **macros).shared_bytes() == max(found)
    assert max(found) == found[hidden == HIDDEN]


def test_the_most_choices_compile_for_hopper():
    """A thread of the second launch has one of all choices."""
    for tokens in (experts_once.TILE, experts_once.MOST_TOKENS):
        compiled(experts_once.SOURCE, experts_once.constants(DOWN, 7168, experts_once.MOST_EACH, 0, tokens, powers=False))


@pytest.mark.parametrize("which", [GATE_UP, DOWN])
@OF_A_RANK
def test_it_compiles_for_hopper_with_nearly_all_in_registers(which, hidden, choices, shared, tokens):
    macros = experts_once.constants(which, hidden, choices, shared, tokens, powers=bool(shared))
    _, said = compiled(experts_once.SOURCE, macros)
    of_this = said[said.index(f"entry function '{which}'") :].split("Compiling")[0]
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", of_this)]
    assert len(spilled) == 2
    assert max(spilled) <= 16


def test_what_cannot_be_served_says_so():
    assert experts_once.problem(7168, 256, 8, 1, 16) is None
    assert "17 tokens" in experts_once.problem(7168, 256, 8, 1, 17)
    assert "11 experts of a token" in experts_once.problem(7168, 256, 10, 1)
    assert "experts of 128" in experts_once.problem(7168, 128, 8, 1)
    with pytest.raises(ValueError, match="17 tokens: up to 16"):
        experts_once.experts_once(**inputs(17, 2, HIDDEN, WIDTH, "cpu"))
