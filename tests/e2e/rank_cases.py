"""End-to-end cases of eight GPUs, and of what one of eight ranks computes, in a model of so few heads on one or two GPUs."""

from __future__ import annotations

from functools import partial

from case import Case
from engine_options import DP_2, FLOORS, FP8, STANDARD, TWO_GPUS

IMPLEMENTATIONS = (
    ("fa3", {"floors": FLOORS}),
    ("flashmla_sparse", {"decode": "flashmla_sparse", "floors": FLOORS}),  # pads heads to 64
    ("sparse_decode", {"decode": "sparse_decode", "floors": FLOORS}),
    ("fp8, flashmla_kv", {"decode": "flashmla_kv", "engine": FP8, "floor_of_all": 0.95}),
)


def on(engine: dict, options: dict) -> dict:
    """Fields of a case whose engine has both."""
    return options | {"engine": engine | options.get("engine", {})}


RANK_CASES = [
    Case(f"{heads} heads, {name}", 3, STANDARD, shape=f"faithful-{heads}-heads", **options)
    for heads in (16, 8)
    for name, options in IMPLEMENTATIONS
]
"""Of tensor parallel 8, without its collectives."""

HALVED_CASES = [
    Case(f"two GPUs, 8 heads each, {name}", 3, STANDARD, shape="faithful-16-heads", gpus=2, **on(TWO_GPUS, options))
    for name, options in IMPLEMENTATIONS
]

EIGHT_GPUS = TWO_GPUS | {"tp_size": 8}
MANY = ("1x300", *STANDARD, "32x300")
UNEQUAL = (*MANY, "unequal ranks")  # of eight, six have nothing to do
ATTENTION = {
    "tensor parallel": (MANY, {}),
    "DP attention 8": (UNEQUAL, DP_2 | {"dp_size": 8}),
    "DP attention 2": (UNEQUAL, DP_2),
}
eight = partial(Case, gpus=8)
EIGHT_GPU_CASES = [
    *(
        eight(f"eight GPUs, {how}, {name}", 3, workloads, **on(EIGHT_GPUS | attention, options))
        for how, (workloads, attention) in ATTENTION.items()
        for name, options in IMPLEMENTATIONS
    ),
    *(
        eight(f"eight GPUs, {how}, n{n}", n, workloads, engine=EIGHT_GPUS | attention, floor_of_all=0.95 if n else 0.0)
        for how, (workloads, attention) in ATTENTION.items()
        for n in (0, 1)
    ),
]
"""In none of these has anything run: DeepSeek-V3.2 and GLM-5 are served so on eight H200s."""

CASES_OF_EIGHT = [*RANK_CASES, *HALVED_CASES, *EIGHT_GPU_CASES]
