"""Public launch commands for DeepSeek sparse attention on SGLang and NVIDIA Hopper, and what comes of each with this package.

Facts of public pages, as they were read in November 2026: options and values, in our order. Left out are what names a model,
a machine or an address (--model-path, --host, --port, --disaggregation-ib-device), parsers of answers and chat templates.
Nothing is added: SGLang chooses `dsa` for these models by itself.

What comes of a recipe is written down here from SGLang's source, a release at a time; test_dsa_recipes.py holds SGLang to it.
A release that a recipe does not name is left out on purpose: its options are not all there.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

NEW, OLD = "0.5.23", "0.5.17"


@dataclass(frozen=True)
class Served:
    """By which implementations, and what the log says of rounds."""

    decode: str = "fa3"
    prefill: str = "flashmla_sparse"
    steps: int = 0  # N
    three: str | None = None  # what to change for rounds in one graph; "" where they are, None where there are no rounds

    @property
    def kv(self) -> str:
        return "fp8_e4m3" if self.decode == "flashmla_kv" else "bfloat16"


@dataclass(frozen=True)
class Refused:
    """By this package, before any GPU work."""

    because: str  # part of the one sentence
    without: tuple[str, ...]  # options of the recipe, with their values, that its advice takes out
    then: Served  # what comes of the rest


@dataclass(frozen=True)
class Stopped:
    """By SGLang itself, with its own backend too."""

    because: str  # part of its error


@dataclass(frozen=True)
class Recipe:
    source: str
    gpus: str  # how many, and which; Hopper where the page names none
    model: str  # of MODELS
    options: str
    outcomes: Mapping[str, Served | Refused | Stopped]  # by release
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        return shlex.split(self.options)


MODELS = {
    # name: (kind of checkpoints.faithful, hidden size, heads, layers, longest context)
    "DeepSeek-V3.2": ("deepseek-v3.2", 7168, 128, 61, 163840),
    "GLM-5": ("glm-5.1", 6144, 64, 78, 202752),
    "GLM-5.2": ("glm-5.2", 6144, 64, 78, 1048576),
}
"""DeepSeek-V3.2 stands for -Exp and -Speciale too, GLM-5 for 5.1, and GLM-5.2 for 5.3."""

RESPELLED: Mapping[str, Mapping[str, str | None]] = {
    NEW: {
        "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
        "--cuda-graph-bs": "--cuda-graph-bs-decode",
        "--prefill-round-robin-balance": None,
    }
}
"""Words that SGLang's own parser no longer takes on a release, and what it takes for them; None: nothing."""


def respelled(words: list[str], release: str) -> list[str]:
    """As a release spells it."""
    named = RESPELLED.get(release, {})
    return [new for word in words if (new := named.get(word, word)) is not None]


def drafts(steps: int) -> str:
    """The four options of N drafts in a chain."""
    return (
        f" --speculative-algorithm EAGLE --speculative-num-steps {steps} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {steps + 1}"
    )


def alike(outcome: Served | Refused | Stopped) -> dict[str, Served | Refused | Stopped]:
    """On both releases."""
    return {NEW: outcome, OLD: outcome}


def rounds(steps: int, three_on_old: str, **on: str) -> dict[str, Served]:
    """One graph a round on the newer release; the older one says what to change, nothing where it has one graph too."""
    return {NEW: Served(steps=steps, three="", **on), OLD: Served(steps=steps, three=three_on_old, **on)}


DP = "--tp 8 --dp 8 --enable-dp-attention"
NO_DP = "drop --enable-dp-attention"

DIVIDES = "--enable-dsa-prefill-context-parallel"
IN_TURN = "--dsa-prefill-cp-mode round-robin-split"


def older_divides(*without: str, then: Served | None = None) -> Refused:
    """Prefill context parallel on the older release."""
    because = "does not serve --enable-prefill-cp: SGLang 0.5.17 divides a prefill by other rules too"
    return Refused(because, without, then or Served())


TWO_NODES = "--nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:5000"
