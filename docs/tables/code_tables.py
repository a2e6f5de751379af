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
LIST = Path(__file__).resolve().parent / "deployments.json"
DEPLOYMENTS = json.loads(LIST.read_text())
"""How each is asked for, where it ran and which reports say so, which no code can tell; and what is refused beside another."""

BY_SGLANG = {
    "--page-size": "--page-size 32",
    "--kv-cache-dtype": "--kv-cache-dtype fp8_e5m2",
    "--speculative-eagle-topk": (
        "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
    ),
    "--enable-deterministic-inference": "--enable-deterministic-inference",
    "--enable-unified-memory": "--enable-unified-memory",
    "--enable-page-major-kv-layout": "--enable-page-major-kv-layout",
}
"""Options with a rule of ours that no server of the primary release meets, and a command of each. SGLang refuses the other
values itself, or sets another page size, for these models and whichever backend serves (tests/docs/test_code_tables.py)."""

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


def rules() -> list[Any]:
    """Those that a server of the primary release can meet."""
    from nsa_backend.refusals import RULES

    return [rule for rule in RULES if rule.option not in BY_SGLANG]


@PARTS.part
def models() -> str:
    """A row a sparse model that SGLang knows; what is not served has the number of its sentence."""
    from nsa_backend.adapters.installed import adapter

    sentences: list[str] = []

    def number(answer: str) -> str:
        if answer not in sentences:
            sentences.append(answer)
        return f"({sentences.index(answer) + 1})"

    rows = []
    for name, config in installed_models().items():
        if not adapter.is_sparse_model(config):
            continue
        text = getattr(config, "text_config", None) or config
        text = SimpleNamespace(**text) if isinstance(text, dict) else text
        plain, drafts = (model_answer(config, speculative=asked) for asked in (False, True))
        served = f"no {number(plain)}" if plain != "served" else "yes" if drafts == plain else f"without MTP {number(drafts)}"
        rows.append([name, config.architectures[0], str(text.num_attention_heads), served])
    listed = "\n".join(f"{at}. {sentence}" for at, sentence in enumerate(sentences, 1))
    return table(["model", "in SGLang", "heads", "served"], rows) + "\n\n" + listed


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
    """What nothing refuses at start, and where it ran; below, the files of its reports."""
    rows, files = [], {}
    for found in DEPLOYMENTS["served"]:
        if stops := refusals_of(found["sets"]):
            raise ValueError(f"{found['name']} is refused: {stops}")
        files |= dict.fromkeys(map(file_of, found["reports"]))
        rows.append([found["name"], f"`{found['options']}`".replace("`-`", "-"), found["ran"]])
    links = ", ".join(f"[{file}](../benchmarks/results/{path_of(file).name})" for file in files)
    listed = f"Files: {links}. By row: [{LIST.name}](tables/{LIST.name})."
    return table(["deployment", "options", "ran on"], rows) + "\n\n" + listed


def file_of(name: str) -> str:
    """The file that has this report; an error where none has."""
    file, _, part = name.rpartition("/") if "/" in name else ("e2e_0_5_23", "", name)
    result(file, part or None)
    return file


@PARTS.part
def refused() -> str:
    """Every option, switch and combination that stops the start, and what to pass instead."""
    from nsa_backend.adapters.dsa.refusals import REFUSED_ENVIRONMENT

    rows = [(f"`{rule.option}`", value(rule.option, rule.advice)) for rule in rules()]
    rows += [(f"`{name}=1`", "unset") for name in REFUSED_ENVIRONMENT]
    rows += [(found["name"], value("", advice(refusals_of(found["sets"])[0]))) for found in DEPLOYMENTS["refused_beside"]]
    alike: dict[str, list[str]] = {}
    for name, instead in rows:
        alike.setdefault(instead, []).append(name)
    return table(["option", "pass"], [[", ".join(names), instead] for instead, names in alike.items()])


def value(option: str, told: str) -> str:
    """What to pass, of advice that begins with a verb and may name the option again."""
    words = told.removeprefix("pass ").removeprefix("choose ").removeprefix(f"{option} ")
    other = {"drop the option": "none of these", "use an NVIDIA GPU": "cuda"}
    return other.get(words, words.replace("drop the first option, and", "nothing:"))


@PARTS.part
def by_sglang() -> str:
    """Options whose other values SGLang refuses itself."""
    return ", ".join(f"`{option}`" for option in BY_SGLANG if option != "--page-size")


@PARTS.part
def environment() -> str:
    """The variables by which a server is run: nothing asks for what they do unless they are set."""
    from nsa_backend.environment import VARIABLES

    rows = [[f"`{one.name}=1`", one.one, one.unset, one.when] for one in VARIABLES if one.default == "0"]
    return table(["variable", "what it does", "unset", "when to set it"], rows)


@PARTS.part
def switches() -> str:
    """The variables that change how rounds and kernels are run, whose defaults are measured."""
    from nsa_backend.environment import VARIABLES

    rows = [[f"`{one.name}`", one.unset, one.one, one.zero, one.when] for one in VARIABLES if one.default != "0"]
    return table(["variable", "unset", "1", "0", "when to set it"], rows)


@PARTS.part
def never_one_graph() -> str:
    """Options of a server whose rounds are three graphs on every release."""
    from nsa_backend.adapters.dsa.rounds.by_release import release as of_release
    from nsa_backend.adapters.dsa.rounds.served import NEEDED

    plainer = {"--speculative-algorithm": "--speculative-algorithm EAGLE3", "--attn-cp-size": "--enable-prefill-cp"}
    options = [rule.option for rule in NEEDED if rule.attribute not in of_release().beside]
    return ", ".join(f"`{plainer.get(option, option)}`" for option in options)


@PARTS.part
def sampled_memory() -> str:
    """MiB that sampled rounds of three drafts keep for each request of the largest captured batch."""
    from nsa_backend.adapters.dsa.rounds.capture import FLOAT_BYTES, MIB, VOCABULARIES

    rows, words = 4, installed_models()["DeepSeek-V3.2"].vocab_size
    return f"{VOCABULARIES * rows * words * FLOAT_BYTES / MIB:.1f} MiB"


@PARTS.part
def start_cost() -> str:
    """Seconds until DeepSeek-V3.2 on eight GPUs was ready, and batch sizes that were captured."""
    rows = result("rank_v32_tp8_0_5_23", "eight_gpus")["rows"]
    ready = {row["side"]: row["seconds_to_ready"] for row in rows}
    sizes = max(one["sizes"] for row in rows for one in row.get("captures", ()) if one["what"].startswith("whole rounds"))
    return f"{ready['auto']:.0f} instead of {ready['builtin']:.0f} s, with {sizes} batch sizes"


@PARTS.part
def recipes() -> str:
    """Public launch commands by what comes of them; in brackets what to change for rounds in one graph."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, recipe in RECIPES.items():
        new, old = recipe.outcomes[NEW], recipe.outcomes[OLD]
        graphs = [recipe_round(outcome) for outcome in (new, old)]
        change = new.three if isinstance(new, Served) else None
        before = recipe_change(old)
        if before == recipe_change(new) and graphs[0] == graphs[1] and not change:
            before = "the same"
        elif before == "served" and graphs[1] != "-":
            before = graphs[1]
        words = f" ({shorter(change)})" if change else ""
        alike.setdefault((recipe_change(new), graphs[0], before), []).append(f"[{name}]({recipe.source}){words}")
    rows = [[*key, "; ".join(links)] for key, links in sorted(alike.items(), key=lambda item: -len(item[1]))]
    return table([f"on {NEW}", "a round", f"on {OLD}", "commands"], rows)


def recipe_change(outcome: Served | Refused | Stopped) -> str:
    """What a user has to change."""
    if isinstance(outcome, Served):
        return "served"
    if isinstance(outcome, Stopped):
        return f"SGLang stops, with either backend: {outcome.because}"
    return f"without `{' '.join(option.split()[0] for option in outcome.without)}`"


def recipe_round(outcome: Served | Refused | Stopped) -> str:
    if not isinstance(outcome, Served) or outcome.three is None:
        return "-"
    return "three graphs" if outcome.three else "one graph"


def shorter(change: str) -> str:
    """Options to drop one after another, with the verb once."""
    return change.replace(" and drop ", ", drop ", 1).replace(" and drop ", " ")
