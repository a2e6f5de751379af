"""The environment variables that this package reads, in the one table that refusals, `doctor` and the docs read too."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One variable; its value is 0 or 1."""

    name: str
    default: str  # what an unset variable is like: 0, 1, or unset where that is neither
    unset: str  # what each does; 1 is a demand: where it cannot be had there is no start
    one: str
    zero: str
    when: str  # to set it


VARIABLES = (
    Variable(
        "NSA_BACKEND_DISABLE",
        default="0",
        unset="this package serves",
        one="SGLang's own backend serves; no start with NAIVE_EAGLE, sparse_... or NSA_BACKEND_REQUIRED=1",
        zero="as unset",
        when="to compare, or to go back",
    ),
    Variable(
        "NSA_BACKEND_REQUIRED",
        default="0",
        unset="a failed load is one log line, and SGLang's backend serves",
        one="no start unless this package serves target and drafts, but EAGLE3's dense ones",
        zero="as unset",
        when="in production",
    ),
    Variable(
        "NSA_BACKEND_ROUND_GRAPH",
        default="unset",
        unset="a round is one CUDA graph where options allow",
        one="beside more options",
        zero="three graphs",
        when="0 to save memory; 1 to learn what forbids it",
    ),
    Variable(
        "NSA_BACKEND_SAMPLED_ROUNDS",
        default="unset",
        unset="rounds of requests with a temperature are one graph too, on 0.5.23 without DP attention",
        one="always",
        zero="three graphs",
        when="1 on 0.5.17 or with DP attention",
    ),
    Variable(
        "NSA_BACKEND_CHECK",
        default="0",
        unset="no check",
        one="checks request slots, lengths and pages of every batch; slow",
        zero="as unset",
        when="after an illegal memory access",
    ),
    Variable(
        "NSA_BACKEND_AUTO_DECODE",
        default="unset",
        unset="the kernel measured fastest, on an H200 with 0.5.23, unless options name one",
        one="always",
        zero="never",
        when="0 to compare; 1 on an H200 with another release",
    ),
    Variable(
        "NSA_BACKEND_LAYER_FRONT",
        default="unset",
        unset="norms, RoPE, quantisation and KV writes before attention are this package's kernels",
        one="always",
        zero="SGLang's",
        when="0 to compare",
    ),
    Variable(
        "NSA_BACKEND_PAIRED_LOGITS",
        default="unset",
        unset="from two requests on, an even number of verified tokens is scored in pairs",
        one="from one request",
        zero="singly",
        when="0 to compare; 1 for one long request, or on 0.5.17",
    ),
    Variable(
        "NSA_BACKEND_SHORT_GRAPHS",
        default="unset",
        unset="up to 64 requests, all within 2048 tokens, skip index scores and top-k in decode or rounds of one graph",
        one="any number; with --dcp-size, and DP attention with --ep-size, too",
        zero="never",
        when="0 for a shorter start",
    ),
    Variable(
        "NSA_BACKEND_SHORT_PREFILLS",
        default="unset",
        unset="prefills of up to 1024 new tokens are one graph, unless the log says why not",
        one="always; never run: shared experts beside others",
        zero="never",
        when="0 for a shorter start",
    ),
    Variable(
        "NSA_BACKEND_DIVIDED_INDEXER",
        default="unset",
        unset="ranks of tensor parallel divide index scores of DeepSeek-V3.2's long prefills",
        one="GLM's and DP attention's too",
        zero="never",
        when="0 to compare",
    ),
    Variable(
        "NSA_BACKEND_FEW_EXPERTS",
        default="unset",
        unset="routers and MoE are this package's kernels where an H200 was faster",
        one="MoE of other sizes too",
        zero="SGLang's",
        when="1 with GLM and --ep-size; 0 to compare",
    ),
    Variable(
        "NSA_BACKEND_MOE_CONFIGS",
        default="1",
        unset="as 1",
        one="this package's MoE tiles (SGLang: fused MoE configs) where SGLang has none for GPU and Triton",
        zero="SGLang's",
        when="0 to compare",
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
