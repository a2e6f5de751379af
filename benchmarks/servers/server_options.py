"""Options of a server, by the names of the installed release: the one place where benchmarks and tests spell them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version

from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.releases import SUPPORTED, generation_of, installed

CHUNK = 8192
"""Tokens that SGLang prefills at once on a GPU of 60 to 160 GB unless told otherwise."""

MEASURED_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Names:
    """What a generation calls the options that differ."""

    backend: str  # value of --attention-backend
    decode: str
    prefill: str
    decode_graphs: str
    prefill_graphs: str | None  # None: it captures no prefill of these models


NAMES = {
    "nsa": Names("nsa", "--nsa-decode-backend", "--nsa-prefill-backend", "--cuda-graph-bs", None),
    "dsa": Names("dsa", "--dsa-decode-backend", "--dsa-prefill-backend", "--cuda-graph-bs-decode", "--cuda-graph-bs-prefill"),
}
"""By the adapter of `nsa_backend.releases`."""


def names() -> Names:
    """Those of the installed release; raises RuntimeError where it is not served."""
    generation = generation_of(installed())
    if generation is None:
        raise RuntimeError(f"servers are started with SGLang {SUPPORTED}, and this is {installed()}")
    return NAMES[generation.adapter]


def implementations(decode: str, prefill: str | None = None) -> list[str]:
    """Options that choose the sparse attention backend and its implementations."""
    found = ["--attention-backend", names().backend, names().decode, decode]
    return found if prefill is None else [*found, names().prefill, prefill]


def speculation(steps: int) -> list[str]:
    """MTP with N = `steps` drafts in one chain; nothing where N is 0."""
    if not steps:
        return []
    return [
        "--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps),
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1),
    ]  # fmt: skip


def decode_graphs(batches: Iterable[int] = MEASURED_BATCHES) -> list[str]:
    """Capture decode, verify and draft graphs for `batches` alone."""
    return [names().decode_graphs, *map(str, sorted(set(batches)))]


def prefill_graphs(shapes: Iterable[tuple[int, int]], ranks: int = 1) -> list[str]:
    """Capture only the prefill graphs that `shapes` of (requests, prompt tokens) run in on a server that captures them all.

    `shapes` are of one of `ranks` ranks of DP attention, between which SGLang divides the tokens that it prefills at once.
    """
    if names().prefill_graphs is None:
        return []
    most = CHUNK // ranks
    sizes = {graph_tokens(chunk) for shape in shapes for page in (1, PAGE_SIZE) for chunk in chunks(*shape, page, most)}
    captured = {size for size in sizes if size <= min(largest_prefill_graph(), most)} or {graph_tokens(1)}
    return [names().prefill_graphs, *map(str, sorted(captured))]


def largest_prefill_graph() -> int:
    """Tokens of the largest prefill that a server captures by default; what is longer runs without a graph."""
    return CHUNK if Version(installed()) >= Version("0.5.23") else 2048  # 0.5.17; the releases between were not looked at


def chunks(requests: int, length: int, page: int = PAGE_SIZE, most: int = CHUNK) -> list[int]:
    """Tokens of each prefill of `requests` prompts that arrive together, with at most `most` at once.

    What a prompt takes of a chunk is rounded up to `page`, as SGLang does where it does not fill chunks exactly. A prompt
    that a chunk has no room for is cut, and continues in the next one.
    """
    found, waiting = [], [length] * requests
    while waiting:
        room, tokens = most, 0
        while waiting and room > 0:
            taken = min(waiting[0], room)
            tokens, room = tokens + taken, room - -(-taken // page) * page
            waiting[0] -= taken
            if waiting[0]:
                break
            waiting.pop(0)
        found.append(tokens)
    return found


def graph_tokens(tokens: int) -> int:
    """The size of the graph that a prefill of `tokens` runs in, of those that SGLang captures by default."""
    step = next(
        step for limit, step in ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (CHUNK, 512)) if tokens <= limit
    )
    return -(-tokens // step) * step


def pool_tokens(shapes: Iterable[tuple[int, int]], new_tokens: int) -> int:
    """Room for the largest of `shapes` of (requests, prompt tokens), its new tokens and what SGLang holds back for more."""
    tokens = max(requests * (length + new_tokens + 512) for requests, length in shapes) + 2 * CHUNK
    return -(-tokens // PAGE_SIZE) * PAGE_SIZE


def pool(
    shapes: Iterable[tuple[int, int]], new_tokens: int, ranks: int = 1, *, bounded: bool = True, keeps: bool = False
) -> list[str]:
    """A pool of `pool_tokens`, or where it is not `bounded` of all the memory there is.

    No prompt is kept, so that prefills repeat, unless it `keeps` them.
    `shapes` are of one of `ranks` ranks of DP attention. SGLang divides the running requests by the ranks, and the tokens not.
    Two servers start on one GPU at a time, and what the other loads meanwhile counts against a server's share of memory: both
    of them must stay below half of the GPU. The pool is no larger for it."""
    shapes = list(shapes)
    most = max(requests for requests, _ in shapes)
    return [
        *(("--max-total-tokens", str(pool_tokens(shapes, new_tokens))) if bounded else ()),
        "--mem-fraction-static", "0.5", *(() if keeps else ("--disable-radix-cache",)),
        "--max-running-requests", str(max(32, most) * ranks),
    ]  # fmt: skip
