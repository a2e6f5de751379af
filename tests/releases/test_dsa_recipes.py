"""Public launch commands, typed as they are: what the installed release makes of them with this package, and what it should.

The data is in `recipes.toml`; `docs/commands.md` is made from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_a_script import answers
from recipes import MODELS, RECIPES, RESPELLED, Recipe, Refused, Served, Stopped, respelled

from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.checkpoints import faithful, faithful_models
from nsa_backend.releases import installed

HERE = {name: recipe for name, recipe in RECIPES.items() if installed() in recipe.outcomes}
ADVISED = {name: recipe for name, recipe in HERE.items() if isinstance(recipe.outcomes[installed()], Refused)}
"""What is refused with advice, which is followed too."""
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HERE, reason="no recipe names this release")]


def config(model: str) -> dict[str, Any]:
    """config.json with the sizes that SGLang's rules may ask for."""
    kind, hidden, heads, layers, context = MODELS[model]
    shape = faithful.Shape(hidden, heads, layers, experts=256, experts_per_token=8, expert_dim=2048)
    fields = faithful.config(shape, faithful_models.MODELS[kind])
    return fields | {"max_position_embeddings": context, "quantization_config": FP8}


def without(words: list[str], left_out: str) -> list[str]:
    """`words` without these, which are an option and its value."""
    option = left_out.split()
    at = words.index(option[0])
    assert words[at : at + len(option)] == option
    return words[:at] + words[at + len(option) :]


def parsed(folder: Path, commands: dict[str, tuple[Recipe, list[str]]]) -> dict[str, dict]:
    """What `parsed_recipes.py` answers for these words, each for its recipe's model and GPUs."""
    for model in MODELS:
        (folder / model).mkdir(exist_ok=True)
        (folder / model / "config.json").write_text(json.dumps(config(model)))
    asked = [
        {
            "words": ["--model-path", str(folder / recipe.model), *words],
            "environment": dict(recipe.environment),
            "gpu": recipe.gpus.split()[1],
            "heads": MODELS[recipe.model][2],
        }
        for recipe, words in commands.values()
    ]
    return dict(zip(commands, answers("parsed_recipes.py", asked, folder=folder), strict=True))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """By recipe what comes of it, and "... as advised" what comes of it then; by option what SGLang's parser says of it."""
    release = installed()
    commands = {name: (recipe, respelled(recipe.words, release)) for name, recipe in HERE.items()}
    for name, recipe in ADVISED.items():
        words = respelled(recipe.words, release)
        for option in recipe.outcomes[release].without:
            words = without(words, option)
        commands[f"{name} as advised"] = (recipe, words)
    for option in RESPELLED.get(release, {}):
        recipe = next(recipe for recipe in HERE.values() if option in recipe.words)
        rest = [word for word in recipe.words if word == option or word not in RESPELLED[release]]
        commands[option] = (recipe, rest)
    return parsed(tmp_path_factory.mktemp("recipes"), commands)


def check(served: Served, got: dict) -> None:
    assert "stopped" not in got, got["stopped"]
    assert set(got["backends"]) <= set(adapter.BACKEND_NAMES)
    assert (got["decode"], got["prefill"], got["steps"]) == (served.decode, served.prefill, served.steps)
    assert (got["kv"], got["page"]) == (served.kv, 64)
    assert got["rounds"] == (served.three.split(" and ") if served.three else None if served.three is None else [])
    assert got["problems"] == []


@pytest.mark.parametrize("name", HERE)
def test_what_comes_of_it(found, name):
    outcome, got = HERE[name].outcomes[installed()], found[name]
    if isinstance(outcome, Served):
        check(outcome, got)
        return
    sentence = got["stopped"]
    assert outcome.because in sentence
    assert len(sentence.splitlines()) == 1, "a sentence for each option that was typed, and no other"
    assert isinstance(outcome, Stopped) == ("nsa_backend" not in sentence)


@pytest.mark.parametrize("name", ADVISED)
def test_what_comes_of_it_as_advised(found, name):
    """A refusal's advice is worth something where the rest of the recipe is served."""
    check(ADVISED[name].outcomes[installed()].then, found[f"{name} as advised"])


@pytest.mark.parametrize("option", RESPELLED.get(installed(), {}))
def test_sglang_itself_no_longer_takes_what_is_spelled_otherwise_here(found, option):
    assert option in found[option]["stopped"]
    assert "nsa_backend" not in found[option]["stopped"]


def test_drafts_are_of_every_kind():
    """A recipe each with one graph a round and with three, and of every implementation of Hopper that SGLang chooses."""
    served = [recipe.outcomes[installed()] for recipe in HERE.values() if isinstance(recipe.outcomes[installed()], Served)]
    assert {one.three is None or bool(one.three) for one in served if one.steps} == {True, False}
    assert {one.decode for one in served} == {"fa3", "flashmla_sparse", "flashmla_kv"}
