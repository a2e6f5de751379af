"""What the code itself says: environment variables, refusals, models, deployments, launch commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from result_files import Parts, release, reports, table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from models import installed_models

PARTS = Parts()

RANKS = 8
"""Tensor-parallel size of the server whose heads are asked about; fewer ranks have more heads each, which changes nothing."""
HOPPER, BLACKWELL = 90, 100
IMPLEMENTATIONS = {
    # column of a table: [(name, dtype of the KV cache, GPU)]
    "fa3": [("fa3", "bfloat16", HOPPER)],
    "flashmla_sparse": [("flashmla_sparse", "bfloat16", HOPPER)],
    "flashmla_kv, FP8 KV": [("flashmla_kv", "float8_e4m3fn", HOPPER)],
    "sparse_decode, bfloat16 / FP8": [("sparse_decode", "bfloat16", HOPPER), ("sparse_decode", "float8_e4m3fn", HOPPER)],
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
                fp8 = "fp8" in case or row["decode"] == "flashmla_kv"
                found.add((release(report), model, row["decode"], "float8_e4m3fn" if fp8 else "bfloat16"))
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
