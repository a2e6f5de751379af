"""End-to-end cases of four and of eight GPUs, and of what one of eight ranks computes, in a model of so few heads."""

from __future__ import annotations

from functools import partial

from case import Case
from engine_options import BY_ROWS, DEFAULT_SUMS, DP_2, EIGHT_GPUS, FLOORS, FOUR_GPUS, FP8, STANDARD, TWO_GPUS

IMPLEMENTATIONS = (
    ("fa3", {"floors": FLOORS}),
    ("flashmla_sparse", {"decode": "flashmla_sparse", "floors": FLOORS}),  # pads heads to 64
    ("sparse_decode", {"decode": "sparse_decode", "floors": FLOORS}),
    ("fp8, flashmla_kv", {"decode": "flashmla_kv", "engine": FP8, "floor_of_all": 0.95}),
)
MANY = ("1x300", *STANDARD, "32x300")
UNEQUAL = (*MANY, "unequal ranks")  # two ranks have requests, the others nothing to do


def on(engine: dict, options: dict) -> dict:
    """Fields of a case whose engine has both."""
    return options | {"engine": engine | options.get("engine", {})}


def with_heads(where: str, shape: str, engine: dict | None = None, workloads: tuple[str, ...] = STANDARD) -> list[Case]:
    """One case an implementation, N = 3, of a faithful checkpoint with fewer heads."""
    engine = engine or {}
    case = partial(Case, steps=3, workloads=workloads, shape=shape, gpus=engine.get("tp_size", 1))
    return [case(f"{where}, {name}", **on(engine, options)) for name, options in IMPLEMENTATIONS]


def on_many(word: str, engine: dict) -> list[Case]:
    """On all of the GPUs of `engine`: tensor parallel, DP attention with one GPU a rank, and DP attention with two ranks.

    Every implementation with N = 3, and fa3 with N = 0 and 1. A rank has as many requests as the graphs of a case go to.
    """
    gpus = engine["tp_size"]
    attention = {
        "tensor parallel": (MANY, {}),
        f"DP attention {gpus}": (UNEQUAL, DP_2 | {"dp_size": gpus, "max_running_requests": 8 * gpus}),
        "DP attention 2": (UNEQUAL, DP_2),
    }
    case = partial(Case, gpus=gpus)
    return [
        *(
            case(f"{word} GPUs, {how}, {name}", 3, workloads, **on(engine | ranks, options))
            for how, (workloads, ranks) in attention.items()
            for name, options in IMPLEMENTATIONS
        ),
        *(
            case(f"{word} GPUs, {how}, n{n}", n, workloads, engine=engine | ranks, floor_of_all=0.95 if n else 0.0)
            for how, (workloads, ranks) in attention.items()
            for n in (0, 1)
        ),
    ]


RANK_CASES = [case for heads in (16, 8) for case in with_heads(f"{heads} heads", f"faithful-{heads}-heads")]
"""Of tensor parallel 8, without its collectives."""

EIGHT_HEADS_CASES = [
    *with_heads("two GPUs, 8 heads each", "faithful-16-heads", TWO_GPUS),
    *with_heads("four GPUs, 8 heads each", "faithful-32-heads", FOUR_GPUS, MANY),
]
"""Of tensor parallel 8 of GLM-5, with collectives; `four GPUs, tensor parallel, ...` has the 16 heads of DeepSeek-V3.2."""

FOUR_GPU_CASES = on_many("four", FOUR_GPUS)
EIGHT_GPU_CASES = [
    *on_many("eight", EIGHT_GPUS),
    Case(
        "eight GPUs, tensor parallel, default all-reduce",
        3,
        MANY,
        shape="wide",
        engine=EIGHT_GPUS | DEFAULT_SUMS | BY_ROWS,
        gpus=8,
        floor_of_all=0.95,
        releases="==0.5.23",
    ),
]
"""DeepSeek-V3.2 and GLM-5 are served so on eight H200s. Of these cases none has run to its end."""

CASES_OF_RANKS = [*RANK_CASES, *EIGHT_HEADS_CASES, *FOUR_GPU_CASES, *EIGHT_GPU_CASES]
