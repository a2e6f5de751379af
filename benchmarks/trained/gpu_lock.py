"""Runs on one GPU at the same time: what is timed waits until the others say that they are done."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def lock_of_gpu() -> Path:
    """One file for every choice of GPUs on this machine."""
    return Path(tempfile.gettempdir()) / f"nsa-gpu-{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}.lock"


@contextmanager
def busy() -> Iterator[None]:
    """Within it, `alone` of other processes waits."""
    with lock_of_gpu().open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextmanager
def alone(deadline: float) -> Iterator[bool]:
    """Wait until nobody is `busy` on this GPU; False where that was not so at `deadline` of time.monotonic()."""
    with lock_of_gpu().open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(0.5)
            else:
                yield True
                return
