"""SGLang's products of experts with launches of ours before and between them: SGLang's kernels, interpreted."""

from __future__ import annotations

import logging

import pytest
import torch

from nsa_backend.adapters import expert_products
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.releases import FEW_EXPERTS, installed
from nsa_backend.testing.interpreter import round_as_a_gpu_does

if installed() not in FEW_EXPERTS:
    pytest.skip("the runner of this release is another", allow_module_level=True)

from routed_experts import EXPERTS, arguments, free_server, interpreted_runner, near, served


@pytest.fixture
def runner(monkeypatch):
    round_as_a_gpu_does()
    free_server(monkeypatch)
    expert_products.tell.cache_clear()
    return interpreted_runner(monkeypatch)


@pytest.mark.parametrize(
    ("width", "bulk", "alone", "elsewhere"),
    [(256, False, False, 0.0), (256, True, False, 0.0), (256, False, True, 0.5), (256, True, False, 0.5),
     (128, False, False, 0.0), (128, True, False, 0.0), (256, False, False, 1.0), (256, True, False, 1.0)],
)  # fmt: skip
def test_experts_are_right(runner, width, bulk, alone, elsewhere):
    """Whether SGLang copies in bulk, has tiles of the second product, and has every expert on this GPU."""
    given = arguments(6, width, elsewhere=elsewhere)
    runner.bulk, runner.alone = bulk, alone
    found = served(given)
    assert found.isfinite().all()
    assert near(found, given)


@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
@pytest.mark.parametrize("choices", [2, 3])
def test_sums_have_sglangs_factor(runner, factor, choices):
    given = arguments(5, choices=choices) | {"routed_scaling_factor": factor}
    before = given["hidden_states"].clone()
    assert near(served(given), given)
    assert torch.equal(given["hidden_states"], before)


def test_tiles_are_those_that_sglang_chooses(monkeypatch, runner):
    x, first, second, chosen = (arguments(33)[name] for name in ("hidden_states", "w1", "w2", "topk_ids"))
    monkeypatch.setattr(runner.module, "moe_align_block_size", lambda *_: (None, None, None))
    for runner.bulk, runner.alone in ((False, False), (True, False), (True, True)):
        sglangs = runner.module._prepare_fused_moe_run(x, first, second, chosen, **expert_products.FORM)
        tiles, of_second, second_in_bulk, first_in_bulk, *_ = sglangs
        found = expert_products.tiles_for(ExpertWeights(first, None, second, None), *chosen.shape)
        assert found == (tiles, of_second or tiles, first_in_bulk, second_in_bulk)


@pytest.mark.parametrize(
    ("said", "experts", "width", "served"),
    [(None, 256, 256, True), (None, 257, 256, True), (None, 256, 512, False), (None, 32, 256, False), ("1", 32, 256, True)],
)
def test_who_asks_for_nothing_has_them_of_experts_that_were_timed(monkeypatch, said, experts, width, served):
    monkeypatch.setenv(expert_products.SWITCH, said) if said else monkeypatch.delenv(expert_products.SWITCH, raising=False)
    assert serves(experts=experts, width=width) is served


def serves(tokens: int = 6, choices: int = 8, hidden: int = 1024, experts: int = EXPERTS, width: int = 256) -> bool:
    first = torch.empty(1, dtype=torch.float8_e4m3fn).expand(experts, 2 * width, hidden)
    x, chosen = torch.empty(tokens, hidden), torch.empty(tokens, choices)
    return expert_products.serves(x, ExpertWeights(first, None, None, None), chosen)


def test_one_choice_and_odd_widths_are_sglangs(monkeypatch):
    """And more choices than a launch orders; all of which a user may ask for."""
    monkeypatch.setenv(expert_products.SWITCH, "1")
    assert serves()
    assert not any((serves(choices=1), serves(hidden=512), serves(width=192), serves(tokens=128, choices=17)))


def test_the_log_has_it_once(caplog, runner):
    with caplog.at_level(logging.INFO, expert_products.__name__):
        for tokens in (5, 6):
            served(arguments(tokens, choices=2))
    (line,) = (record.getMessage() for record in caplog.records)
    what = "experts of 5 to 128 tokens have one launch before both products and one between"
    assert line == f"nsa_backend: {what}, 9 experts of 128"
