"""A progress bar of a stage."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


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
