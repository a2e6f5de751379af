"""Graphs that become nodes of another graph: what PyTorch refuses to replay inside a capture joins it there.

PyTorch does not replay a graph while a stream is capturing, and CUDA answers a launch there with an error. But the graph that
a stream is capturing may be added to while it is captured (cudaStreamGetCaptureInfo): the captured graph becomes a child node
that follows everything captured so far, and whatever is captured next follows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class KeptGraph(torch.cuda.CUDAGraph):
    """A graph that is kept after its capture, so that it can join another.

    Its own executable is made then too, as any other graph's: a batch that no whole round serves replays it, and would wait for
    that otherwise.
    """

    def __new__(cls) -> KeptGraph:
        return super().__new__(cls, keep_graph=True)

    def __init__(self):
        super().__init__(keep_graph=True)

    def capture_end(self) -> None:
        super().capture_end()
        self.instantiate()

    def replay(self) -> None:
        """Launch it; on a stream that is capturing, add it to what is captured."""
        if torch.cuda.is_current_stream_capturing():
            add_to_capture(self.raw_cuda_graph())
        else:
            super().replay()


@contextlib.contextmanager
def kept_graphs() -> Iterator[None]:
    """While a graph is captured, `torch.cuda.CUDAGraph()` makes one that is kept."""
    original = torch.cuda.CUDAGraph
    torch.cuda.CUDAGraph = KeptGraph
    try:
        yield
    finally:
        torch.cuda.CUDAGraph = original


def add_to_capture(child: int) -> None:
    """Add a child node to the graph that the current stream is capturing.

    Args:
        child: handle of a cudaGraph_t, which is cloned.
    """
    from cuda.bindings import runtime

    stream = runtime.cudaStream_t(torch.cuda.current_stream().cuda_stream)
    _status, _id, graph, dependencies, _edges, count = _checked(runtime.cudaStreamGetCaptureInfo(stream))
    (node,) = _checked(runtime.cudaGraphAddChildGraphNode(graph, dependencies, count, runtime.cudaGraph_t(child)))
    replace = runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
    _checked(runtime.cudaStreamUpdateCaptureDependencies(stream, [node], None, 1, int(replace)))


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of the CUDA runtime returned beside its error code; raises RuntimeError with CUDA's words for an error."""
    from cuda.bindings import runtime

    error, *values = answer
    if error != runtime.cudaError_t.cudaSuccess:
        _, text = runtime.cudaGetErrorString(error)
        raise RuntimeError(f"CUDA could not join the graphs of a round: {text.decode()}")
    return tuple(values)
