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
three_graphs = partial(Case, environment={"NSA_BACKEND_ROUND_GRAPH": "0"}, builtin_environment={}, floor_of_all=0.95)
NEAR_ZERO = {"temperature": 1e-4}
NEARLY_GREEDY = (NEAR_ZERO | {"top_p": 0.95},)
SAMPLED = (NEAR_ZERO, NEAR_ZERO | {"top_p": 0.95}, NEAR_ZERO | {"top_k": 20}, {}, {"temperature": 1.0, "top_p": 1e-6})
OF_RANKS = {"releases": "==0.5.23", "says_times": 2}
"""Rounds under DP attention are three graphs on other releases, and each rank has graphs of its own."""
SEEDS = {"": {}, ", seed 1": {"random_seed": 1}, ", seed 2": {"random_seed": 2}}
UNEQUAL = ("1x300", "8x300", "unequal ranks")
"""With one request at a time a rank is idle, and has to replay what its peer does."""
TWO_LENGTHS = ("8x300", "8x3000")
MANY = (*TWO_LENGTHS, "32x300", "sizes between and above the captured", "shared prefix", "short")
ON_FP8 = {"decode": "flashmla_kv", "engine": FP8}
TWO_RANKS = {"engine": TWO_GPUS | DP_2, "gpus": 2}
FOUR_RANKS = {"engine": FOUR_GPUS | DP_2, "gpus": 4}


def with_engine(fields: dict, **options) -> dict:
    """These fields of a case, with more options of its engine."""
    return fields | {"engine": fields["engine"] | options}


def on_fp8(fields: dict) -> dict:
    return with_engine(fields, **FP8) | {"decode": "flashmla_kv"}


ROUND_CASES = [
    *(round_case(f"n{n} fa3, one graph a round", n, MANY) for n in (1, 3, 5)),
    round_case("n3 flashmla_sparse, one graph a round", 3, TWO_LENGTHS, decode="flashmla_sparse"),
    round_case("n3 sparse_decode, one graph a round", 3, TWO_LENGTHS, decode="sparse_decode"),
    *(round_case(f"n{n} fp8, flashmla_kv, one graph a round", n, TWO_LENGTHS, **ON_FP8) for n in (1, 3)),
    round_case("n3 chunked prefill, one graph a round", 3, TWO_LENGTHS, engine={"chunked_prefill_size": 1024}),
    round_case("glm-5.2 n5 fa3, one graph a round", 5, TWO_LENGTHS, model="glm-5.2"),
    round_case("n3 fa3, 61 layers, one graph a round", 3, TWO_LENGTHS, shape="deep"),
    three_graphs("n3 fa3, three graphs a round", 3, TWO_LENGTHS),
    three_graphs("n3 fp8, flashmla_kv, three graphs a round", 3, TWO_LENGTHS, **ON_FP8),
    *(sampled_case(f"n{n} fa3, sampled, one graph a round", n, (*MANY, "1x300"), sampling=NEARLY_GREEDY) for n in (1, 3)),
    sampled_case("n3 fa3, sampled and greedy, one graph a round", 3, MANY, sampling=SAMPLED),
    sampled_case("n3 fp8, flashmla_kv, sampled and greedy, one graph a round", 3, TWO_LENGTHS, **ON_FP8, sampling=SAMPLED),
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
        TWO_LENGTHS,
        logprobs=True,
        says="sampled requests with log-prob",
        replays="sampled requests with log-probabilities",
        sampling=({"temperature": 1.0, "top_p": 1e-6},),  # by which the best token's is not one
    ),
    sampled_case("glm-5.2 n5 fa3, sampled, one graph a round", 5, ("8x300",), model="glm-5.2", sampling=SAMPLED),
    sampled_case(
        "two GPUs, tensor parallel, sampled, one graph a round",
        3,
        UNEQUAL[:2],
        engine=TWO_GPUS,
        gpus=2,
        sampling=NEARLY_GREEDY,
    ),
    three_graphs("n3 fa3, sampled, three graphs a round", 3, TWO_LENGTHS, sampling=SAMPLED),
    *(
        round_case(f"{word} GPUs, tensor parallel, one graph a round", 3, ("1x300", *TWO_LENGTHS), engine=engine, gpus=gpus)
        for word, engine, gpus in (("two", TWO_GPUS, 2), ("four", FOUR_GPUS, 4))
    ),
    *(
        round_case(f"{word}, one graph a round", 3, workloads, **OF_RANKS, **options)
        for word, workloads, options in (
            ("two GPUs, DP attention", (*UNEQUAL, "4x3000", "sizes between and above the captured"), TWO_RANKS),
            ("two GPUs, DP attention, fp8", (*UNEQUAL, "4x3000"), on_fp8(TWO_RANKS)),
            ("two GPUs, DP attention, its own LM head", UNEQUAL, with_engine(TWO_RANKS, enable_dp_lm_head=True)),
            ("four GPUs, DP attention 2", UNEQUAL, FOUR_RANKS),
            ("four GPUs, DP attention 2, fp8", UNEQUAL, on_fp8(FOUR_RANKS)),
        )
    ),
    three_graphs("two GPUs, DP attention, three graphs a round", 3, UNEQUAL, **TWO_RANKS, never_says=ONE_GRAPH["says"]),
    round_case("two GPUs, DP attention, n1, one graph a round", 1, UNEQUAL, **TWO_RANKS, **OF_RANKS),
    # Of two GPUs with a control: is the accept length below greedy requests' by the graph's sampling, or because one of equally
    # good tokens is drawn? In one wave of "unequal ranks" a rank has a greedy request alone: its rounds are one graph. One seed
    # is one draw, so both have more of them.
    *(
        sampled_case(
            f"{word}, sampled and greedy, one graph a round{words}",
            3,
            UNEQUAL,
            **with_engine(ranks, **seed),
            **OF_RANKS,
            sampling=SAMPLED,
        )
        for word, ranks, seeds in (
            ("two GPUs, DP attention", TWO_RANKS, SEEDS),
            ("four GPUs, DP attention 2", FOUR_RANKS, {"": {}}),
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
            **with_engine(TWO_RANKS, **seed),
            releases=OF_RANKS["releases"],
            sampling=SAMPLED,
        )
        for words, seed in SEEDS.items()
    ),
]
