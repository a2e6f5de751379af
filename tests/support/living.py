"""Whether processes that a test or a tool has started live on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def have_ended(pids: Iterable[int]) -> bool:
    """One that was killed a moment ago has some seconds to be gone."""
    pids, last = list(pids), time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < last:
        time.sleep(0.02)
    return not any(map(is_alive, pids))
