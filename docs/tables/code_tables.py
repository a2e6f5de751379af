"""What the code itself says: environment variables, refusals, models, deployments, launch commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from result_files import Parts, path_of, release, reports, result, table

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "releases")]
from models import installed_models
from recipes import NEW, OLD, RECIPES, Refused, Served, Stopped

PARTS = Parts()
DEPLOYMENTS = json.loads((Path(__file__).resolve().parent / "deployments.json").read_text())
"""How each is asked for, where it ran and which reports say so, which no code can tell; and what is refused beside another."""

RANKS = 8
"""Tensor-parallel size of the server whose heads are asked about; fewer ranks have more heads each, which changes nothing."""
HOPPER, BLACKWELL = 90, 100
IMPLEMENTATIONS = {
    # column of a table: [(name, dtype of the KV cache, GPU)]
    "fa3": [("fa3", "bfloat16", HOPPER)],
    "flashmla_sparse": [("flashmla_sparse", "bfloat16", HOPPER)],
    "flashmla_kv, FP8 KV": [("flashmla_kv", "float8_e4m3fn", HOPPER)],
    "sparse_decode, bfloat16 / FP8": [("sparse_decode", "bfloat16", HOPPER), ("sparse_decode", "float8_e4m3fn", HOPPER)],
    "sparse_verify, bfloat16 / FP8": [("sparse_verify", "bfloat16", HOPPER), ("sparse_verify", "float8_e4m3fn", HOPPER)],
    "trtllm": [("trtllm", "bfloat16", BLACKWELL)],
}
PRIMARY = "0.5.23"
OTHER_RELEASES = {
    "0.5.17": ("DeepSeek-V3.2", "GLM-5, GLM-5.1", "GLM-5.2, GLM-5.3"),
    "0.5.12.post1": ("DeepSeek-V3.2", "GLM-5, GLM-5.1"),
}
"""Releases whose code is not asked here, with the models that their tests build."""


def ran() -> set[tuple[str, str, str, str]]:
    """(release, model, decode implementation, KV dtype) of every end-to-end case of ours that gave something on a GPU."""
    found = set()
    for report in reports("e2e").values():
        for row in report["rows"] + report.get("rerun", {}).get("rows", []):
            if any("ours" in given for given in row["workloads"].values()):
                case = row["case"]
                model = next((m for m in ("glm-5.1", "glm-5.2") if m in case), "")
                dtype = "float8_e4m3fn" if "fp8" in case or row["decode"] == "flashmla_kv" else "bfloat16"
                found.add((release(report), model, row["decode"], dtype))
    return found


def problems(config: Any, name: str, dtype: str, sm: int) -> list[str]:
    """Why this implementation cannot decode this model."""
    import torch

    from nsa_backend.attention.implementations import implementation
    from nsa_backend.config import AttentionConfig

    on = {"device_sm": sm, "num_heads": config.num_attention_heads // RANKS, "index_topk": config.index_topk}
    sinks = bool(getattr(config, "learnable_sink", False))
    return implementation(name).problems(AttentionConfig(kv_cache_dtype=getattr(torch, dtype), sinks=sinks, **on))


def model_answer(config: Any, **asked: bool) -> str:
    """ "served", or the sentence that refuses the model."""
    from nsa_backend.adapters.installed import adapter
    from nsa_backend.model_check import check_model

    try:
        check_model(config, **({"speculative": False} | asked), on_gpu=True)
    except ValueError as refusal:
        sentence = str(refusal).removesuffix(adapter.WAY_BACK).removesuffix("; ").removesuffix(", or ")
        return sentence.rpartition("ForConditionalGeneration: ")[2].rpartition("ForCausalLM: ")[2]
    return "served"


@PARTS.part
def matrix() -> str:
    """A row a release and model: where each implementation ran."""
    seen, rows = ran(), []

    def cell(version: str, model: str, config: Any, asked: list[tuple[str, str, int]]) -> str:
        words = []
        for name, dtype, sm in asked:
            known = next((m for m in ("glm-5.1", "glm-5.2") if m.upper() in model), "")
            gpu = (model == "DeepSeek-V3.2" or known) and (version, known, name, dtype) in seen
            words.append("GPU" if gpu else "-" if config is not None and problems(config, name, dtype, sm) else "CPU")
        return " / ".join(words)

    for model, config in installed_models().items():
        if model_answer(config) == "served":
            drafts = "" if model_answer(config, speculative=True) == "served" else " without drafts"
            rows.append([PRIMARY, model + drafts, *(cell(PRIMARY, model, config, asked) for asked in IMPLEMENTATIONS.values())])
    for version, models in OTHER_RELEASES.items():
        rows += [[version, m, *(cell(version, m, None, asked) for asked in IMPLEMENTATIONS.values())] for m in models]
    alike: dict[tuple[str, ...], list[str]] = {}
    for version, model, *cells in rows:
        alike.setdefault((version, *cells), []).append(model)
    joined = [[version, ", ".join(models), *cells] for (version, *cells), models in alike.items()]
    return table(["SGLang", "model", *IMPLEMENTATIONS], joined)


@PARTS.part
def refused_count() -> str:
    """How many options, and switches of SGLang, have a value that stops the start."""
    from nsa_backend.adapters.dsa.refusals import REFUSED_ENVIRONMENT
    from nsa_backend.refusals import RULES

    return str(len({rule.option for rule in RULES}) + len(REFUSED_ENVIRONMENT))


@PARTS.part
def models() -> str:
    """A row a model that SGLang serves with sparse attention; what is not served has the number of its sentence."""
    from nsa_backend.adapters.layer_sharing import layers_that_share

    sentences: list[str] = []

    def short(answer: str) -> str:
        if answer != "served" and answer not in sentences:
            sentences.append(answer)
        return "yes" if answer == "served" else f"no ({sentences.index(answer) + 1})"

    def selections(config: Any) -> str:
        if getattr(config, "cli_factor", 1) > 1:
            return "all but one in cli_factor attentions"
        layers = layers_that_share(config)
        parts = [f"{sum(layers)} of {len(layers)} layers"] if any(layers) else []
        return ", ".join([*parts, *(["draft steps"] if getattr(config, "index_share_for_mtp_iteration", False) else [])]) or "-"

    rows = []
    for name, config in installed_models().items():
        text = getattr(config, "text_config", None) or config
        text = SimpleNamespace(**text) if isinstance(text, dict) else text
        answers = [short(model_answer(config, speculative=drafts)) for drafts in (False, True)]
        rows.append([name, config.architectures[0], str(text.num_attention_heads), selections(text), *answers])
    listed = "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))
    return table(["model", "in SGLang", "heads", "shared selections", "served", "with MTP"], rows) + "\n\n" + listed


def refusals_of(sets: dict[str, Any]) -> list[str]:
    """What the start-up checks say of a served server with these arguments changed."""
    from nsa_backend.refusals import RULES, refusals

    served = {rule.attribute: rule.served[-1] for rule in RULES if "." not in rule.attribute}
    return refusals(SimpleNamespace(**served | {"speculative_algorithm": None, "warmups": None} | sets))


def advice(sentence: str) -> str:
    """What a refusal says to change."""
    from nsa_backend.adapters.installed import adapter

    return sentence.rpartition("; ")[2].removesuffix(f", or {adapter.WAY_BACK}")


@PARTS.part
def deployments() -> str:
    """What nothing refuses at start, and where it ran."""
    rows = []
    for found in DEPLOYMENTS["served"]:
        if stops := refusals_of(found["sets"]):
            raise ValueError(f"{found['name']} is refused: {stops}")
        links = ", ".join(map(report_link, found["reports"])) or "-"
        rows.append([found["name"], f"`{found['options']}`".replace("`-`", "-"), found["ran"], links])
    return table(["deployment", "options", "ran on", "reports"], rows)


def report_link(name: str) -> str:
    """A link to the file that has this report; an error where none has."""
    file, _, part = name.rpartition("/") if "/" in name else ("e2e_0_5_23", "", name)
    result(file, part or None)
    return f"[{part or file}](../benchmarks/results/{path_of(file).name})"


@PARTS.part
def refused() -> str:
    """Every option, switch and combination that stops the start, and what its sentence says to do."""
    from nsa_backend.adapters.dsa.refusals import REFUSED_ENVIRONMENT
    from nsa_backend.refusals import RULES

    values = {rule.option: rule.advice for rule in RULES}
    rows = [[f"`{option}`", what] for option, what in values.items()]
    rows += [[f"`{name}=1`", "unset it"] for name in REFUSED_ENVIRONMENT]
    rows += [
        [name, advice(refusals_of(sets)[0])]
        for name, sets in ((found["name"], found["sets"]) for found in DEPLOYMENTS["refused_beside"])
    ]
    return table(["not served", "instead"], rows)


@PARTS.part
def environment() -> str:
    """The variables that the package reads."""
    from nsa_backend.environment import VARIABLES

    rows = [[f"`{found.name}`", found.default, found.effect, found.when] for found in VARIABLES]
    return table(["0 or 1", "default", "effect", "when to change it"], rows)


@PARTS.part
def recipes() -> str:
    """Public launch commands by what comes of them."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, recipe in RECIPES.items():
        new, old = recipe.outcomes[NEW], recipe.outcomes[OLD]
        graphs = [recipe_round(outcome) for outcome in (new, old)]
        before = "the same" if recipe_change(new) == recipe_change(old) and graphs[0] == graphs[1] else recipe_change(old)
        if before == "served" and graphs[0] != graphs[1]:
            before = graphs[1].partition(";")[0]
        alike.setdefault((recipe_change(new), graphs[0], before), []).append(f"[{name}]({recipe.source})")
    rows = [[*key, "; ".join(links)] for key, links in sorted(alike.items(), key=lambda item: -len(item[1]))]
    return table([f"on {NEW}", "a round", f"on {OLD}", "commands"], rows)


def recipe_change(outcome: Served | Refused | Stopped) -> str:
    """What a user has to change."""
    if isinstance(outcome, Served):
        return "served"
    if isinstance(outcome, Stopped):
        return f"SGLang stops: {outcome.because}"
    return f"without `{' '.join(option.split()[0] for option in outcome.without)}`"


def recipe_round(outcome: Served | Refused | Stopped) -> str:
    if not isinstance(outcome, Served) or outcome.three is None:
        return "-"
    return f"three graphs; for one, {outcome.three}" if outcome.three else "one graph"
