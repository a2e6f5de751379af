"""SGLang's second stream beside the one of a forward."""

from __future__ import annotations

import contextlib

import torch


class SideStream:
    """What a layer runs beside its main sequence; without a stream, in the sequence itself.

    A tensor of one stream that the other one reads must be held until `join`: its memory is then free in its own order.
    """

    def __init__(self, stream: torch.cuda.Stream | None):
        self._stream = stream

    def fork(self) -> None:
        """What the side runs from now on comes after all that the main stream has been given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def running(self) -> contextlib.AbstractContextManager[object]:
        """While launches go to the side."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """What the main stream is given from now on comes after all that the side has been given."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
