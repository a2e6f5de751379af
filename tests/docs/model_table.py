"""The tables of docs/support.md that follow from the code: what each model is, and what of it is served.

python tests/docs/model_table.py        # prints them, for the page
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import installed_models

BEGIN, END = "<!-- begin: tests/docs/model_table.py -->", "<!-- end -->"
HOPPER_RANKS = 8
"""Tensor-parallel size of the server whose heads are asked about; fewer ranks have more heads each, which changes nothing."""


def shapes() -> list[list[str]]:
    """Sizes, as the configuration classes have them."""
    rows = [["model", "SGLang's name", "heads", "q / KV rank", "nope / RoPE / v", "index heads / dim / top-k", "shared"]]
    for name, config in installed_models().items():
        architecture = config.architectures[0]
        config = getattr(config, "text_config", None) or config
        config = SimpleNamespace(**config) if isinstance(config, dict) else config
        index = "/".join(str(getattr(config, f"index_{key}", None) or "-") for key in ("n_heads", "head_dim", "topk"))
        sizes = (f"{config.qk_nope_head_dim} / {config.qk_rope_head_dim} / {config.v_head_dim}", index.replace("/", " / "))
        rank = f"{config.q_lora_rank} / {config.kv_lora_rank}"
        rows.append([name, architecture, str(config.num_attention_heads), rank, *sizes, shared(config)])
    return rows


def shared(config: Any) -> str:
    """Which selections are used more than once."""
    from nsa_backend.adapters.layer_sharing import layers_that_share

    if getattr(config, "cli_factor", 1) > 1:
        return "all but one in cli_factor attentions"
    layers = layers_that_share(config)
    parts = [f"{sum(layers)} of {len(layers)} layers"] if any(layers) else []
    parts += ["draft steps"] if getattr(config, "index_share_for_mtp_iteration", False) else []
    return ", ".join(parts) or "-"


def served() -> list[list[str]]:
    """What is served; where something is not, the number of the sentence that refuses it."""
    rows = [["model", "without drafts", "with MTP", "with MTP, flashmla_sparse prefill on FP8 KV", "fa3", "flashmla_sparse",
             "flashmla_kv on FP8 KV"]]  # fmt: skip
    for name, config in installed_models().items():
        whole = [answer(config), answer(config, speculative=True), answer(config, speculative=True, dequantised_prefill=True)]
        kernels = implementations(config) if "served" in whole else ["-"] * 3
        rows.append([name, *whole, *kernels])
    return rows


def numbered(rows: list[list[str]]) -> tuple[list[list[str]], list[str]]:
    """The rows with sentences replaced by their numbers, and the sentences."""
    sentences: list[str] = []

    def short(cell: str) -> str:
        if cell in ("served", "-"):
            return cell
        if cell not in sentences:
            sentences.append(cell)
        return f"no ({sentences.index(cell) + 1})"

    return [rows[0], *([name, *map(short, cells)] for name, *cells in rows[1:])], sentences


def answer(config: Any, **asked: bool) -> str:
    from nsa_backend.adapters.installed import adapter
    from nsa_backend.model_check import check_model

    try:
        check_model(config, **({"speculative": False} | asked), on_gpu=True)
    except ValueError as refusal:
        return (
            str(refusal)
            .removesuffix(adapter.WAY_BACK)
            .removesuffix("; ")
            .removesuffix(", or ")
            .rpartition("ForConditionalGeneration: ")[2]
            .rpartition("ForCausalLM: ")[2]
        )
    return "served"


def implementations(config: Any) -> list[str]:
    """Of the three of Hopper, each on the KV cache that it reads."""
    from nsa_backend.attention.implementations import implementation
    from nsa_backend.config import AttentionConfig

    heads, sinks = config.num_attention_heads // HOPPER_RANKS, bool(getattr(config, "learnable_sink", False))
    asked = (("fa3", torch.bfloat16), ("flashmla_sparse", torch.bfloat16), ("flashmla_kv", torch.float8_e4m3fn))
    on = {"device_sm": 90, "num_heads": heads, "index_topk": config.index_topk, "sinks": sinks}
    return [
        "; ".join(implementation(n).problems(AttentionConfig(kv_cache_dtype=dtype, **on))) or "served" for n, dtype in asked
    ]


def markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def tables() -> str:
    rows, sentences = numbered(served())
    listed = "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))
    return "\n\n".join((markdown(shapes()), markdown(rows), listed))


if __name__ == "__main__":
    from nsa_backend.testing.cpu_process import start_process

    start_process()
    sys.stdout.write(tables() + "\n")
