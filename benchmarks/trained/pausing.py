"""Servers that stand still while others are timed: an idle server takes a CPU core, polling for requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil


@contextmanager
def paused(pids: Iterable[int]) -> Iterator[None]:
    """Within it these processes and all that they started are stopped; afterwards they go on where they were.

    Args:
        pids: of servers that nobody asks meanwhile: a request to one of them would wait. One that has ended is left alone: it
            has no CPU time to take, and whoever asks it next finds out.
    """
    stopped: list[psutil.Process] = []
    try:
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                server = psutil.Process(pid)
                for process in (server, *server.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        process.suspend()
                        stopped.append(process)
        yield
    finally:
        for process in reversed(stopped):
            with suppress(psutil.NoSuchProcess):
                process.resume()
