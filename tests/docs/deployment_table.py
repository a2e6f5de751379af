"""The tables of deployments in docs/support.md: what the start-up checks say of each; what was seen stays as the page has it.

python tests/docs/deployment_table.py        # prints them, for the page
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

BEGIN, END = "<!-- begin: tests/docs/deployment_table.py -->", "<!-- end of deployments -->"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"
SERVED_HEAD = ["deployment", "options", "seen on"]
"""Of the first table, whose last column is written by hand."""
REFUSED_HEAD = ["deployment", "options", "refused, because"]

DEPLOYMENTS = {
    # name: (the options that make it, what they set)
    "PD disaggregation": ("--disaggregation-mode", {"disaggregation_mode": "prefill"}),
    "HiCache": ("--enable-hierarchical-cache", {"enable_hierarchical_cache": True}),
    "HiCache with a storage backend": ("--hicache-storage-backend", {"enable_hierarchical_cache": True}),
    "tensor parallel": ("--tp-size 2", {"tp_size": 2}),
    "DP attention": ("--tp-size 2 --dp-size 2 --enable-dp-attention", {"enable_dp_attention": True, "tp_size": 2}),
    "DP attention with attention TP": ("--tp-size 4 --dp-size 2 --enable-dp-attention", {"enable_dp_attention": True}),
    "tensor parallel 8, DP attention 8, DP attention of four GPUs each": (
        "--tp-size 8 --dp-size 8 --enable-dp-attention",
        {"enable_dp_attention": True, "tp_size": 8},
    ),
    "expert parallel": ("--ep-size 2", {"ep_size": 2}),
    "expert parallel through DeepEP": ("--moe-a2a-backend deepep", {"moe_a2a_backend": "deepep"}),
    "overlap scheduling off": ("--disable-overlap-schedule", {"disable_overlap_schedule": True}),
    "weights updated in a running server": ("-", {}),
    "memory released and resumed": ("--enable-memory-saver", {"enable_memory_saver": True}),
    "pipeline parallel": ("--pp-size 2 --disable-overlap-schedule", {"pp_size": 2}),
    "pipeline parallel with MTP": (
        "the same, SGLANG_ENABLE_PP_SPEC=1",
        {"pp_size": 2, "speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1},
    ),
    "adaptive speculation": (
        "--speculative-adaptive",
        {"speculative_adaptive": True, "speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1},
    ),
    "EAGLE3, a dense draft model": (
        "--speculative-algorithm EAGLE3 --speculative-draft-attention-backend fa3",
        {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1},
    ),
    "two-batch overlap": (
        "--enable-two-batch-overlap --moe-a2a-backend deepep",
        {"enable_two_batch_overlap": True, "moe_a2a_backend": "deepep"},
    ),
    "prefill context parallel": (
        "--tp-size 2 --enable-prefill-cp --cp-strategy interleave",
        {"tp_size": 2, "enable_prefill_cp": True, "cp_strategy": "interleave", "kv_cache_dtype": "bfloat16"},
    ),
    "prefill context parallel in blocks": (
        "--enable-prefill-cp --cp-strategy zigzag",
        {"enable_prefill_cp": True, "cp_strategy": "zigzag", "kv_cache_dtype": "bfloat16"},
    ),
    "two-batch overlap under prefill context parallel": (
        "--enable-prefill-cp --enable-two-batch-overlap",
        {"enable_prefill_cp": True, "enable_two_batch_overlap": True, "kv_cache_dtype": "bfloat16"},
    ),
    "EAGLE3 under prefill context parallel": (
        "--enable-prefill-cp --speculative-algorithm EAGLE3",
        {
            "enable_prefill_cp": True,
            "speculative_algorithm": "EAGLE3",
            "speculative_eagle_topk": 1,
            "kv_cache_dtype": "bfloat16",
        },
    ),
    "trtllm on FP8 KV under prefill context parallel": (
        "--enable-prefill-cp --kv-cache-dtype fp8_e4m3, on Blackwell",
        {"enable_prefill_cp": True},
    ),
    "decode attention TP under prefill context parallel": ("--enable-cp-decode-attn-tp", {"enable_cp_decode_attn_tp": True}),
    "layers split over the ranks of prefill context parallel": (
        "--enable-prefill-cp --cp-strategy interleave --enable-dsa-cache-layer-split --disaggregation-mode prefill",
        {
            "enable_prefill_cp": True,
            "cp_strategy": "interleave",
            "enable_dsa_cache_layer_split": True,
            "disaggregation_mode": "prefill",
            "kv_cache_dtype": "bfloat16",
        },
    ),
    "KV sharding": ("--enable-kv-cache-sharding", {"enable_kv_cache_sharding": True}),
    "decode context parallel": ("--dcp-size 2", {"dcp_size": 2}),
    "HiSparse": ("--enable-hisparse", {"enable_hisparse": True}),
    "unified memory": ("--enable-unified-memory", {"enable_unified_memory": True}),
    "PD multiplexing": ("--enable-pdmux", {"enable_pdmux": True}),
    "multi-layer EAGLE": ("--enable-multi-layer-eagle", {"enable_multi_layer_eagle": True}),
    "decode graphs that break": ("--debug-cuda-graph", {"debug_cuda_graph": True}),
}


def answer(changed: dict) -> str:
    """What the start-up checks say of a served server with these arguments changed."""
    from nsa_backend.adapters.installed import adapter
    from nsa_backend.refusals import RULES, refusals

    served = {rule.attribute: rule.served[-1] for rule in RULES if "." not in rule.attribute}
    found = refusals(SimpleNamespace(**served | {"speculative_algorithm": None, "warmups": None} | changed))
    return " ".join(sentence.partition(": ")[2].removesuffix(f", or {adapter.WAY_BACK}") for sentence in found) or "served"


def tables(seen: dict[str, str]) -> list[list[list[str]]]:
    """What is served and what is refused, each with its head; `seen` says by deployment what the page has of it."""
    served, refused = [SERVED_HEAD], [REFUSED_HEAD]
    for name, (option, args) in DEPLOYMENTS.items():
        found = answer(args)
        if found == "served":
            served.append([name, option, seen.get(name, "not run")])
        else:
            refused.append([name, option, found])
    return [served, refused]


def on_the_page() -> list[list[list[str]]]:
    """The page's tables, without the lines under their heads."""
    text = PAGE.read_text().partition(BEGIN + "\n")[2].partition("\n" + END)[0]
    return [
        [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")] for table in text.split("\n\n")
    ]


def seen_on_the_page() -> dict[str, str]:
    """Deployment to what was seen of it, by the first table."""
    return {name: seen for name, _, seen in on_the_page()[0][1:]}


if __name__ == "__main__":
    from nsa_backend.testing.cpu_process import start_process

    start_process()
    from model_table import markdown

    sys.stdout.write("\n\n".join(map(markdown, tables(seen_on_the_page()))) + "\n")
