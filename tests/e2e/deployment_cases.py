"""End-to-end cases of the deployments that people run, on SGLang 0.5.23 and later: HiCache, parallelism, and others.

Those of a prefill and a decode server are in pd_cases.py.
"""

from __future__ import annotations

from functools import partial

from case import Case
from engine_options import DEPLOYMENT_FLOORS as FLOORS
from engine_options import (
    DP_2,
    FOUR_GPUS,
    FP8,
    GLM_52,
    NAMES_NOTHING,
    ONE_GRAPH,
    PREFILL_CP,
    PREFILL_SIZES,
    SAVED,
    STANDARD,
    TWO_GPUS,
    UP_TO_TWO,
)
from pd_cases import PD_CASES

SINCE = ">=0.5.23"

LIKE_FP8 = {"decode": "flashmla_kv", "floors": {}, "floor_of_all": 0.95}
"""What a case on FP8 KV has in place of fa3 and of floors by workload."""
HICACHE = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4.0,
    "hicache_write_policy": "write_through",
    "max_total_tokens": 32768,  # one wave of eight prompts of 3000 tokens and its answers, not two
}
LOADED_BACK = "the first prompts again"
hicache = partial(
    Case,
    workloads=("prompts", "prompts that take their room", LOADED_BACK),
    engine=HICACHE,
    floors=dict.fromkeys(("prompts", LOADED_BACK), 3.85 / 4),
    loaded_back=LOADED_BACK,
    same=(("prompts", LOADED_BACK),),
    releases=SINCE,
)
HICACHE_CASES = [
    hicache("HiCache", 3),
    hicache("HiCache, layer_first", 3, engine=HICACHE | {"hicache_mem_layout": "layer_first"}),
    hicache(
        "HiCache, direct copies", 3, engine=HICACHE | {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}
    ),
    hicache("HiCache, write back", 3, engine=HICACHE | {"hicache_write_policy": "write_back"}),
    hicache("HiCache, chunked prefill", 3, engine=HICACHE | {"chunked_prefill_size": 1024}),
    hicache(
        "HiCache, short prefills in one graph",
        3,
        workloads=("1x300", "short", "prompts", "prompts that take their room", LOADED_BACK),
        engine=HICACHE | PREFILL_SIZES,
        environment={"NSA_BACKEND_SHORT_PREFILLS": "1"},
        builtin_environment={},
        says="a prefill ran in one graph",
    ),
    hicache("HiCache, fp8", 3, engine=HICACHE | FP8, **LIKE_FP8),
    hicache("HiCache without drafts", 0, floors={}),
    *(
        hicache(
            f"HiCache, storage in files{words}",
            steps,
            workloads=("prompts",),
            engine=HICACHE | {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete"} | more,
            action="caches were flushed",
            loaded_back="prompts, after caches were flushed",
            tier="storage",
            same=(),
            **asked,
        )
        for words, steps, more, asked in (
            ("", 3, {}, {"floors": {"prompts": 3.85 / 4}}),
            (", fp8", 3, FP8, LIKE_FP8),
        )
    ),
    hicache("HiCache, glm-5.2", 5, floors={}, **GLM_52),
]

again = partial(Case, action="weights were updated", releases=SINCE)
loaded_again = partial(again, action="weights were loaded again")
GRAPHS_TOO = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
released = partial(Case, action="memory was released and resumed", engine=SAVED, floors=FLOORS, releases=SINCE)
SAVED_WITH_GRAPHS = SAVED | {"cuda_graph_backend_prefill": "disabled"}
"""SGLang captures no prefill in pieces where memory of graphs is given back too, and ends the start."""
with_graphs = partial(released, engine=SAVED_WITH_GRAPHS, environment=GRAPHS_TOO)
TRAINING_CASES = [
    again("weights updated", 3, STANDARD, floors=FLOORS),
    again("weights updated, fp8", 3, STANDARD, decode="flashmla_kv", engine=FP8, floor_of_all=0.95),
    again("weights updated, two GPUs", 3, STANDARD, engine=TWO_GPUS, floors=FLOORS, gpus=2),
    loaded_again("weights updated from disk, graphs captured again", 3, STANDARD, **ONE_GRAPH, says_times=2, floors=FLOORS),
    released("memory released and resumed", 3, STANDARD),
    released("memory released and resumed, flashmla_sparse", 3, STANDARD, decode="flashmla_sparse"),
    with_graphs("memory released and resumed, graphs too", 3, STANDARD),
    with_graphs("memory released and resumed, fp8, graphs too", 3, STANDARD, engine=SAVED_WITH_GRAPHS | FP8, **LIKE_FP8),
    released("memory released and resumed, one graph a round", 3, STANDARD, **ONE_GRAPH),
    released(
        "two GPUs, memory released and resumed, one graph a round",
        3,
        STANDARD,
        gpus=2,
        **ONE_GRAPH | {"engine": SAVED | TWO_GPUS},
    ),
    with_graphs(
        "memory released and resumed, graphs too, one graph a round",
        3,
        STANDARD,
        **ONE_GRAPH | {"environment": ONE_GRAPH["environment"] | GRAPHS_TOO, "builtin_environment": GRAPHS_TOO},
    ),
]

EXPERTS = {"ep_size": 2}
"""Experts are divided, and SGLang adds up what the ranks have (`--moe-a2a-backend none`)."""
RANKS_AND_EXPERTS = "two GPUs, DP attention, expert parallel"
NO_OVERLAP = {"disable_overlap_schedule": True}
UNEQUAL = ("8x300", "unequal ranks")
parallel = partial(Case, floors=FLOORS, releases=SINCE)
PARALLEL_CASES = [
    parallel("overlap scheduling off", 3, (*STANDARD, "sizes between and above the captured"), engine=NO_OVERLAP),
    parallel("overlap scheduling off, fp8", 3, STANDARD, engine=NO_OVERLAP | FP8, **LIKE_FP8),
    *(
        parallel(f"two GPUs, expert parallel{words}", 3, ("1x300", *STANDARD), engine=TWO_GPUS | EXPERTS, gpus=2, **rounds)
        for words, rounds in (("", {}), (", one graph a round", ONE_GRAPH))
    ),
    *(
        parallel(f"{RANKS_AND_EXPERTS}{words}", 3, UNEQUAL, engine=TWO_GPUS | DP_2 | EXPERTS, gpus=2, **rounds)
        for words, rounds in (("", {}), (", one graph a round", ONE_GRAPH))
    ),
    parallel("two GPUs, DP attention, overlap scheduling off", 3, UNEQUAL, engine=TWO_GPUS | DP_2 | NO_OVERLAP, gpus=2),
    # Two ranks of attention, each on two GPUs: rows are padded to the GPUs of a rank, and to the largest rank. In graphs:
    # `four GPUs, DP attention 2, fa3` and the others of rank_cases.py.
    *(
        parallel(f"four GPUs, DP attention 2, {name}", 3, UNEQUAL, engine=FOUR_GPUS | DP_2 | options, gpus=4, **others)
        for kv, dtype, others in (("", {}, {}), ("fp8, ", FP8, LIKE_FP8))
        for name, options in (
            (f"{kv}without CUDA graphs", dtype | {"disable_cuda_graph": True}),
            (f"{kv}above the captured sizes", dtype | UP_TO_TWO),
        )
    ),
    parallel("four GPUs, DP attention 2, expert parallel", 3, UNEQUAL, engine=FOUR_GPUS | DP_2 | {"ep_size": 4}, gpus=4),
]

DIVIDED = TWO_GPUS | PREFILL_CP
divided = partial(Case, steps=3, workloads=(*STANDARD, "short", "shared prefix"), engine=DIVIDED, gpus=2, releases=SINCE)
divided_fp8 = partial(divided, workloads=STANDARD, decode="flashmla_kv", floor_of_all=0.95)
CP, CP_4, DIVIDED_4 = "two GPUs, prefill context parallel", "four GPUs, prefill context parallel", DIVIDED | FOUR_GPUS
DIVIDED_CASES = [
    divided(CP, floors=FLOORS),
    divided(f"{CP}, without drafts", steps=0),
    divided(f"{CP}, fa3 prefill", engine=DIVIDED | {"nsa_prefill_backend": "fa3"}, floors=FLOORS),
    divided(f"{CP}, flashmla_sparse", decode="flashmla_sparse", floors=FLOORS),
    # Chunks end within a prompt: the next one attends to what all GPUs have written.
    divided(f"{CP}, chunked prefill", engine=DIVIDED | {"chunked_prefill_size": 1024}, floors=FLOORS),
    divided(f"{CP}, unfused top-k", environment={"SGLANG_DSA_FUSE_TOPK": "0"}, floors=FLOORS),
    divided(f"{CP}, without CUDA graphs", engine=DIVIDED | {"disable_cuda_graph": True}, floors=FLOORS),
    divided_fp8(f"{CP}, fp8", engine=DIVIDED | FP8),
    divided_fp8(f"{CP}, fp8 without drafts", steps=0, engine=DIVIDED | FP8, floor_of_all=0.0),
    divided_fp8(f"{CP}, fp8 after flashmla_sparse prefill", engine=DIVIDED | FP8 | {"nsa_prefill_backend": "flashmla_sparse"}),
    # Drafts attend with a selection that the GPU with the last row of a prompt made.
    divided(f"{CP}, glm-5.2", steps=5, workloads=STANDARD, **GLM_52),
    divided(f"{CP_4} and attention TP", engine=DIVIDED_4 | {"attn_cp_size": 2}, gpus=4, floors=FLOORS),
    divided(f"{CP_4} and DP attention", workloads=UNEQUAL, engine=DIVIDED_4 | {"attn_dp_size": 2}, gpus=4, floors=FLOORS),
]

CONTEXT = TWO_GPUS | {"dcp_size": 2}
"""Each GPU has every other token of a request's KV; the built-in backend has all of it on both."""
part = partial(
    Case, steps=3, workloads=(*STANDARD, "short", "shared prefix"), engine=CONTEXT, ours_alone=("dcp_size", "dcp_comm_backend"),
    gpus=2, releases="==0.5.23",
)  # fmt: skip
REPLAYED = {name: ONE_GRAPH[name] for name in ("says", "replays")}
part_fp8 = partial(part, workloads=STANDARD, decode="flashmla_kv", engine=CONTEXT | FP8, floor_of_all=0.95, **REPLAYED)
part_fp8_weights = partial(part, shape="fp8-weights", workloads=STANDARD, says="front of 2 of 2 layers is two launches")
DCP, DCP_4, CONTEXT_4 = "two GPUs, decode context parallel", "four GPUs, decode context parallel", FOUR_GPUS | {"dcp_size": 4}
CONTEXT_CASES = [
    part(DCP, floors=FLOORS, **REPLAYED),
    part(f"{DCP}, without drafts", steps=0),
    part(f"{DCP}, flashmla_sparse", decode="flashmla_sparse", floors=FLOORS),
    part(f"{DCP}, sparse_decode", decode="sparse_decode", floors=FLOORS),
    part(
        f"{DCP}, rows together",
        decode="sparse_verify",
        shape="faithful-16-heads",
        workloads=(*STANDARD, "32x300", "32x3000"),
        engine=CONTEXT | {"nsa_prefill_backend": "sparse_prefill", "cuda_graph_bs": [1, 2, 4, 8, 32]},
        ours_alone=("dcp_size", "dcp_comm_backend", "nsa_prefill_backend"),
        floors=FLOORS,
    ),
    part(f"{DCP}, long prompts", workloads=("2x32000",), engine=CONTEXT | {"max_total_tokens": 131072}, floor_of_all=0.95),
    part(f"{DCP}, fa3 prefill", engine=CONTEXT | {"nsa_prefill_backend": "fa3"}, floors=FLOORS),
    part(f"{DCP}, prefills not captured", engine=CONTEXT | {"cuda_graph_backend_prefill": "disabled"}, floors=FLOORS),
    part(
        f"{DCP}, nothing named",
        decode="auto",
        shape="faithful-16-heads",
        workloads=(*STANDARD, "short", "shared prefix", "turns of chats"),
        engine=CONTEXT | NAMES_NOTHING,
        floors=FLOORS,
        **REPLAYED,
    ),
    part(f"{DCP}, chunked prefill", engine=CONTEXT | {"chunked_prefill_size": 1024}, floors=FLOORS),
    # A layer that shares a selection finds its own of the slots made; products of FP8 weights are divided.
    *(
        part(
            f"{DCP}{of}, short prefills in one graph",
            workloads=("short", "shared prefix", "turns of chats", "8x300"),
            environment={"NSA_BACKEND_SHORT_PREFILLS": "1"},
            builtin_environment={},
            says="a prefill ran in one graph",
            says_times=2,
            floor_of_all=0.95,
            **{"engine": CONTEXT | PREFILL_SIZES} | more,
        )
        for of, more in {
            "": {},
            ", glm-5.2": {"model": "glm-5.2"},
            ", FP8 weights": {"shape": "fp8-weights"},
            ", fp8": {"decode": "flashmla_kv", "engine": CONTEXT | PREFILL_SIZES | FP8},
        }.items()
    ),
    part(
        f"{DCP}, rounds of short requests",
        workloads=("8x300", "across 2048 tokens", "4x3000", "short"),
        environment={"NSA_BACKEND_SHORT_GRAPHS": "1"},
        builtin_environment={},
        replays="short greedy requests",
        floor_of_all=0.95,
    ),
    # SGLang exchanges all to all unless told, with the query's projection whole on every rank.
    part(
        f"{DCP}, reduce-scatter",
        engine=CONTEXT | {"dcp_comm_backend": "ag_rs"},
        floors=FLOORS,
        says="front of 2 of 2 layers is two launches",
    ),
    part(f"{DCP}, unfused top-k", environment={"SGLANG_DSA_FUSE_TOPK": "0"}, floors=FLOORS),
    part(f"{DCP}, without CUDA graphs", engine=CONTEXT | {"disable_cuda_graph": True}, floors=FLOORS),
    part(f"{DCP}, three graphs a round", floors=FLOORS, environment={"NSA_BACKEND_ROUND_GRAPH": "0"}),
    part_fp8(f"{DCP}, fp8"),
    part_fp8(f"{DCP}, fp8, sparse_decode", decode="sparse_decode"),
    part(f"{DCP}, glm-5.1", workloads=STANDARD, model="glm-5.1", floor_of_all=0.95),
    part(f"{DCP}, glm-5.2", steps=5, workloads=STANDARD, **GLM_52),
    part(f"{DCP}, weights updated", workloads=STANDARD, action="weights were updated", floors=FLOORS),
    # Copies of the query's projection have scales here, which an update brings too.
    part_fp8_weights(f"{DCP}, FP8 weights", floor_of_all=0.95, replays="greedy requests"),
    part_fp8_weights(f"{DCP}, FP8 weights updated", action="weights were updated", floor_of_all=0.95),
    part(DCP_4, engine=CONTEXT_4, gpus=4, floors=FLOORS, **REPLAYED),
    part(f"{DCP_4}, without drafts", steps=0, engine=CONTEXT_4, gpus=4),
    part_fp8(f"{DCP_4}, fp8", engine=CONTEXT_4 | FP8, gpus=4),
    part(f"{DCP_4}, glm-5.2", steps=5, workloads=STANDARD, engine=CONTEXT_4, gpus=4, **GLM_52),
    # A rank of DP attention is two GPUs here, which divide the KV of its requests.
    *(
        part(
            f"{DCP_4} and DP attention{words}",
            workloads=UNEQUAL,
            engine=FOUR_GPUS | DP_2 | {"dcp_size": 2},
            gpus=4,
            floors=FLOORS,
            **rounds,
        )
        for words, rounds in (("", {}), (", one graph a round", ONE_GRAPH))
    ),
    # Two groups of two, each of which divides the KV that the other divides too.
    part(f"{DCP_4} in twos", engine=CONTEXT_4 | {"dcp_size": 2}, gpus=4, floors=FLOORS, **REPLAYED),
]

# Five drafts of six are right (benchmarks/checkpoints/eagle3.py), which comes to 3.1 of 4; with all after the first wrong it
# comes to 1.8.
eagle3 = partial(Case, steps=3, workloads=STANDARD, dense_draft=True, floors=dict.fromkeys(STANDARD, 2.6 / 4), releases=SINCE)
EAGLE3_CASES = [
    eagle3("EAGLE3, dense draft"),
    eagle3("EAGLE3, dense draft, flashmla_sparse", decode="flashmla_sparse"),
    # The draft's KV is FP8 too, which fa3 reads.
    eagle3("EAGLE3, dense draft, fp8", decode="flashmla_kv", engine=FP8),
]

# Rounds of one graph beside two options at once, each of which they are beside by default.
GIVEN_BACK = {"action": "memory was released and resumed"}
COMBINED_CASES = [
    *(
        parallel(
            f"two GPUs, {words}, memory released and resumed, one graph a round",
            3,
            workloads,
            engine=TWO_GPUS | SAVED | options,
            gpus=2,
            **GIVEN_BACK,
            **ONE_GRAPH,
        )
        for words, workloads, options in (("expert parallel", STANDARD, EXPERTS), ("DP attention", UNEQUAL, DP_2))
    ),
    *(
        part(
            f"{DCP}, {words}, one graph a round",
            workloads=STANDARD,
            engine=CONTEXT | options,
            floors=FLOORS,
            **more,
            **ONE_GRAPH,
        )
        for words, options, more in (("expert parallel", EXPERTS, {}), ("memory released and resumed", SAVED, GIVEN_BACK))
    ),
]

DEPLOYMENT_CASES = [
    *PD_CASES, *HICACHE_CASES, *TRAINING_CASES, *PARALLEL_CASES, *DIVIDED_CASES, *CONTEXT_CASES, *COMBINED_CASES, *EAGLE3_CASES,
]  # fmt: skip
