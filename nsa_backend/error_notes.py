"""Notes that say where an exception came from: what was done, in which mode, for how many requests, in which draft step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass
class Activity:
    """What a backend is at. Changed at the head of every preparation, read only when something went wrong."""

    doing: str = "starting"
    mode: Enum | None = None
    requests: int = 0
    step: int | None = None  # of a draft round; None elsewhere

    def begin(self, doing: str, mode: Enum | None, requests: int) -> None:
        self.doing, self.mode, self.requests = doing, mode, requests

    def __str__(self) -> str:
        mode = "" if self.mode is None else f" {self.mode.name}"
        step = "" if self.step is None else f", draft step {self.step}"
        return f"nsa_backend: while {self.doing}{mode}, batch size {self.requests}{step}"


def noted(method: Callable) -> Callable:
    """Add the `activity` of the object to whatever its method raises; the exception itself passes on unchanged.

    The note stands below the message in every traceback. Costs nothing until something is raised.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            note = str(self.activity)
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    return call
