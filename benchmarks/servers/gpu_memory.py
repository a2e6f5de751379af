"""Device memory that a server holds, as what comes free when it ends: with CUDA contexts, graphs and the buffers of NCCL.

Servers start side by side but end one after the other, and what ends beside them on the same GPUs would count too.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Ending = TypeVar("Ending")

APART_SECONDS, STILL_SECONDS, MOST_SECONDS = 0.25, 1.0, 15.0
"""Between two looks; without a change, which ends the looking once something came free; after which nobody looks any more."""


def used_mib(gpus: str | None, seconds: float = 30) -> list[int]:
    """MiB in use on each of these GPUs; empty where nvidia-smi does not tell.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES names them; all if None.
        seconds: that nvidia-smi may take.
    """
    chosen = [] if gpus is None else ["-i", gpus]
    query = ["nvidia-smi", *chosen, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return list(map(int, subprocess.run(query, capture_output=True, text=True, timeout=seconds, check=True).stdout.split()))
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def by_process_mib(seconds: float = 30) -> dict[int, int] | None:
    """MiB that each process holds on all GPUs together, with its CUDA contexts; None where nvidia-smi does not tell.

    Unlike in `used_mib` one can leave out what runs beside, on the same GPUs. A process that holds nothing is not there.
    """
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=seconds, check=True).stdout
        rows = [tuple(map(int, line.split(","))) for line in told.splitlines()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    held: Counter[int] = Counter()
    for pid, mib in rows:
        held[pid] += mib
    return dict(held)


def used() -> list[float]:
    """GiB in use on each GPU that this process sees, in their order; empty where nvidia-smi does not tell."""
    return [mib / 1024 for mib in used_mib(os.environ.get("CUDA_VISIBLE_DEVICES"))]


@contextmanager
def weighed(server: Ending, held: list[float]) -> Iterator[Ending]:
    """`server` within its own `with` block; once it has ended `held` has the GiB that came free on each GPU."""
    before: list[float] = []
    try:
        with server:
            try:
                yield server
            finally:
                before = used()
    finally:
        held += [round(was - now, 2) for was, now in zip(before, _after(before), strict=True)]


def _after(before: list[float]) -> list[float]:
    """What is in use once it no longer falls: processes free their memory a moment after their server has ended."""
    if not before:
        return []
    now, began = used(), time.monotonic()
    changed = began
    while time.monotonic() - began < MOST_SECONDS:
        if now != before and time.monotonic() - changed > STILL_SECONDS:
            break
        time.sleep(APART_SECONDS)
        last, now = now, used()
        if now != last:
            changed = time.monotonic()
    return now if len(now) == len(before) else before
