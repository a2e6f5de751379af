"""Prompts and engine configurations of the end-to-end runs, the same for ours and for SGLang's built-in backend."""

from __future__ import annotations

from functools import partial

import torch
from case import Case
from deployment_cases import DEPLOYMENT_CASES
from engine_options import DP_2, FLOORS, FP8, STANDARD, TWO_GPUS, UP_TO_TWO, with_an_empty_round
from layer_cases import LAYER_CASES
from model_cases import MODEL_CASES
from rank_cases import CASES_OF_RANKS
from round_cases import ROUND_CASES
from shared_cases import SHARED_CASES, on_one_gpu

VOCAB = 2048


def prompts(count: int, first: int, step: int = 37, seed: int = 0) -> list[list[int]]:
    """`count` random prompts of first, first + step, ... tokens."""
    generator = torch.Generator().manual_seed(seed * 1000 + first)
    return [torch.randint(2, VOCAB, (first + step * i,), generator=generator).tolist() for i in range(count)]


def shared_prefix(seed: int = 5) -> list[list[int]]:
    """Four prompts with a common prefix of 400 tokens and tails of their own."""
    prefix = prompts(1, 400, seed=seed)[0]
    return [prefix + tail for tail in prompts(4, 60, seed=seed + 1)]


def turns(seed: int = 71) -> list[list[list[int]]]:
    """Four chats of some 6000 tokens, then the same with some more, together and one alone."""
    chats = prompts(4, 6000, seed=seed)
    longer = [chat + more for chat, more in zip(chats, prompts(4, 60, seed=seed + 1), strict=True)]
    return [chats, longer, [longer[0] + prompts(1, 300, seed=seed + 2)[0]]]


UNEQUAL = ((3, 1), (5, 0), (1, 4), (0, 2), (7, 3), (1, 8))
"""Requests on the first and on the second of DP ranks, of which others have none, wave by wave."""

ON_RANKS = {"unequal ranks": UNEQUAL, "some unequal ranks": ((3, 1), (0, 2), (1, 8))}

WORKLOADS = {
    # name: list of waves; a wave is one batched generate call
    "8x300": lambda: [prompts(8, 300)],
    "4x300": lambda: [prompts(4, 300, seed=21), prompts(4, 300, seed=22)],
    "across 2048 tokens": lambda: [prompts(8, 1960, step=13, seed=31)],
    "4x3000": lambda: [prompts(4, 3000)],
    "sizes between and above the captured": lambda: [prompts(3, 200, seed=2), prompts(5, 250, seed=3), prompts(12, 90, seed=4)],
    "shared prefix": lambda: [shared_prefix()[:1], shared_prefix()],
    "turns of chats": turns,
    "32x300": lambda: [prompts(32, 300, step=9, seed=9)],
    "64x300": lambda: [prompts(64, 300, step=5, seed=15)],
    # One after another, so that every forward has one request.
    "1x300": lambda: [[p] for p in prompts(8, 300)],
    "1x3000": lambda: [[p] for p in prompts(4, 3000)],
    # Three waves: one draft in a hundred is a tie, and eight requests alone measure the mean to no more than 0.02.
    "8x3000": lambda: [prompts(8, 3000), prompts(8, 3000, seed=11), prompts(8, 3000, seed=12)],
    "32x3000": lambda: [prompts(32, 3000, step=9, seed=9)],
    "1x6000": lambda: [[p] for p in prompts(4, 6000)],
    "8x6000": lambda: [prompts(8, 6000)],
    "32x6000": lambda: [prompts(32, 6000, step=9, seed=9)],
    "2x32000": lambda: [prompts(2, 32000, seed=81)],
    "short": lambda: [prompts(4, 5, step=20, seed=7)],
    # What HiCache needs, in this order: prompts, others that take their room on the GPU, and the first ones again.
    "prompts": lambda: [prompts(8, 3000, seed=61)],
    "prompts that take their room": lambda: [prompts(8, 3000, seed=seed) for seed in (62, 63, 64)],
    "the first prompts again": lambda: [prompts(8, 3000, seed=61)],
    **{
        name: lambda waves=waves: [prompts(sum(counts), 300, step=9, seed=40 + i) for i, counts in enumerate(waves)]
        for name, waves in ON_RANKS.items()
    },
}

RANKS = {
    name: [[rank for rank, n in enumerate(counts) for _ in range(n)] for counts in waves] for name, waves in ON_RANKS.items()
}
"""Of a workload whose requests choose their DP rank: the rank of each, wave by wave."""


FP8_FLOORS = dict.fromkeys(("8x300", "32x300", "8x3000", "unequal ranks"), 3.8 / 4)
"""Not of "4x3000": on FP8 KV and batches of such contexts the target rejects two first drafts in a hundred, the built-in
backend's too (case n1), and a mean of four requests then falls below 3.8 by chance. The floor of all requests counts them."""
GRID = tuple(f"{batch}x{length}" for batch in (1, 8, 32) for length in (300, 3000))
BATCHES = tuple(f"{batch}x{length}" for batch in (1, 4, 8) for length in (300, 3000))
GRID_ENGINE = {"cuda_graph_bs": [1, 2, 4, 8, 16, 32], "max_total_tokens": 131072}
OVERLAPPED = {"enable_two_batch_overlap": True, "moe_a2a_backend": "deepep", "moe_runner_backend": "deep_gemm"}
"""SGLang overlaps the halves of a batch around the all-to-all of its experts. Of the libraries for that it brings DeepEP alone
(sgl-deep-ep, from 0.5.23 on), behind which unquantised experts need DeepGEMM."""
PP_2 = {"pp_size": 2, "disable_overlap_schedule": True}
OF_DSA, HAS_PP_DRAFTS = ">=0.5.17", ">=0.5.23"
ON_UNEQUAL, RANKS_2 = ("8x300", "unequal ranks"), "two GPUs, DP attention"
UNEQUAL_FLOORS = dict.fromkeys(ON_UNEQUAL, 3.9 / 4)

spec_v1 = partial(Case, steps=3, environment={"SGLANG_ENABLE_SPEC_V2": "0"}, spec_v1=True, floors=FLOORS)
grid = partial(Case, steps=3, workloads=GRID, engine=GRID_ENGINE, floors=dict.fromkeys(GRID, 3.9 / 4))
fp8_case = partial(Case, decode="flashmla_kv", engine=FP8, floors=FP8_FLOORS, floor_of_all=0.95)
overlapped = partial(Case, steps=3, workloads=STANDARD, shape="wide-16-heads", gpus=2, releases=OF_DSA)
"""DeepEP's kernels for decode are compiled for hidden sizes from 2048 on; that of `faithful` is 1024."""

CASES = [
    Case(
        "n3 fa3",
        3,
        ("8x300", "4x3000", "32x300", "sizes between and above the captured", "shared prefix", "short"),
        floors=FLOORS,
        request_floors={"8x300": 3.75 / 4},
    ),
    Case("n3 flashmla_sparse", 3, STANDARD, decode="flashmla_sparse", floors=FLOORS, request_floors={"8x300": 3.75 / 4}),
    Case("n3 sparse_decode", 3, (*STANDARD, "32x300"), decode="sparse_decode", floors=FLOORS),
    Case("no speculation, sparse_decode", 0, STANDARD, decode="sparse_decode"),
    Case("fp8, sparse_decode", 3, (*STANDARD, "32x300"), decode="sparse_decode", engine=FP8, floor_of_all=0.95),
    # About one draft in a hundred is a tie in bfloat16 that target and draft round apart, as with dense MLA. It costs half a
    # round, so the more steps, the more requests it takes to tell 0.95 of N + 1 from noise.
    Case("n2 fa3", 2, STANDARD, floor_of_all=0.95),
    Case("n5 fa3", 5, STANDARD, floor_of_all=0.95),
    Case("n8 fa3", 8, (*STANDARD, "32x300"), floor_of_all=0.95),
    spec_v1("n3 spec v1", workloads=(*STANDARD, "sizes between and above the captured")),
    Case("n3 without CUDA graphs", 3, STANDARD, engine={"disable_cuda_graph": True}, floors=FLOORS),
    spec_v1("n3 spec v1 without CUDA graphs", workloads=("8x300",), engine={"disable_cuda_graph": True}),
    # SGLang then calls what it captured again in place of replaying it. From 0.5.17 on no sparse model starts so.
    Case("n3 debug CUDA graphs", 3, STANDARD, engine={"debug_cuda_graph": True}, floors=FLOORS, releases="<0.5.17"),
    Case("n3 chunked prefill", 3, STANDARD, engine={"chunked_prefill_size": 1024}, floors=FLOORS),
    Case("n3 fa3 prefill too", 3, STANDARD, engine={"nsa_prefill_backend": "fa3"}, floors=FLOORS),
    Case(
        "n3 unfused top-k",
        3,
        STANDARD,
        environment={"SGLANG_NSA_FUSE_TOPK": "0"},
        # SGLang 0.5.12.post1 asserts in transform_index_page_table_prefill at target_verify when the transform is unfused.
        builtin_environment={},
        floors=FLOORS,
    ),
    fp8_case("n3 fp8, flashmla_kv", 3, (*STANDARD, "32x300", "shared prefix")),
    fp8_case(
        "n3 fp8, flashmla_kv after flashmla_sparse prefill in chunks",
        3,
        STANDARD,
        engine=FP8 | {"nsa_prefill_backend": "flashmla_sparse", "chunked_prefill_size": 1024},
    ),
    fp8_case("n3 fp8 without CUDA graphs", 3, ("8x300",), engine=FP8 | {"disable_cuda_graph": True}),
    # With one draft the built-in backend gives it the right length too: the rejections that remain are not ours.
    Case("n1 fa3", 1, ("8x300", "8x3000"), floor_of_all=0.95),
    Case("n1 fp8, flashmla_kv", 1, ("8x300", "8x3000"), decode="flashmla_kv", engine=FP8, floor_of_all=0.95),
    Case("batches fa3", 3, BATCHES, floors=dict.fromkeys(BATCHES, 3.9 / 4)),
    fp8_case("batches fp8, flashmla_kv", 3, BATCHES),
    grid("grid fa3"),
    grid("grid flashmla_sparse", decode="flashmla_sparse"),
    grid("grid fp8, flashmla_kv", decode="flashmla_kv", engine=GRID_ENGINE | FP8, floors=dict.fromkeys(GRID, 3.8 / 4)),
    grid("grid auto", environment={"NSA_BACKEND_AUTO_DECODE": "1"}),
    Case("two GPUs, tensor parallel", 3, ("1x300", *STANDARD), engine=TWO_GPUS, floors=FLOORS, gpus=2),
    # With one request at a time one of the two ranks is idle.
    Case(
        "two GPUs, DP attention",
        3,
        ("1x300", *STANDARD, "sizes between and above the captured"),
        engine=TWO_GPUS | DP_2,
        floors=FLOORS,
        gpus=2,
    ),
    fp8_case("two GPUs, DP attention, fp8", 3, ("1x300", *STANDARD), engine=TWO_GPUS | DP_2 | FP8, gpus=2),
    *(
        case
        for name, engine in (("without CUDA graphs", {"disable_cuda_graph": True}), ("above the captured sizes", UP_TO_TWO))
        for case in (
            Case(f"{RANKS_2}, {name}", 3, ON_UNEQUAL, engine=TWO_GPUS | DP_2 | engine, floors=UNEQUAL_FLOORS, gpus=2),
            fp8_case(f"{RANKS_2}, fp8, {name}", 3, ON_UNEQUAL, engine=TWO_GPUS | DP_2 | FP8 | engine, gpus=2),
        )
    ),
    Case("two GPUs, pipeline parallel", 0, STANDARD, engine=PP_2, gpus=2),
    # SGLang drafts on the last stage alone, at the end of a round, and relays the drafts to the first. It does not at the end
    # of a prefill, so a request's first round has none (PPSpecRelayInput.degenerate; docs/host_defects.md).
    Case(
        "two GPUs, pipeline parallel with drafts",
        3,
        ("1x300", *STANDARD),
        environment={"SGLANG_ENABLE_PP_SPEC": "1"},
        engine=PP_2,
        floors=with_an_empty_round(FLOORS, 3),
        gpus=2,
        releases=HAS_PP_DRAFTS,
    ),
    overlapped("two GPUs, two-batch overlap", engine=TWO_GPUS | DP_2 | OVERLAPPED, floors=FLOORS),
    overlapped(
        "two GPUs, two-batch overlap, fp8",
        decode="flashmla_kv",
        engine=TWO_GPUS | DP_2 | OVERLAPPED | FP8,
        floors=FP8_FLOORS,
        floor_of_all=0.95,
    ),
    # SGLang's own candidates: N = 1, 3, 5 and 7 below 8 requests, and up to 3 from 8 on. One request at a time climbs to 7.
    Case(
        "adaptive n3 fa3",
        3,
        ("8x300", "1x300", "sizes between and above the captured"),
        engine={"speculative_adaptive": True},
        floors={"8x300": 3.8 / 4, "1x300": 6 / 4},
        releases=OF_DSA,
    ),
    fp8_case(
        "adaptive n3 fp8, flashmla_kv",
        3,
        ("8x300", "1x300"),
        engine=FP8 | {"speculative_adaptive": True},
        floors={"8x300": 3.8 / 4, "1x300": 5 / 4},
        releases=OF_DSA,
    ),
    Case("no speculation", 0, (*STANDARD, "sizes between and above the captured")),
    Case("no speculation, flashmla_sparse", 0, STANDARD, decode="flashmla_sparse"),
    *MODEL_CASES,
    *LAYER_CASES,
    *ROUND_CASES,
    *CASES_OF_RANKS,
    *DEPLOYMENT_CASES,
    *SHARED_CASES,
]
CASES += on_one_gpu(CASES)
