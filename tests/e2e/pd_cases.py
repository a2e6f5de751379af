"""End-to-end cases of a prefill and a decode server, on SGLang 0.5.23 and later.

A case starts three servers: prefill, decode, and one that does both, whose outputs are the measure. Most take two GPUs, one for
each server of the pair; where a server spans both, all three do.
nixl is the transfer engine that installs from PyPI and needs no RDMA (`nixl` and `nixl-cu13`, 59 MB). Within a machine it
copies from GPU to GPU where they can reach each other, and through TCP otherwise. KV that is split by layers goes through
Mooncake alone (`mooncake-transfer-engine-cuda13`, 50 MB, which needs libibverbs, libmlx5, libnuma and libcurl).
"""

from __future__ import annotations

from functools import partial

from case import Case
from engine_options import (
    BESIDE_OTHERS,
    DP_2,
    FP8,
    GLM_52,
    NAMES_NOTHING,
    ONE_GRAPH,
    PREFILL_CP,
    PREFILL_SIZES,
    SAVED,
    STANDARD,
    TWO_GPUS,
)
from engine_options import DEPLOYMENT_FLOORS as FLOORS

SINCE = ">=0.5.23"

FEW_TOKENS = {"max_total_tokens": 12288, "num_reserved_decode_tokens": 16}
pd = partial(Case, disaggregated="nixl", gpus=2, releases=SINCE)
pd_fp8 = partial(pd, decode="flashmla_kv", engine=FP8, floors={"8x300": 3.8 / 4}, floor_of_all=0.95)
pd_rounds = partial(Case, steps=3, disaggregated="nixl", gpus=2, releases="==0.5.23", **ONE_GRAPH, floor_of_all=0.95)
PD_CASES = [
    pd("PD", 3, (*STANDARD, "32x300", "short", "shared prefix"), floors=FLOORS),
    pd_fp8("PD, fp8", 3, (*STANDARD, "32x300")),
    pd_fp8("PD, fp8 after flashmla_sparse prefill", 3, STANDARD, engine=FP8 | {"nsa_prefill_backend": "flashmla_sparse"}),
    pd("PD, flashmla_sparse", 3, STANDARD, decode="flashmla_sparse", floors=FLOORS),
    pd("PD, chunked prefill", 3, STANDARD, engine={"chunked_prefill_size": 1024}, floors=FLOORS),
    pd("PD, unfused top-k", 3, STANDARD, environment={"SGLANG_DSA_FUSE_TOPK": "0"}, floors=FLOORS),
    pd("PD, without CUDA graphs", 3, ("8x300",), engine={"disable_cuda_graph": True}, floors=FLOORS),
    pd("PD without drafts", 0, STANDARD),
    pd("PD through SGLang's router", 3, ("8x300",), router=True, floors=FLOORS),
    # Where GPUs cannot reach each other: through TCP, whatever else there is.
    pd("PD through TCP", 3, ("8x300",), environment={"UCX_TLS": "tcp,cuda_copy,self"}, floors=FLOORS),
    # Fewer tokens than 32 requests come to, and few held back for each: the decode server takes some of them back.
    pd("PD with retractions", 3, ("32x300",), engine=FEW_TOKENS, floor_of_all=0.9),
    pd("PD, glm-5.2", 5, ("8x300", "8x3000"), **GLM_52),
    pd("PD, glm-5.2, unfused top-k", 5, ("8x300",), environment={"SGLANG_DSA_FUSE_TOPK": "0"}, **GLM_52),
    pd("PD, glm-5.2, fp8", 5, ("8x300", "8x3000"), decode="flashmla_kv", engine=FP8, **GLM_52),
    # The decode server's rounds, and those of the server that does both.
    *(
        pd_rounds(f"PD{words}, one graph a round", workloads=workloads, says_times=2, **options)
        for words, workloads, options in (
            ("", (*STANDARD, "32x300", "short", "shared prefix"), {}),
            (", fp8", (*STANDARD, "32x300"), {"decode": "flashmla_kv", "engine": FP8}),
            (", glm-5.2", ("8x300", "8x3000"), {"steps": 5, "model": "glm-5.2"}),
        )
    ),
    # The prefill server's, and those of the server that does both; nothing is named, as whole prefills take the decode kernel.
    pd(
        "PD, short prefills in one graph",
        3,
        ("1x300", "short", "shared prefix", "turns of chats", "8x300"),
        shape="faithful-16-heads",
        engine=PREFILL_SIZES | NAMES_NOTHING,
        says="a prefill ran in one graph",
        says_times=2,
        floor_of_all=0.95,
        releases="==0.5.23",
    ),
    # A prefill server whose GPUs divide the tokens of a prompt, and one of which each keeps some layers' KV besides.
    *(
        pd(
            f"PD on the same two GPUs, {words}",
            3,
            STANDARD,
            engine=TWO_GPUS | BESIDE_OTHERS,
            prefill_engine=PREFILL_CP | options,
            disaggregated=engine,
            floors=FLOORS,
        )
        for words, options, engine in (
            ("prefill context parallel", {}, "nixl"),
            ("prefill KV split by layers", {"enable_dsa_cache_layer_split": True}, "mooncake_tcp"),
        )
    ),
    # A pair of GPUs each: DP attention on both sides of the transfer.
    pd("PD, DP attention", 3, STANDARD, engine=TWO_GPUS | DP_2, floors=FLOORS, gpus=4),
    # Both servers on both GPUs, as the one that does both. Each rank of that one and of the decode server has its own graphs.
    *(
        pd_rounds(
            f"PD on the same two GPUs, {words}, one graph a round",
            workloads=workloads,
            engine=TWO_GPUS | BESIDE_OTHERS | engine,
            says_times=4,
            **options,
        )
        for words, workloads, engine, options in (
            ("DP attention", (*STANDARD, "unequal ranks", "32x300"), DP_2, {}),
            ("DP attention, fp8", (*STANDARD, "unequal ranks"), DP_2 | FP8, {"decode": "flashmla_kv"}),
            ("DP attention, glm-5.2", ("8x300", "unequal ranks"), DP_2, {"steps": 5, "model": "glm-5.2"}),
            ("tensor parallel", STANDARD, {}, {}),
            ("expert parallel", STANDARD, {"ep_size": 2}, {}),
            ("memory saver", STANDARD, SAVED, {}),
        )
    ),
]
