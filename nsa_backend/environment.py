"""The environment variables that this package reads, in the one table that refusals, `doctor` and the docs read too."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One variable; its value is 0 or 1."""

    name: str
    default: str  # what an unset variable is like: 0, 1, or unset where that is neither
    effect: str
    when: str  # to change it


VARIABLES = (
    Variable(
        "NSA_BACKEND_DISABLE",
        "0",
        "1: SGLang's own backend serves; no start with NAIVE_EAGLE, sparse_... or NSA_BACKEND_REQUIRED=1",
        "to compare, or to go back",
    ),
    Variable(
        "NSA_BACKEND_REQUIRED",
        "0",
        "1: no start unless this backend serves target and drafts, but EAGLE3's dense ones",
        "in production: a failed load is otherwise one log line",
    ),
    Variable(
        "NSA_BACKEND_ROUND_GRAPH",
        "unset",
        "unset: a round is one CUDA graph where options allow; 1: beside more options, or no start; 0: three graphs",
        "0 to save memory; 1 to learn what forbids it",
    ),
    Variable(
        "NSA_BACKEND_SAMPLED_ROUNDS",
        "unset",
        "1: rounds of requests with a temperature are one graph too; 0: three; unset: one on 0.5.23 without DP attention",
        "1 on 0.5.17 or with DP attention",
    ),
    Variable(
        "NSA_BACKEND_CHECK",
        "0",
        "1: checks request slots, lengths and pages of every batch; slow",
        "after an illegal memory access",
    ),
    Variable(
        "NSA_BACKEND_AUTO_DECODE",
        "unset",
        "unset: on an H200 with 0.5.23 the kernel measured fastest, unless options name one; 1: always, or no start; 0: never",
        "0 to compare; 1 on an H200 with another release",
    ),
    Variable(
        "NSA_BACKEND_LAYER_FRONT",
        "unset",
        "unset: kernels of this package before attention where layers allow, on 0.5.23 and Hopper; 1: always, or no start; "
        "0: SGLang's",
        "0 to compare",
    ),
    Variable(
        "NSA_BACKEND_PAIRED_LOGITS",
        "unset",
        "unset: from two requests on, an even number of verified tokens is scored in pairs, on 0.5.23 and Hopper; "
        "1: from one, or no start; 0: singly",
        "0 to compare; 1 for one long request, or on 0.5.17",
    ),
    Variable(
        "NSA_BACKEND_SHORT_GRAPHS",
        "unset",
        "unset: up to 64 requests, all within 2048 tokens, skip index scores and top-k in decode or rounds of one graph, on "
        "0.5.23 and Hopper; 1: any number, --dcp-size and DP attention with --ep-size too, or no start; 0: never",
        "0 for a shorter start",
    ),
    Variable(
        "NSA_BACKEND_SHORT_PREFILLS",
        "unset",
        "unset: prefills of up to 1024 new tokens are one graph, on 0.5.23 and Hopper, unless the log says why not; "
        "1: always, or no start; 0: never",
        "0 for a shorter start",
    ),
    Variable(
        "NSA_BACKEND_DIVIDED_INDEXER",
        "unset",
        "unset: ranks of tensor parallel divide index scores of DeepSeek-V3.2's long prefills, on 0.5.23 and Hopper; "
        "1: GLM's and DP attention's too, or no start; 0: never",
        "0 to compare",
    ),
    Variable(
        "NSA_BACKEND_FEW_EXPERTS",
        "unset",
        "unset: MoE without --ep-size is two launches up to four tokens (16 GPUs: eight), on eight GPUs five up to 128 "
        "and our products in long prefills, on 0.5.23 and Hopper; 1: other sizes too, or no start; 0: SGLang's",
        "0 to compare",
    ),
    Variable(
        "NSA_BACKEND_MOE_CONFIGS",
        "1",
        "unset or 1: this package's tiles of experts where SGLang has none for GPU and Triton; 0: SGLang's",
        "0 to compare",
    ),
)
SWITCHES = {variable.name: variable for variable in VARIABLES}


def asked(name: str) -> bool | None:
    """What `name`, a key of `SWITCHES`, says; None where it is unset.

    Raises:
        SystemExit: the value is neither 0 nor 1. SGLang's plugin loader would swallow an exception and go on.
    """
    value = os.environ.get(name)
    if value not in (None, "0", "1"):
        raise SystemExit(f"{name} must be 0 or 1, and it is {value!r}")
    return None if value is None else value == "1"


def switched_on(name: str) -> bool:
    """Whether `name`, a key of `SWITCHES`, is 1; SystemExit where it is neither 0 nor 1."""
    return asked(name) is True


def check_switches() -> None:
    """Stop the process where any switch has a bad value."""
    for name in SWITCHES:
        asked(name)


def in_force() -> dict[str, str]:
    """By name, the value of each variable, or its default."""
    return {variable.name: os.environ.get(variable.name, variable.default) for variable in VARIABLES}
