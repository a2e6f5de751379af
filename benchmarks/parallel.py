"""How a server is spread over GPUs: tensor parallel 4 as `tp4`, DP attention 4 as `dp4`, 2 ranks of two GPUs as `dp2-tp2`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

WORD = re.compile(r"(?!-)(?:dp(?P<dp>[1-9]\d*))?(?:(?:^|-)tp(?P<tp>[1-9]\d*))?")


@dataclass(frozen=True)
class Parallel:
    """`dp` ranks of attention, each on `tp` GPUs; experts are divided over all of them."""

    dp: int = 1
    tp: int = 1

    @property
    def gpus(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        """As an option names it, and as rows have it."""
        return "-".join(f"{name}{size}" for name, size in (("dp", self.dp), ("tp", self.tp)) if size > 1) or "tp1"

    def options(self) -> list[str]:
        """A server's options. All-reduce goes through NCCL alone: SGLang's fused one asks for NVLink multicast."""
        if self.gpus == 1:
            return []
        attention = ["--enable-dp-attention", "--dp-size", str(self.dp)] if self.dp > 1 else []
        no_multicast = ["--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]
        return ["--tp-size", str(self.gpus), *attention, *no_multicast]

    def of_a_rank(self, shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """(requests, prompt tokens) of the rank with the most of a batch: SGLang deals requests out one after the other."""
        return [(-(-requests // self.dp), length) for requests, length in shapes]


ONE_GPU = Parallel()


def parsed(word: str) -> Parallel:
    """What `word` names; SystemExit for what it is not."""
    found = WORD.fullmatch(word)
    sizes = {name: int(size) for name, size in found.groupdict().items() if size} if found else {}
    if not sizes:
        raise SystemExit(f"--parallel {word} is none: write tp4, dp4, or dp2-tp2 for DP attention 2 of two GPUs each")
    return Parallel(**sizes)
