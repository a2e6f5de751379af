"""What a run shows: lines with the time, and a progress bar of a stage."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class Clock:
    """Call it with a line to print; it also works in a process that this one spawned."""

    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def __call__(self, text: str) -> None:
        print(f"[{self.seconds:6.1f} s] {text}", flush=True)


class Bar:
    """Leave the `with` block to end it; a log file gets no bar."""

    def __init__(self, name: str):
        columns = (TextColumn(name), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn(),
                   TextColumn("{task.description}"))  # fmt: skip
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=1.0)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, done: float, text: str) -> None:
        self._progress.update(self._task, completed=min(done, 1.0), description=text)
