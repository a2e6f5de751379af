"""Tables of refusals: options that pages leave to SGLang are SGLang's to settle, with either backend."""

import json
import sys

import pytest
from test_pages import TABLES

sys.path.insert(0, str(TABLES))
import code_tables
from in_a_script import answers
from recipes import MODELS

from nsa_backend.benchmarks.checkpoints import faithful, faithful_models
from nsa_backend.refusals import RULES


def test_an_option_that_is_left_to_sglang_has_a_rule_for_other_releases():
    assert set(code_tables.BY_SGLANG) <= {rule.option for rule in RULES}


@pytest.mark.slow
@pytest.mark.parametrize("disabled", ["0", "1"])
def test_sglang_itself_settles_what_the_table_of_refusals_leaves_out(disabled, tmp_path):
    for model, (kind, hidden, heads, layers, context) in MODELS.items():
        shape = faithful.Shape(hidden, heads, layers, experts=256, experts_per_token=8, expert_dim=2048)
        fields = faithful.config(shape, faithful_models.MODELS[kind]) | {"max_position_embeddings": context}
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text(json.dumps(fields))
    asked = {
        (model, option): {
            "words": ["--model-path", str(tmp_path / model), "--tp-size", "8", *words.split()],
            "environment": {},
            "gpu": "H200",
            "heads": MODELS[model][2],
        }
        for model in MODELS
        for option, words in code_tables.BY_SGLANG.items()
    }
    found = answers("parsed_recipes.py", list(asked.values()), folder=tmp_path, NSA_BACKEND_DISABLE=disabled)
    for (model, option), answer in zip(asked, found, strict=True):
        if option == "--page-size":
            assert answer["page"] == 64, model
        else:
            assert answer["stopped"], (model, option)
            assert "nsa_backend" not in answer["stopped"], (model, option)
