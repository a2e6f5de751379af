"""Deployments that docs/support.md has a row for: how each is asked for, where it ran, and which reports say so.

What comes of each on the installed release is asked of the start-up checks; where it ran is a fact that no code can tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EAGLE = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}
BF16 = {"kv_cache_dtype": "bfloat16"}
CP = {"enable_prefill_cp": True, "cp_strategy": "interleave", **BF16}


@dataclass(frozen=True)
class Deployment:
    """One of SGLang's, with the options that make it and what they set."""

    options: str
    sets: dict[str, Any] = field(default_factory=dict)
    ran: str = "not run"
    reports: tuple[str, ...] = ()  # of e2e_0_5_23_h200.json, or "FILE/report"


SERVED = {
    "PD disaggregation": Deployment(
        "--disaggregation-mode",
        {"disaggregation_mode": "prefill"},
        "two H200s, under load too",
        ("deployments_two_gpus", "rounds_deployments", "soak_0_5_23/pd_rounds"),
    ),
    "HiCache": Deployment(
        "--enable-hierarchical-cache", {"enable_hierarchical_cache": True}, "one H200", ("deployments", "default")
    ),
    "HiCache with a storage backend": Deployment(
        "--hicache-storage-backend", {"enable_hierarchical_cache": True}, "one H200, where nothing was stored", ("storage",)
    ),
    "tensor parallel": Deployment("--tp-size", {"tp_size": 2}, "two H200s, and four", ("deployments_two_gpus", "four_gpus")),
    "one rank of tensor parallel 8, all layers": Deployment(
        "--tp-size 8", {"tp_size": 8}, "one H200, random weights", ("rank_v32_tp8_0_5_23/",)
    ),
    "DP attention": Deployment(
        "--enable-dp-attention --dp-size",
        {"enable_dp_attention": True, "tp_size": 2},
        "two H200s, under load too",
        ("dp_attention", "dp_rounds", "soak_0_5_23/dp"),
    ),
    "DP attention with attention TP": Deployment(
        "--tp-size 4 --dp-size 2", {"enable_dp_attention": True}, "four ranks on two H200s", ("shared_ranks",)
    ),
    "expert parallel": Deployment("--ep-size", {"ep_size": 2}, "two H200s", ("deployments_more",)),
    "expert parallel through DeepEP": Deployment(
        "--moe-a2a-backend deepep", {"moe_a2a_backend": "deepep"}, "two H200s, with two-batch overlap", ("two_gpus_more",)
    ),
    "two-batch overlap": Deployment(
        "--enable-two-batch-overlap --moe-a2a-backend deepep",
        {"enable_two_batch_overlap": True, "moe_a2a_backend": "deepep"},
        "two H200s",
        ("two_gpus_more", "two_batch_overlap"),
    ),
    "pipeline parallel": Deployment("--pp-size --disable-overlap-schedule", {"pp_size": 2}, "two H200s", ("deployments_more",)),
    "pipeline parallel with MTP": Deployment(
        "the same, SGLANG_ENABLE_PP_SPEC=1", {"pp_size": 2} | EAGLE, "two H200s", ("deployments_two_gpus",)
    ),
    "prefill context parallel": Deployment(
        "--enable-prefill-cp --cp-strategy interleave", {"tp_size": 2} | CP, "two H200s", ("prefill_cp", "deployments_more")
    ),
    "its layers split over ranks": Deployment(
        "--enable-dsa-cache-layer-split", CP | {"enable_dsa_cache_layer_split": True, "disaggregation_mode": "prefill"}
    ),
    "adaptive speculation": Deployment(
        "--speculative-adaptive", {"speculative_adaptive": True} | EAGLE, "one H200", ("deployments",)
    ),
    "EAGLE3, a dense draft model": Deployment(
        "--speculative-algorithm EAGLE3 --speculative-draft-attention-backend fa3",
        EAGLE | {"speculative_algorithm": "EAGLE3"},
        "one H200; its report was lost",
        ("printed_0_5_23/",),
    ),
    "overlap scheduling off": Deployment("--disable-overlap-schedule", {}, "one H200", ("deployments",)),
    "weights updated while serving": Deployment("-", {}, "one H200", ("sparse_decode_rerun", "weights_from_disk")),
    "memory released and resumed": Deployment(
        "--enable-memory-saver", {"enable_memory_saver": True}, "one H200", ("deployments",)
    ),
}

REFUSED_BESIDE = {
    "two-batch overlap under prefill context parallel": CP | {"enable_two_batch_overlap": True},
    "EAGLE3 under prefill context parallel": CP | EAGLE | {"speculative_algorithm": "EAGLE3"},
    "trtllm on FP8 KV under prefill context parallel": {"enable_prefill_cp": True},
}
"""What is refused for what stands beside it; refusals of single options are in the tables of the start-up checks."""
