"""Ports for the servers of a test; other tests, and other checkouts on the machine, listen on theirs meanwhile."""

from __future__ import annotations

import contextlib
import random
import socket

RANGE = range(20_000, 32_000)
"""Below those that the system hands out to anybody."""


def free_port(*above: int) -> int:
    """A port that nobody listens on, nor on the ports so far above it."""
    while True:
        port = random.SystemRandom().choice(RANGE)
        with contextlib.suppress(OSError), contextlib.ExitStack() as taken:
            for each in (0, *above):
                taken.enter_context(socket.socket()).bind(("127.0.0.1", port + each))
            return port
