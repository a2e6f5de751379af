"""How a deployment is spread over GPUs, in a word: tensor parallel 4 is `tp4`, DP attention 2 of two GPUs each `dp2-tp2`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

SIZES = ("dp", "tp", "cp", "dcp", "pp")
SIZE = re.compile(rf"({'|'.join(SIZES)})([1-9]\d*)")
WORDS = (
    "write tp4, dp4, dp2-tp2 (DP attention 2 of two GPUs each), tp4-ep or dp4-ep (experts are divided), cp2 (prefill context "
    "parallel), dcp2 (decode context parallel, which the built-in backend lacks on Hopper), pp2 (pipeline parallel), or pd, "
    "pd-tp2, pd-dp2 (a prefill and a decode server of so many GPUs each)"
)


NCCL, SGLANGS = "nccl", "sglang"
ALL_REDUCE = (NCCL, SGLANGS)
"""How the ranks of a server sum up: through NCCL alone, or as SGLang has it by itself.

On 0.5.23 and an H200 that is FlashInfer's all-reduce, which adds the residual and normalises in the same launch, and SGLang's
own kernels elsewhere. Those of other releases may ask for NVLink multicast, which not every machine offers."""


@dataclass(frozen=True)
class Parallel:
    """`dp` ranks of attention, each on `tp` GPUs; or context parallel of prefill, `cp`, or of decode, `dcp`; or `pp` stages."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    dcp: int = 1
    pp: int = 1
    ep: bool = False  # a GPU has some of the experts, and not a part of each; `--moe-a2a-backend none` adds up what they give
    pd: bool = False  # one server prefills and another decodes, each on GPUs of its own

    @property
    def gpus_of_a_server(self) -> int:
        return self.dp * self.tp * self.cp * self.dcp * self.pp

    @property
    def gpus(self) -> int:
        return self.gpus_of_a_server * (2 if self.pd else 1)

    def __str__(self) -> str:
        """As an option names it, and as rows have it."""
        sizes = [f"{name}{size}" for name in SIZES if (size := getattr(self, name)) > 1]
        return "-".join([*["pd"] * self.pd, *sizes, *["ep"] * self.ep]) or "tp1"

    def options(self, all_reduce: str = NCCL) -> list[str]:
        """Options of each server, whose ranks sum up as `all_reduce` says."""
        if self.gpus_of_a_server == 1:
            return []
        if self.pp > 1:
            return ["--pp-size", str(self.pp), "--disable-overlap-schedule"]
        options = ["--tp-size", str(self.gpus_of_a_server)]
        if all_reduce == NCCL:
            options += ["--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]
        if self.dp > 1:
            options += ["--enable-dp-attention", "--dp-size", str(self.dp)]
        if self.cp > 1:
            options += ["--enable-prefill-cp", "--cp-strategy", "interleave"]
        if self.dcp > 1:
            options += ["--dcp-size", str(self.dcp)]
        return options + (["--ep-size", str(self.gpus_of_a_server)] if self.ep else [])

    def serves(self, side: str) -> bool:
        """Whether `side` can: SGLang's built-in backend divides the KV of these models on Blackwell alone."""
        return self.dcp == 1 or side != "builtin"

    def environment(self) -> dict[str, str]:
        """What its servers need to find there: without it SGLang has no drafts under pipeline parallelism."""
        return {"SGLANG_ENABLE_PP_SPEC": "1"} if self.pp > 1 else {}

    def of_a_rank(self, shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """(requests, prompt tokens) of the rank with the most of a batch: SGLang deals requests out one after the other."""
        return [(-(-requests // self.dp), length) for requests, length in shapes]


ONE_GPU = Parallel()


def parsed(word: str) -> Parallel:
    """What `word` names; SystemExit for what it is not."""
    found: dict[str, int | bool] = {}
    for part in word.split("-"):
        if part in ("pd", "ep"):
            found[part] = True
        elif size := SIZE.fullmatch(part):
            found[size[1]] = int(size[2])
        else:
            raise SystemExit(f"--parallel {word} is none: {WORDS}")
    one = Parallel(**found)
    alone = max(one.pp, one.cp, one.dcp) > 1
    if word not in (str(one), "tp1") or (one.ep and one.gpus_of_a_server == 1) or (alone and len(found) > 1):
        raise SystemExit(f"--parallel {word} is none: {WORDS}")
    return one
