"""End-to-end cases whose ranks share GPUs, as nodes of one deployment do (nodes.py): two on one GPU, four and eight on two.

What several ranks compute where fewer GPUs are to be had. One case at a time: a collective takes milliseconds there, with four
ranks on a GPU tens of them, and a round has about twenty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from case import Case
from engine_options import BESIDE_OTHERS, DP_2, FP8, ONE_GRAPH, TWO_GPUS

NEWEST = "0.5.23"
"""Of which nodes of one machine were tried."""
ALONE, BOTH = ("8x300",), ("8x300", "some unequal ranks")
FULL = dict.fromkeys(BOTH, 3.9 / 4)
HALF = dict.fromkeys(BOTH, 3.85 / 4)
"""Of eight ranks, with half as many rounds: over the 0.5.23 runs on H200s eight requests of 31 rounds had means of 3.94 with a
standard deviation of 0.021, so that 3.9 is two of them below. Half of the rounds make it 0.030, and 3.85 is three below."""
FP8_FLOORS = dict.fromkeys(BOTH, 3.8 / 4)
"""Of 31 rounds: the same runs had means of 3.92 on FP8 KV, with a standard deviation of 0.028."""
ON_FP8 = {"decode": "flashmla_kv", "floors": FP8_FLOORS, "floor_of_all": 0.95}


def shared(name: str, ranks: int, engine: dict[str, Any], **options: Any) -> Case:
    """A case of `ranks` ranks on two GPUs; as many as have a round in one graph say so, each of its own."""
    options = {"workloads": BOTH, "floors": FULL, "releases": f"=={NEWEST}"} | options
    if "says" in options:
        options["says_times"] = ranks
    many = TWO_GPUS | BESIDE_OTHERS | {"tp_size": ranks}
    return Case(name, 3, engine=many | engine, gpus=2, ranks_per_gpu=ranks // 2, **options)


def dp(ranks: int) -> dict[str, Any]:
    """DP attention with one rank each, which has as many requests as the graphs of a case go to."""
    return DP_2 | {"dp_size": ranks, "max_running_requests": 8 * ranks}


four = partial(shared, ranks=4)
eight = partial(shared, ranks=8, most_tokens=64, floors=HALF)
FOUR, EIGHT = "four ranks on two GPUs", "eight ranks on two GPUs"
ON_TWO, ON_ONE = "two GPUs", "two ranks on one GPU"

SHARED_CASES = [
    four(f"{FOUR}, DP attention 2, one graph a round", engine=DP_2, **ONE_GRAPH),
    four(f"{FOUR}, DP attention 2, fp8, flashmla_kv", engine=DP_2 | FP8, **ON_FP8),
    four(f"{FOUR}, DP attention 2, fa3", engine=DP_2),
    four(f"{FOUR}, DP attention 2, fp8, one graph a round", engine=DP_2 | FP8, **ON_FP8, **ONE_GRAPH),
    four(f"{FOUR}, DP attention 2, overlap scheduling off", engine=DP_2 | {"disable_overlap_schedule": True}),
    four(f"{FOUR}, DP attention 4, fa3", engine=dp(4)),
    four(f"{FOUR}, tensor parallel, fa3", engine={}, workloads=ALONE),
    eight(f"{EIGHT}, DP attention 2, fa3", engine=DP_2),
    eight(f"{EIGHT}, DP attention 8, fa3", engine=dp(8)),
    eight(f"{EIGHT}, tensor parallel, fa3", engine={}, workloads=ALONE),
    four(f"{FOUR}, decode context parallel 4", engine={"dcp_size": 4}, workloads=ALONE, ours_alone=("dcp_size",)),
    eight(f"{EIGHT}, DP attention 2, one graph a round", engine=DP_2, **ONE_GRAPH),
]
"""In the order of what is least known. The first two have run (benchmarks/results/e2e_0_5_23_h200.json, shared_ranks)."""


def on_one_gpu(cases: Iterable[Case]) -> list[Case]:
    """Those of two GPUs with a rank on each, their ranks as two nodes of one GPU.

    Left out is what nodes do not do here: a pair of servers, stages of a pipeline, DeepEP's exchange, sums through memory that
    ranks share, and what is asked of an engine in this process (an action, log-probabilities).
    """
    return [
        replace(
            case, name=case.name.replace(ON_TWO, ON_ONE), engine=case.engine | BESIDE_OTHERS, gpus=1, ranks_per_gpu=2,
            releases=f"=={NEWEST}",
        )
        for case in cases
        if (case.gpus, case.ranks_per_gpu, case.engine.get("tp_size")) == (2, 1, 2)
        and case.is_of(NEWEST)
        and not (case.disaggregated or case.action or case.logprobs or "moe_a2a_backend" in case.engine)
        and case.engine["disable_custom_all_reduce"]
    ]  # fmt: skip
