"""Public launch commands for DeepSeek sparse attention on SGLang and NVIDIA Hopper, and what comes of each with this package.

The commands are in `recipes.toml`, by the page that has them: options and values, without those of N drafts (`drafts`). `on`
names the implementations of decode and prefill where they are not fa3 and flashmla_sparse, and `three` what to change for
rounds in one graph: nothing where it is empty. `new` and `old` have what is so on one release alone.

What comes of a recipe is written down there from SGLang's source, a release at a time; test_dsa_recipes.py holds SGLang to it.
A release that a recipe does not name is left out on purpose: its options are not all there.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


def outcome(row: Mapping[str, Any], release: str) -> Served | Refused | Stopped:
    """What comes of a row of `recipes.toml` on a release, "new" or "old"."""
    row = {**row, **row.get(release, {})}
    if "stopped" in row:
        return Stopped(row["stopped"])
    served = Served(*row.get("on", ()), steps=row.get("drafts", 0), three=row.get("three"))
    return Refused(row["refused"], tuple(row["without"]), served) if "refused" in row else served


def recipes() -> dict[str, Recipe]:
    """All of them by name, in the order of the file."""
    found = {}
    for page in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["page"]:
        for name, row in page["recipes"].items():
            options = row["options"] + (drafts(row["drafts"]) if "drafts" in row else "")
            outcomes = {NEW: outcome(row, "new"), OLD: outcome(row, "old")}
            where = page["source"], page["gpus"], page["model"]
            found[name] = Recipe(*where, options, outcomes, row.get("environment", {}))
    return found


RECIPES = recipes()
