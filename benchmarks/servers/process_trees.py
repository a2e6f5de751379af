"""Ending a process that leads a session of its own (`start_new_session=True`), and all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

import psutil


def end_all(process: subprocess.Popen, asked: float | None = None) -> None:
    """End what the session of a process still has, and what lives beneath the process in other sessions; wait for the process.

    Args:
        asked: seconds that the session has to end by itself, from a SIGTERM on; None kills it at once, which is for SGLang's
            servers: after SIGTERM one waits for requests that were aborted in its queue for ever.
    """
    beneath = []  # found first: once the process has ended nobody knows what was beneath it
    if process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            beneath = psutil.Process(process.pid).children(recursive=True)
    if asked is not None:
        _signal_session(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(asked)
    _signal_session(process, signal.SIGKILL)
    for one in beneath:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _signal_session(process: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
