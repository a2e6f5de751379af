"""The SGLang releases that are served, and the adapter of each: one folder a generation in `nsa_backend.adapters`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Generation:
    """Releases that reach an attention backend in the same way."""

    adapter: str  # folder of nsa_backend.adapters
    releases: SpecifierSet
    calls_the_backend: str  # what SGLang's options and registry call DeepSeek sparse attention
    before_a_replay: str  # how SGLang asks for metadata


GENERATIONS = (
    Generation(
        "nsa",
        SpecifierSet(">=0.5.12,<=0.5.12.post1"),
        "nsa",
        "init_forward_metadata_{capture,replay}_cuda_graph, outside the graph",
    ),
    Generation(
        "dsa",
        SpecifierSet(">=0.5.17,<=0.5.23"),
        "dsa, and nsa for what older command lines say",
        "init_forward_metadata_out_graph before a graph, init_forward_metadata_in_graph inside it",
    ),
)
"""The supported range, oldest first.

0.5.13 to 0.5.16 lie between the two: half of what 0.5.17 offers is elsewhere or missing there. 0.5.11 lacks the lengths that
spec v1's draft-extend is captured with.
"""

SUPPORTED = " or ".join(str(generation.releases) for generation in GENERATIONS)

ROUND_GRAPHS = ("0.5.17", "0.5.23")
"""Releases whose speculative rounds can be one graph: another one's worker may wait for the GPU, or plan on the host.

What differs between them is in `nsa_backend.adapters.dsa.rounds.by_release`.
"""

ROUND_WARM_UP = "round_graphs"
"""What `--warmups` calls the capture of such graphs before a server is ready (`nsa_backend.adapters.dsa.rounds.warm_up`)."""

ROUND_COUNTS = "nsa_backend_rounds"
"""What /server_info calls the rounds that were one graph, in the state of each DP rank."""


LAYER_FRONTS = {"0.5.23": True}
"""Releases on which a layer's front can be two launches, and whether it is unasked."""


PAIRED_LOGITS = ("0.5.23",)
"""Releases on which verified rows are scored two by two unasked: their DeepGEMM was timed so."""


DIVIDED_INDEXERS = ("0.5.23",)
"""Releases on which ranks of tensor parallel can divide the indexer's work of long prefills."""


FEW_EXPERTS = ("0.5.23",)
"""Releases on which block-FP8 experts of few tokens have this package's launches unasked, on Hopper."""


CONTEXT_RANKS = ("0.5.23",)
"""Releases whose ranks may divide the KV of a request (--dcp-size)."""


def installed() -> str:
    """The installed SGLang's release, or what stands there instead."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "a source tree without a version"


def generation_of(release: str) -> Generation | None:
    """The generation that `release` belongs to, or None where it is not served."""
    try:
        found = Version(release)
    except InvalidVersion:
        return None
    return next((g for g in GENERATIONS if g.releases.contains(found, prereleases=found.is_postrelease)), None)


def unsupported_host() -> str | None:
    """Why the installed SGLang is not served, or None."""
    release = installed()
    if generation_of(release):
        return None
    return f"it supports SGLang {SUPPORTED} and this is {release}"


def other_release(is_served: str, served: Iterable[str]) -> str | None:
    """Why a user cannot ask the installed SGLang for what `is_served` on others alone, or None where it is one of them."""
    if installed() in served:
        return None
    return f"{is_served} on SGLang {' and '.join(served)}, and {installed()} is installed: unset it"


def round_graph_problem(switch: str = "NSA_BACKEND_ROUND_GRAPH") -> str | None:
    """Why the installed SGLang's rounds cannot be one graph, for a user who set `switch` to 1, or None."""
    return other_release(f"{switch}=1 is served", ROUND_GRAPHS)


def layer_front_problem() -> str | None:
    """Why a layer's front cannot be two launches on the installed SGLang, for a user who asks for it, or None."""
    return other_release("a front in two launches is served", LAYER_FRONTS)


def divided_indexer_problem() -> str | None:
    """Why ranks cannot divide the indexer's work on the installed SGLang, for a user who asks for it, or None."""
    return other_release("the indexer's work is divided", DIVIDED_INDEXERS)


def few_experts_problem(device_sm: int) -> str | None:
    """Why experts of few tokens cannot have them here, for a user who asks for it, or None; SM is 0 without a GPU."""
    return other_gpu("experts of few tokens are", device_sm) or other_release("experts of few tokens are served", FEW_EXPERTS)


def other_gpu(what_is: str, device_sm: int) -> str | None:
    """Why a user cannot ask this GPU for what is of Hopper alone, or None."""
    if device_sm in (0, 90):
        return None
    return f"{what_is} served on Hopper (SM90) and this device is SM{device_sm}: unset it"
