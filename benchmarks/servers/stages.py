"""Which servers of ranks run at the same time, and in which order: one a GPU, or one of several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nsa_backend.benchmarks.servers.parallel import ONE_GPU, Parallel

TURNS = 2


@dataclass(frozen=True)
class Stage:
    """The servers that run at the same time."""

    parallel: Parallel
    servers: tuple[tuple[str, str], ...]  # (side, GPUs as CUDA_VISIBLE_DEVICES names them)

    def __str__(self) -> str:
        return " and ".join(f"{side} on {gpus}" for side, gpus in self.servers)


def stages(asked: Sequence[tuple[Parallel, Sequence[str]]], gpus: Sequence[str], turns: int = TURNS) -> list[tuple[int, Stage]]:
    """(turn, what runs at the same time), in order, every other turn in reverse.

    Args:
        asked: deployments with the sides of each. Of one GPU there are as many sides at once as GPUs, of several one side.
        gpus: names of those that there are.
        turns: how often every side has its turn.
    """
    found = []
    for turn in range(turns):
        back = 1 if turn % 2 == 0 else -1
        for parallel, sides in asked[::back]:
            places = gpus if parallel == ONE_GPU else [",".join(gpus[: parallel.gpus])]
            order = list(sides)[::back]
            groups = [order[at : at + len(places)] for at in range(0, len(order), len(places))]
            found += [(turn, Stage(parallel, tuple(zip(group, places, strict=False)))) for group in groups]
    return found
