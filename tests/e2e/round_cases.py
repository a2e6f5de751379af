"""End-to-end cases of speculative rounds in one CUDA graph; the built-in backend has none and runs beside them as it is.

The same floors as without: a round in one graph must accept what three graphs accept. Other cases have one graph too, where
their options allow it; these end where it is not so.
"""

from __future__ import annotations

from functools import partial

from case import Case
from engine_options import DP_2, FOUR_GPUS, FP8, ONE_GRAPH, TWO_GPUS

from nsa_backend.releases import ROUND_GRAPHS

round_case = partial(
    Case,
    **ONE_GRAPH,
    releases=" or ".join(f"=={release}" for release in ROUND_GRAPHS),
    floor_of_all=0.95,
)
sampled_case = partial(
    round_case,
    environment={"NSA_BACKEND_ROUND_GRAPH": "1", "NSA_BACKEND_SAMPLED_ROUNDS": "1"},
    says="sampled requests in",
    replays="sampled requests",
)
"""Their requests sample, but at a temperature that leaves the best token alone: tokens and accept lengths are greedy ones'."""
NEAR_ZERO = {"temperature": 1e-4}
SAMPLED = (NEAR_ZERO, NEAR_ZERO | {"top_p": 0.95}, NEAR_ZERO | {"top_k": 20}, {}, {"temperature": 1.0, "top_p": 1e-6})
OF_RANKS = {"releases": "==0.5.23", "says_times": 2}
"""Rounds under DP attention are three graphs on other releases, and each rank has graphs of its own."""
SEEDS = {"": {}, ", seed 1": {"random_seed": 1}, ", seed 2": {"random_seed": 2}}
UNEQUAL = ("1x300", "8x300", "unequal ranks")
"""With one request at a time a rank is idle, and has to replay what its peer does."""
MANY = ("8x300", "8x3000", "32x300", "sizes between and above the captured", "shared prefix", "short")

ROUND_CASES = [
    *(round_case(f"n{n} fa3, one graph a round", n, MANY) for n in (1, 3, 5)),
    round_case("n3 flashmla_sparse, one graph a round", 3, ("8x300", "8x3000"), decode="flashmla_sparse"),
    round_case("n3 sparse_decode, one graph a round", 3, ("8x300", "8x3000"), decode="sparse_decode"),
    *(
        round_case(f"n{n} fp8, flashmla_kv, one graph a round", n, ("8x300", "8x3000"), decode="flashmla_kv", engine=FP8)
        for n in (1, 3)
    ),
    round_case("n3 chunked prefill, one graph a round", 3, ("8x300", "8x3000"), engine={"chunked_prefill_size": 1024}),
    round_case("glm-5.2 n5 fa3, one graph a round", 5, ("8x300", "8x3000"), model="glm-5.2"),
    round_case("n3 fa3, 61 layers, one graph a round", 3, ("8x300", "8x3000"), shape="deep"),
    *(
        Case(
            f"n3 {name}, three graphs a round",
            3,
            MANY[:2],
            environment={"NSA_BACKEND_ROUND_GRAPH": "0"},
            builtin_environment={},
            floor_of_all=0.95,
            **options,
        )
        for name, options in (("fa3", {}), ("fp8, flashmla_kv", {"decode": "flashmla_kv", "engine": FP8}))
    ),
    *(
        sampled_case(f"n{n} fa3, sampled, one graph a round", n, (*MANY, "1x300"), sampling=(NEAR_ZERO | {"top_p": 0.95},))
        for n in (1, 3)
    ),
    sampled_case("n3 fa3, sampled and greedy, one graph a round", 3, MANY, sampling=SAMPLED),
    sampled_case(
        "n3 fp8, flashmla_kv, sampled and greedy, one graph a round",
        3,
        ("8x300", "8x3000"),
        decode="flashmla_kv",
        engine=FP8,
        sampling=SAMPLED,
    ),
    round_case(
        "n3 fa3, log-probabilities, one graph a round",
        3,
        MANY,
        logprobs=True,
        says="greedy requests with log-prob",
        replays="greedy requests with log-probabilities",
    ),
    sampled_case(
        "n3 fa3, sampled, log-probabilities, one graph a round",
        3,
        MANY[:2],
        logprobs=True,
        says="sampled requests with log-prob",
        replays="sampled requests with log-probabilities",
        sampling=({"temperature": 1.0, "top_p": 1e-6},),  # by which the best token's is not one
    ),
    sampled_case("glm-5.2 n5 fa3, sampled, one graph a round", 5, ("8x300",), model="glm-5.2", sampling=SAMPLED),
    sampled_case(
        "two GPUs, tensor parallel, sampled, one graph a round",
        3,
        ("1x300", "8x300"),
        engine=TWO_GPUS,
        gpus=2,
        sampling=(NEAR_ZERO | {"top_p": 0.95},),
    ),
    Case(
        "n3 fa3, sampled, three graphs a round",
        3,
        MANY[:2],
        environment={"NSA_BACKEND_ROUND_GRAPH": "0"},
        builtin_environment={},
        floor_of_all=0.95,
        sampling=SAMPLED,
    ),
    *(
        round_case(
            f"{word} GPUs, tensor parallel, one graph a round", 3, ("1x300", "8x300", "8x3000"), engine=engine, gpus=gpus
        )
        for word, engine, gpus in (("two", TWO_GPUS, 2), ("four", FOUR_GPUS, 4))
    ),
    *(
        round_case(f"{word}, one graph a round", 3, workloads, engine=engine, **OF_RANKS, **options)
        for word, workloads, engine, options in (
            (
                "two GPUs, DP attention",
                (*UNEQUAL, "4x3000", "sizes between and above the captured"),
                TWO_GPUS | DP_2,
                {"gpus": 2},
            ),
            ("two GPUs, DP attention, fp8", (*UNEQUAL, "4x3000"), TWO_GPUS | DP_2 | FP8, {"gpus": 2, "decode": "flashmla_kv"}),
            ("two GPUs, DP attention, its own LM head", UNEQUAL, TWO_GPUS | DP_2 | {"enable_dp_lm_head": True}, {"gpus": 2}),
            ("four GPUs, DP attention 2", UNEQUAL, FOUR_GPUS | DP_2, {"gpus": 4}),
            ("four GPUs, DP attention 2, fp8", UNEQUAL, FOUR_GPUS | DP_2 | FP8, {"gpus": 4, "decode": "flashmla_kv"}),
        )
    ),
    Case(
        "two GPUs, DP attention, three graphs a round",
        3,
        UNEQUAL,
        engine=TWO_GPUS | DP_2,
        gpus=2,
        environment={"NSA_BACKEND_ROUND_GRAPH": "0"},
        builtin_environment={},
        never_says=ONE_GRAPH["says"],
        floor_of_all=0.95,
    ),
    round_case("two GPUs, DP attention, n1, one graph a round", 1, UNEQUAL, engine=TWO_GPUS | DP_2, gpus=2, **OF_RANKS),
    # Of two GPUs with a control: is the accept length below greedy requests' by the graph's sampling, or because one of equally
    # good tokens is drawn? In one wave of "unequal ranks" a rank has a greedy request alone: its rounds are one graph. One seed
    # is one draw, so both have more of them.
    *(
        sampled_case(
            f"{word}, sampled and greedy, one graph a round{words}",
            3,
            UNEQUAL,
            engine=engine | seed,
            gpus=gpus,
            **OF_RANKS,
            sampling=SAMPLED,
        )
        for word, engine, gpus, seeds in (
            ("two GPUs, DP attention", TWO_GPUS | DP_2, 2, SEEDS),
            ("four GPUs, DP attention 2", FOUR_GPUS | DP_2, 4, {"": {}}),
        )
        for words, seed in seeds.items()
    ),
    *(
        round_case(
            f"two GPUs, DP attention, sampled and greedy, sampled rounds in three graphs{words}",
            3,
            UNEQUAL,
            environment={"NSA_BACKEND_ROUND_GRAPH": "1", "NSA_BACKEND_SAMPLED_ROUNDS": "0"},
            says="greedy requests in",
            never_says="sampled requests in",
            engine=TWO_GPUS | DP_2 | seed,
            gpus=2,
            releases=OF_RANKS["releases"],
            sampling=SAMPLED,
        )
        for words, seed in SEEDS.items()
    ),
]
